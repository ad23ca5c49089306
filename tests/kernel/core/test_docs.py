"""The examples in docs/kernel.md and docs/plugins.md do what the text says."""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tokenspeed_kernel import plugins
from tokenspeed_kernel.cli import main
from tokenspeed_kernel.registry import collect_builtin


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


def test_command_lines_of_the_guide_work(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (repository / "docs" / "kernel.md").read_text(encoding="utf-8")
    commands = re.findall(r"^    tokenspeed-kernel (.*?)(?: +#.*)?$", text, flags=re.MULTILINE)
    assert len(commands) >= 4
    for command in commands:
        assert main(command.split()) in (0, 1), command
    capsys.readouterr()


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
