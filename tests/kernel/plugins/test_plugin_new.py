"""`plugin new`: what it writes, and which names it refuses."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from tokenspeed_kernel.cli import main
from tokenspeed_kernel.plugin_kit.scaffold import new_project, project_files


def test_a_project_of_that_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["plugin", "new", "Turbo.Kernels"]) == 0
    told = capsys.readouterr().out
    folder = tmp_path / "Turbo.Kernels"
    written = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert written == set(project_files("turbo-kernels"))
    assert all(f"  {path}\n" in told for path in written)
    assert "pip wheel --no-deps --wheel-dir dist ./Turbo.Kernels" in told
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    assert project["name"] == "turbo-kernels"
    assert project["entry-points"]["tokenspeed_kernel.plugins"] == {"turbo_kernels": "turbo_kernels.plugin:PLUGIN"}
    for path in written:
        text = (folder / path).read_text()
        assert "${" not in text
        assert "acme_kernels" not in text


@pytest.mark.parametrize("name", ["", "-x", "9lives", "a b", "a/b", "../x", "a--", "lambda", "ü"])
def test_names_that_are_none(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugin", "new", "--directory", str(tmp_path / "made"), "--", name]) == 2
    assert "is no name for a Python package" in capsys.readouterr().err
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("name", ["torch", "triton", "cpu", "reference", "json", "tokenspeed-kernel"])
def test_names_that_are_taken(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugin", "new", name, "--directory", str(tmp_path / "made")]) == 2
    assert "is taken" in capsys.readouterr().err
    assert not (tmp_path / "made").exists()


def test_nothing_is_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    assert main(["plugin", "new", "acme-kernels", "--directory", str(tmp_path)]) == 2
    assert "exists already" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
    (tmp_path / "empty").mkdir()
    assert new_project("acme-kernels", tmp_path / "empty") == tmp_path / "empty"


def test_the_template_of_the_repository_is_what_new_writes(repository: Path) -> None:
    folder = repository / "plugins" / "template"
    files = [path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    there = {path.relative_to(folder).as_posix(): path.read_text(encoding="utf-8") for path in files}
    fix = "write it anew: rm -r plugins/template; tokenspeed-kernel plugin new acme-kernels --directory plugins/template"
    assert there == project_files("acme-kernels"), fix
