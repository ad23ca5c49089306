"""What is tested is what this checkout's wheels installed, and not a package of the same name from elsewhere."""

from __future__ import annotations

import importlib
import importlib.metadata
import platform
from pathlib import Path

import pytest

PAIRS = [("tokenspeed-kernel", "tokenspeed_kernel"), ("tokenspeed-engine", "tokenspeed_engine")]
if platform.machine().lower() in ("x86_64", "amd64"):
    PAIRS.append(("tokenspeed-kernel-cpu", "plugins/tokenspeed_kernel_cpu"))


@pytest.mark.parametrize(("distribution", "folder"), PAIRS)
def test_installed_files_are_this_checkouts(repository: Path, distribution: str, folder: str) -> None:
    package = Path(folder).name
    source = repository / folder / "src" / package
    installed = Path(importlib.import_module(package).__file__ or "").parent
    assert not installed.is_relative_to(repository / folder), f"{package} is imported from the checkout: {installed}"
    # What only builds the extension stays behind: a wheel carries what it compiles to.
    files = [p for p in sorted(source.rglob("*.py")) if "csrc" not in p.relative_to(source).parts]
    ours = {p.relative_to(source): p.read_bytes() for p in files}
    theirs = {p.relative_to(installed): p.read_bytes() for p in sorted(installed.rglob("*.py"))}
    assert set(ours) == set(theirs), f"other files than the checkout's: {sorted(set(ours) ^ set(theirs))}"
    different = [str(name) for name in ours if ours[name] != theirs[name]]
    assert not different, (
        f"the installed {distribution} is not built from this checkout ({different}). "
        "Fix: install both by path in one command, as tests/run.py does."
    )


@pytest.mark.parametrize(("distribution", "folder"), PAIRS)
def test_metadata(repository: Path, distribution: str, folder: str) -> None:
    metadata = importlib.metadata.metadata(distribution)
    module = importlib.import_module(Path(folder).name)
    assert metadata["Version"] == module.__version__
    assert metadata["License-Expression"] == "Apache-2.0"
    # The kernel package alone names the least version of torch; an upper bound would let pip replace the one that is there.
    hard = [r for r in importlib.metadata.requires(distribution) or [] if "extra ==" not in r]
    torch_requirements = [r for r in hard if r.split(";")[0].strip().startswith("torch")]
    allowed = "torch>=2.9" if distribution == "tokenspeed-kernel" else "torch"
    assert [r.split(";")[0].strip() for r in torch_requirements] in ([allowed], [])
    impostor = [r for r in importlib.metadata.requires(distribution) or [] if r.startswith(("tokenspeed-kernel", "tokenspeed-mla"))]
    assert not impostor, f"a dependency that a public registry would fill with another project's package: {impostor}"
