"""What the registry refuses."""

from __future__ import annotations

import pytest

from tokenspeed_kernel.errors import RegistrationError, UnknownOpError
from tokenspeed_kernel.platform import KNOWN_PLATFORMS, parse_platform
from tokenspeed_kernel.plugins import load_registry
from tokenspeed_kernel.registry import Registry, collect_builtin
from tokenspeed_kernel.signature import Signature
from tokenspeed_kernel.spec import Band, KernelSpec, OpContract
from tokenspeed_kernel.traits import Multiple, OneOf, Range


def test_name_clash_names_both(toy: Registry, make_spec) -> None:  # type: ignore[no-untyped-def]
    toy.add([make_spec("fast", "sm_90a", implementation="first.module:kernel")])
    with pytest.raises(RegistrationError, match=r"'fast' is used twice: first\.module:kernel .* second\.module:kernel"):
        toy.add([make_spec("fast", "gfx950", implementation="second.module:kernel")], origin="other 1.0")


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"targets": ("sm_100f",)}, {"targets": ("sm_103a",)}),
        ({"targets": ("nvidia",)}, {"targets": ("sm_90a",)}),
        ({"targets": ("cpu",), "features": frozenset({"avx2"})}, {"targets": ("cpu",)}),
        ({"formats": (Signature.of(q="bf16"),)}, {"formats": (Signature.of(q="bf16", cache="fp16"),)}),
        ({"traits": {"page_size": OneOf(16, 64)}}, {"traits": {"page_size": Multiple(32)}}),
    ],
)
def test_overlapping_tie_is_refused_with_both_names(toy: Registry, make_spec, first, second) -> None:  # type: ignore[no-untyped-def]
    specs = [make_spec(name, *facts.pop("targets", ()), **facts) for name, facts in (("one", dict(first)), ("two", dict(second)))]
    with pytest.raises(RegistrationError, match="one and two tie"):
        toy.add(specs)
    assert [spec.name for spec in toy.specs("toy.decode")] == ["reference_decode"], "nothing of a bad group may stay"


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"targets": ("sm_100a",)}, {"targets": ("sm_103a",)}),
        ({"targets": ("sm_90",)}, {"targets": ("gfx950",)}),
        ({"formats": (Signature.of(q="bf16"),)}, {"formats": (Signature.of(q="fp16"),)}),
        ({"traits": {"page_size": OneOf(16)}}, {"traits": {"page_size": Range(17)}}),
        ({"traits": {"sinks": OneOf(True)}}, {}),
        ({"priority": 1}, {}),
        ({"band": Band.PORTABLE}, {}),
    ],
)
def test_what_cannot_meet_is_no_tie(toy: Registry, make_spec, first, second) -> None:  # type: ignore[no-untyped-def]
    for name, facts in (("one", dict(first)), ("two", dict(second))):
        toy.add([make_spec(name, *facts.pop("targets", ()), **facts)])
    assert len(toy.freeze().specs("toy.decode")) == 3


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"op": "toy.decod"}, "unknown op 'toy.decod'\nFix: known: toy.decode"),
        ({"traits": {"page_sise": OneOf(1)}}, "no trait 'page_sise', it has: page_size, sinks"),
        ({"formats": (Signature.of(query="bf16"),)}, "no operand 'query', it has: q, cache"),
        ({"band": Band.PLUGIN}, "the PLUGIN band is for plugins"),
    ],
)
def test_spec_against_its_contract(toy: Registry, make_spec, facts, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(RegistrationError, match=message):
        toy.add([make_spec("one", **facts)])


@pytest.mark.parametrize(
    ("field", "value"),
    [("op", "decode"), ("name", "Fast Kernel"), ("solution", ""), ("implementation", "module.function")],
)
def test_malformed_spec(make_spec, field: str, value: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(RegistrationError, match=f"bad {field}"):
        make_spec(**{"name": "one", field: value})


def test_unknown_target_in_a_spec(make_spec) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(RegistrationError, match="target: unknown 'sm90'"):
        make_spec("one", "sm90")


def test_plugin_may_not_bring_a_reference(toy: Registry, make_spec) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(RegistrationError, match="a plugin cannot register a reference"):
        toy.add([make_spec("mine", band=Band.REFERENCE)], origin="plugin 1.0")


def test_frozen_registry_refuses_changes(toy: Registry, make_spec) -> None:  # type: ignore[no-untyped-def]
    toy.freeze()
    with pytest.raises(RegistrationError, match="frozen"):
        toy.add([make_spec("late")])


def test_op_defined_twice(toy: Registry, contract: OpContract) -> None:
    with pytest.raises(RegistrationError, match=r"toy\.decode is defined twice"):
        toy.add_contracts([contract])


@pytest.mark.parametrize(("name", "hint"), [("toy.decoed", "toy.decode"), ("decode", "toy.decode"), ("xyz", "known: toy.decode")])
def test_unknown_op_gets_a_suggestion(toy: Registry, name: str, hint: str) -> None:
    with pytest.raises(UnknownOpError, match=hint):
        toy.specs(name)


def test_rank_is_band_then_priority_then_name(toy: Registry, make_spec) -> None:  # type: ignore[no-untyped-def]
    toy.add([make_spec("b", "sm_90"), make_spec("a", "gfx950"), make_spec("c", priority=3), make_spec("d", band=Band.PORTABLE)])
    assert [spec.name for spec in toy.freeze().specs("toy.decode")] == ["c", "a", "b", "d", "reference_decode"]


def test_built_in_kernels() -> None:
    registry = collect_builtin().freeze()
    for op in registry.ops():
        references = [spec for spec in registry.specs(op) if spec.band is Band.REFERENCE]
        assert len(references) == 1, f"{op} needs exactly one reference"
        assert references[0].solution == "reference"
        assert all(references[0].capability.mismatch(parse_platform(name)) is None for name in KNOWN_PLATFORMS)
        others = [spec for spec in registry.specs(op) if spec.band is not Band.REFERENCE]
        plain_cpu = parse_platform("cpu")
        assert any(spec.capability.mismatch(plain_cpu) is None for spec in others), f"{op} has no result on a plain CPU"
        assert registry.contract(op).summary


def test_registry_does_not_depend_on_when_it_is_built() -> None:
    names = [[spec.name for spec in load_registry()] for _ in range(2)]
    assert names[0] == names[1]


def test_spec_is_data(make_spec) -> None:  # type: ignore[no-untyped-def]
    spec: KernelSpec = make_spec("one", requires=("triton",), traits={"page_size": OneOf(1)})
    with pytest.raises(AttributeError):
        spec.name = "two"  # type: ignore[misc]
    with pytest.raises(TypeError):
        spec.traits["sinks"] = OneOf(True)  # type: ignore[index]
    assert spec.libraries[0].requirement == "triton"
