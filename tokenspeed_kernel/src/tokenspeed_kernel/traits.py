"""Traits of a call (head_dim, page_size, causal, ...) and the constraints that a kernel puts on them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

__all__ = ["ANY", "AnyValue", "Constraint", "Multiple", "OneOf", "PowerOfTwo", "Range", "Trait", "TraitValue"]

TraitValue = bool | int | float | str | None


class AnyValue:
    """Type of `ANY`: the trait has no default, and a kernel that says nothing about it takes every value."""

    def __repr__(self) -> str:
        return "ANY"


ANY: Final = AnyValue()


@dataclass(frozen=True, slots=True)
class Trait:
    """A property of a call that selection may depend on; it must take few different values (a table is keyed by it).

    Args:
        name: as in `KernelSpec.traits` and in `explain --trait name=value`.
        doc: one line for the listing.
        default: a feature's off value. A kernel that says nothing about the trait takes this value alone, so that
            nobody who forgot about a feature is chosen for it. `ANY`: silence means that every value will do.
    """

    name: str
    doc: str
    default: TraitValue | AnyValue = ANY


class Constraint:
    """Base of the constraints: which values of one trait a kernel takes."""

    def accepts(self, value: TraitValue) -> bool:
        """Say whether the kernel takes the value."""
        raise NotImplementedError

    def describe(self, trait: str) -> str:
        """Say what the trait must be, for messages: `page_size in {16, 64}`."""
        raise NotImplementedError

    def candidates(self) -> tuple[TraitValue, ...] | None:
        """All accepted values where they are few, else None."""
        return None

    def nearest(self, value: TraitValue) -> TraitValue:
        """An accepted value near `value` for the remedy, or None."""
        return None

    def overlaps(self, other: Constraint) -> bool:
        """Say whether some value satisfies both; where that cannot be told, True."""
        for mine, theirs in ((self, other), (other, self)):
            values = mine.candidates()
            if values is not None:
                return any(theirs.accepts(value) for value in values)
        if isinstance(self, Range) and isinstance(other, Range):
            return self.low <= other.high and other.low <= self.high
        return True


@dataclass(frozen=True, slots=True, init=False)
class OneOf(Constraint):
    """The value is one of those listed: `OneOf(16, 64)`."""

    values: tuple[TraitValue, ...]

    def __init__(self, *values: TraitValue) -> None:
        object.__setattr__(self, "values", values)

    def accepts(self, value: TraitValue) -> bool:
        """Say whether the value is listed. True and 1 are different values."""
        return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in self.values)

    def describe(self, trait: str) -> str:
        """Say `trait in {a, b}`, or `trait=a` for one value."""
        if len(self.values) == 1:
            return f"{trait}={self.values[0]}"
        return f"{trait} in {{{', '.join(str(value) for value in self.values)}}}"

    def candidates(self) -> tuple[TraitValue, ...]:
        """The values listed."""
        return self.values

    def nearest(self, value: TraitValue) -> TraitValue:
        """The next larger number listed, else the largest; for other values the first."""
        numbers = sorted(one for one in self.values if isinstance(one, int | float) and not isinstance(one, bool))
        if isinstance(value, int | float) and not isinstance(value, bool) and numbers:
            return next((one for one in numbers if one >= value), numbers[-1])
        return self.values[0]


@dataclass(frozen=True, slots=True)
class Range(Constraint):
    """The value lies between `low` and `high`, both included."""

    low: float
    high: float = float("inf")

    def accepts(self, value: TraitValue) -> bool:
        """Say whether the number lies in the range."""
        return isinstance(value, int | float) and self.low <= value <= self.high

    def describe(self, trait: str) -> str:
        """Say `low <= trait <= high`."""
        return f"{trait} >= {self.low:g}" if self.high == float("inf") else f"{self.low:g} <= {trait} <= {self.high:g}"

    def nearest(self, value: TraitValue) -> TraitValue:
        """The bound on the side of `value`."""
        if not isinstance(value, int | float):
            return None
        bound = self.low if value < self.low else self.high
        return int(bound) if float(bound).is_integer() else bound


@dataclass(frozen=True, slots=True)
class Multiple(Constraint):
    """The value is a multiple of `of`."""

    of: int

    def accepts(self, value: TraitValue) -> bool:
        """Say whether the number is a multiple."""
        return isinstance(value, int) and value % self.of == 0

    def describe(self, trait: str) -> str:
        """Say `trait must be a multiple of n`."""
        return f"{trait} must be a multiple of {self.of}"

    def nearest(self, value: TraitValue) -> TraitValue:
        """The next larger multiple."""
        return -(-value // self.of) * self.of if isinstance(value, int) else None


@dataclass(frozen=True, slots=True)
class PowerOfTwo(Constraint):
    """The value is a power of two between `low` and `high`, both included."""

    low: int = 1
    high: int = 2**62

    def accepts(self, value: TraitValue) -> bool:
        """Say whether the number is such a power of two."""
        return isinstance(value, int) and self.low <= value <= self.high and value & (value - 1) == 0

    def describe(self, trait: str) -> str:
        """Say `trait must be a power of two`, with the bounds where there are any."""
        bounds = "" if (self.low, self.high) == (1, 2**62) else f" from {self.low} to {self.high}"
        return f"{trait} must be a power of two{bounds}"

    def candidates(self) -> tuple[TraitValue, ...]:
        """The powers of two in the range."""
        return tuple(2**exponent for exponent in range(63) if self.low <= 2**exponent <= self.high)

    def nearest(self, value: TraitValue) -> TraitValue:
        """The next larger power of two in the range, else the largest."""
        if not isinstance(value, int):
            return None
        powers = [power for power in self.candidates() if isinstance(power, int)]
        return next((power for power in powers if power >= value), powers[-1])
