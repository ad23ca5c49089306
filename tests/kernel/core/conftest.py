"""A small registry of invented kernels, and a wheel written to disk."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tokenspeed_kernel import dispatch
from tokenspeed_kernel.registry import Registry
from tokenspeed_kernel.signature import Signature
from tokenspeed_kernel.spec import ANYWHERE, CPU, Band, Capability, KernelSpec, OpContract
from tokenspeed_kernel.traits import Constraint, Trait

MakeSpec = Callable[..., KernelSpec]


@pytest.fixture(autouse=True)
def clean_settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No setting of the caller's environment, and nothing bound, before and after."""
    for name in ("TOKENSPEED_KERNEL_DISABLE", "TOKENSPEED_KERNEL_DISABLE_PLUGINS"):
        monkeypatch.delenv(name, raising=False)
    dispatch.reset()
    yield
    dispatch.reset()


@pytest.fixture
def contract() -> OpContract:
    """An op with a size trait and a feature trait."""
    return OpContract(
        name="toy.decode",
        operands=("q", "cache"),
        parameters=("q", "cache"),
        traits=(Trait("page_size", "tokens in a page"), Trait("sinks", "attention sinks", default=False)),
    )


@pytest.fixture
def make_spec() -> MakeSpec:
    """Make a spec of the toy op; what is not given is the plainest choice."""

    def make(
        name: str,
        *targets: str,
        band: Band = Band.SPECIALIZED,
        formats: tuple[Signature, ...] = (),
        traits: dict[str, Constraint] | None = None,
        requires: tuple[str, ...] = (),
        solution: str = "toy",
        priority: int = 0,
        features: frozenset[str] = frozenset(),
        implementation: str = "math:sqrt",
        op: str = "toy.decode",
        interpreter: bool = False,
    ) -> KernelSpec:
        capability = Capability(targets, features, interpreter) if targets else CPU
        return KernelSpec(op, name, solution, band, implementation, capability, formats, traits or {}, requires, priority)

    return make


@pytest.fixture
def toy(contract: OpContract, make_spec: MakeSpec) -> Registry:
    """A registry, still open, with the toy op and its reference."""
    registry = Registry()
    registry.add_contracts([contract])
    reference = make_spec("reference_decode", band=Band.REFERENCE, solution="reference")
    registry.add([KernelSpec(reference.op, reference.name, "reference", Band.REFERENCE, "math:sqrt", ANYWHERE)])
    return registry


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
