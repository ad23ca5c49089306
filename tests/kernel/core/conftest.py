"""A small registry of invented kernels."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tokenspeed_kernel.registry import Registry
from tokenspeed_kernel.signature import Signature
from tokenspeed_kernel.spec import ANYWHERE, CPU, Band, Capability, KernelSpec, OpContract
from tokenspeed_kernel.traits import Constraint, Trait

MakeSpec = Callable[..., KernelSpec]


@pytest.fixture(autouse=True)
def clean(clean_settings: None) -> None:
    """Every test here starts from the plain settings."""


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
