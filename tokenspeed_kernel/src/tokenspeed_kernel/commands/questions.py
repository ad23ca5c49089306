"""Turns what was typed into ops, formats, traits and shapes; what the op does not have is refused with close names."""

from __future__ import annotations

from collections.abc import Iterable

from tokenspeed_kernel.errors import ConfigError, FormatError, close_names
from tokenspeed_kernel.registry import Registry
from tokenspeed_kernel.signature import Format, Signature
from tokenspeed_kernel.traits import ANY, AnyValue, Trait, TraitValue

__all__ = ["named_value", "ops_of", "parse_value", "signature_of", "traits_of"]

_WORDS: dict[str, TraitValue] = {"true": True, "false": False, "none": None}


def ops_of(registry: Registry, names: Iterable[str]) -> tuple[str, ...]:
    """Return the ops that the names of ops and families stand for, all ops where there is no name.

    Raises:
        UnknownOpError: a name is neither.
    """
    wanted: dict[str, None] = {}
    for name in names:
        family = [op for op in registry.ops() if op.startswith(f"{name}.")]
        wanted.update(dict.fromkeys(family or [registry.contract(name).name]))
    return tuple(wanted) or registry.ops()


def signature_of(registry: Registry, op: str, texts: Iterable[str]) -> Signature | None:
    """Return the formats asked for, `[OPERAND=]FORMAT` each; an operand for which nothing was said stays open.

    Raises:
        FormatError: the op has no such operand, or the format is unknown or incomplete.
    """
    operands = registry.contract(op).operands
    formats: dict[str, Format] = {}
    for text in texts:
        operand, named, value = text.rpartition("=")
        fmt = Format.parse(value)
        if named:
            if operand not in operands:
                raise FormatError(f"{op}: unknown operand {operand!r}\nFix: {close_names(operand, operands)}")
            formats[operand] = fmt
            continue
        takers = {name for spec in registry.specs(op) for one in spec.formats for name, had in one if had == fmt}
        # Where no kernel takes the format, every operand has it, so that the explanation can say who wants what.
        formats.update({name: fmt for name in operands if name in takers or not takers})
    return Signature.of(**formats) if formats else None


def traits_of(registry: Registry, op: str, texts: Iterable[str]) -> dict[str, TraitValue]:
    """Return the traits asked for, `NAME=VALUE` each.

    Raises:
        ConfigError: the op has no such trait, or the trait has no such value.
    """
    contract = registry.contract(op)
    values: dict[str, TraitValue] = {}
    for text in texts:
        name, value = named_value(op, text)
        trait = contract.trait(name)
        if trait is None:
            known = [one.name for one in contract.traits]
            raise ConfigError(f"{op}: unknown trait {name!r}\nFix: {close_names(name, known)}")
        values[name] = _checked(registry, op, trait, value)
    return values


def named_value(op: str, text: str) -> tuple[str, str]:
    """Split `NAME=VALUE`.

    Raises:
        ConfigError: it is not of that form.
    """
    name, separator, value = text.partition("=")
    if not separator or not name or not value:
        raise ConfigError(f"{op}: expected NAME=VALUE, got {text!r}\nFix: write the name, an equals sign and the value.")
    return name, value


def parse_value(text: str) -> TraitValue:
    """Read a boolean, None, a number, or a word."""
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _checked(registry: Registry, op: str, trait: Trait, text: str) -> TraitValue:
    """The value, where some call could have it: of the trait's default, of a value that a kernel names, else a whole number."""
    value = parse_value(text)
    known: dict[TraitValue, None] = {}
    numbers = False
    if not (trait.default is ANY or isinstance(trait.default, AnyValue)):
        known[trait.default] = None
    for spec in registry.specs(op):
        constraint = spec.traits.get(trait.name)
        if constraint is not None:
            listed = constraint.candidates()
            known.update(dict.fromkeys(listed or ()))
            numbers = numbers or listed is None
    kinds = {type(one) for one in known} | ({int, float} if numbers else set()) or {int}
    words = sorted(one for one in known if isinstance(one, str))
    if type(value) in kinds and (not isinstance(value, str) or value in words):
        return value
    if float in kinds and isinstance(value, int) and not isinstance(value, bool):
        return value
    expected = {bool: "true or false", int: "a whole number", float: "a number", type(None): "none"}
    wanted = [expected[kind] for kind in (bool, int, float, type(None)) if kind in kinds] + words
    fix = close_names(text, words) if words else f"{trait.name} is: {trait.doc}."
    raise ConfigError(f"{op}: trait {trait.name}: expected {' or '.join(wanted)}, got {text!r}\nFix: {fix}")
