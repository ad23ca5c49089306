"""What several families of kernel tests share: clean settings, and a wheel written to disk."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tokenspeed_kernel import dispatch


@pytest.fixture
def clean_settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No setting of the caller's environment, and nothing bound, before and after."""
    for name in ("TOKENSPEED_KERNEL_DISABLE", "TOKENSPEED_KERNEL_DISABLE_PLUGINS", "TOKENSPEED_KERNEL_PREFER"):
        monkeypatch.delenv(name, raising=False)
    dispatch.configure(None)
    yield
    dispatch.configure(None)


@pytest.fixture
def install_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Lay out an installed distribution in a folder of its own on sys.path, as pip would."""

    def install(name: str, entry_points: dict[str, str], modules: dict[str, str], version: str = "1.0") -> Path:
        site = tmp_path / f"site_{name}"
        info = site / f"{name}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        lines = [f"{key} = {value}" for key, value in entry_points.items()]
        (info / "entry_points.txt").write_text("\n".join(["[tokenspeed_kernel.plugins]", *lines, ""]))
        for module, source in modules.items():
            (site / f"{module}.py").write_text(source)
        monkeypatch.syspath_prepend(str(site))
        return site

    return install
