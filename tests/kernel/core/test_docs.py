"""The examples in docs/kernel.md and docs/plugins.md do what the text says."""

from __future__ import annotations

import importlib.util
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tokenspeed_kernel import plugins
from tokenspeed_kernel.cli import main
from tokenspeed_kernel.registry import collect_builtin


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _blocks(path: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", path.read_text(encoding="utf-8"), flags=re.DOTALL)


def test_python_examples_of_the_guide_run(repository: Path) -> None:
    names: dict[str, object] = {}
    blocks = _blocks(repository / "docs" / "kernel.md", "python")
    assert len(blocks) == 3
    for block in blocks:
        # Triton has no device here; the same line with the other solution runs.
        lines = [line for line in block.splitlines() if 'solution="triton' not in line]
        exec(compile("\n".join(lines), "docs/kernel.md", "exec"), names)
    activated = names["activated"]
    assert isinstance(activated, torch.Tensor)
    assert activated.shape == (16, 1536)


def test_every_op_is_documented(repository: Path) -> None:
    """In the guide's table, or with its whole contract on its family's page."""
    guide = (repository / "docs" / "kernel.md").read_text(encoding="utf-8")
    for op in collect_builtin().ops():
        family, _, name = op.partition(".")
        page = repository / "docs" / "contracts" / f"{family}.md"
        row = next((line for line in guide.splitlines() if line.startswith(f"| `{family}` |")), "")
        text = row + (page.read_text(encoding="utf-8") if page.exists() else "")
        found = any(form in text for form in (f"`{name}`", f"`{op}", f"`{name}("))
        assert found, f"{op} is neither in docs/kernel.md nor in docs/contracts/{page.name}"


def _commands(path: Path) -> list[str]:
    return [line for block in _blocks(path, "sh") for line in block.splitlines() if line.strip()]


def test_command_lines_of_the_guide_work(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each one, in order and in one folder; a comment says where the status is not 0."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)  # as a user starts them
    commands = [line for line in _commands(repository / "docs" / "kernel.md") if not line.startswith("pip ")]
    used = set()
    for line in commands:
        words = shlex.split(line, comments=True)
        with monkeypatch.context() as settings:
            while "=" in words[0]:
                settings.setenv(*words.pop(0).split("=", 1))
            assert words[0] == "tokenspeed-kernel", line
            if "--interpret" in words:
                continue  # needs a process of its own, see below
            status = _status(words[1:])
        want = int(found[1]) if (found := re.search(r"# status (\d)", line)) else 0
        out = capsys.readouterr()
        assert status == want, f"{line}\n{out.out[-2000:]}{out.err[-2000:]}"
        assert out.out, line
        used.add(words[1])
    assert used >= {"list", "explain", "doctor", "verify", "bench", "tune"}
    assert {path.name for path in tmp_path.iterdir()} == {"norm.svg", "tuning.json"}


def _status(words: list[str]) -> int:
    try:
        return main(words)
    except SystemExit as leaving:  # argparse, after --version
        return int(leaving.code or 0)


def test_interpreted_command_of_the_guide_works(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="needs triton")
    if torch.cuda.is_available():
        pytest.skip("the interpreter is for machines without a GPU")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    lines = [line for line in _commands(repository / "docs" / "kernel.md") if "--interpret" in line]
    assert lines
    for line in lines:
        command = [sys.executable, "-P", "-m", "tokenspeed_kernel.cli", *shlex.split(line, comments=True)[1:]]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "interpreter" in done.stdout


def test_install_command_of_the_guide_works(repository: Path, tmp_path: Path) -> None:
    """Into a folder of its own, without dependencies, with the build backend that is there or pip's own copy."""
    (line,) = [line for line in _commands(repository / "docs" / "kernel.md") if line.startswith("pip ")]
    isolation = ["--no-build-isolation"] if importlib.util.find_spec("hatchling") else []
    options = ["--no-deps", "--quiet", "--target", str(tmp_path), *isolation]
    subprocess.run([sys.executable, "-m", *shlex.split(line), *options], cwd=repository, check=True, timeout=300)
    assert (tmp_path / "tokenspeed_kernel" / "cli.py").exists()
    assert (tmp_path / "bin" / "tokenspeed-kernel").exists()


def test_plugin_of_the_guide_is_accepted(repository: Path, install_wheel: Callable[..., Path]) -> None:
    path = repository / "docs" / "plugins.md"
    project = tomllib.loads(_blocks(path, "toml")[0])["project"]
    plugin, kernel, *_ = _blocks(path, "python")
    entry_points = project["entry-points"][plugins.ENTRY_POINT_GROUP]
    site = install_wheel("acme_kernels_doc", entry_points, {}, project["version"])
    package = site / "acme_kernels"
    package.mkdir()
    for name, source in (("__init__", ""), ("plugin", plugin), ("norm", kernel)):
        (package / f"{name}.py").write_text(source)
    for name in ("acme_kernels", "acme_kernels.plugin"):
        sys.modules.pop(name, None)
    registry = plugins.load_registry()
    assert [one.error for one in registry.plugins if one.name == "acme"] == [""]
    assert registry.specs("norm.rms_norm")[0].name == "acme_rms_norm_sm90"
    assert f"This package has {plugins.API_VERSION[0]}.{plugins.API_VERSION[1]}." in path.read_text(encoding="utf-8")
