"""What `python -m perf hopper` is made of: families of shapes, the work of a shape with what was promised for it, and its result.

A module of this folder adds a family by one definition; the frame, `perf.hopper.command`, finds, runs, plots and compares it::

    FAMILY = Family(name="gqa_decode", summary="...", shapes=SHAPES, work=work, measure=measure)

`work(shape)` needs no GPU: it says what the shape is called, how many bytes and operations it takes at least, and its goals.
`measure(shape, bench)` runs on one: it checks our result against float32, times ours and the peers in the same run and returns a
`Result`; `bench.measured` does the timing. A peer that is not installed is a text instead of calls: why it is not there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

__all__ = ["LIMIT", "Calls", "Error", "Family", "Goal", "Peer", "Rates", "Result", "Work"]

Calls = Sequence[Callable[[], object]]
"""One call for each of several sets of tensors, which together are larger than the L2 cache."""
Peer = Calls | str | Callable[[], Calls | str]
"""A peer's calls, what makes them when it is its turn, or why there are none."""

LIMIT = "limit"
"""As what a goal is measured over: the time that the device needs at least, at the rates measured in the same run."""


@dataclass(frozen=True, slots=True)
class Rates:
    """What the device reaches, measured in the same run."""

    read_bytes_per_s: float
    bf16_flops_per_s: float
    fp8_flops_per_s: float


@dataclass(frozen=True, slots=True)
class Goal:
    """At least `ratio` times as fast as the fastest of the peers named, or that share of the limit.

    Attributes:
        ratio: 1.3 is "1.3 times as fast"; over `LIMIT`, 0.9 is "90% of what the device reaches".
        over: names of peers as they stand in `Result.peers_us`, or (`LIMIT`,). Peers that are not there are left out; without any
            the goal is neither met nor missed.
    """

    ratio: float
    over: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.ratio:.0%} of the limit" if self.over == (LIMIT,) else f"{self.ratio:g}x {' or '.join(self.over)}"


@dataclass(frozen=True, slots=True)
class Work:
    """A shape's name, its floor in two numbers, and what was promised for it.

    Attributes:
        case: names the row within its family, and in saved results: it must not change from run to run.
        size_bytes: the fewest bytes that must pass through device memory: inputs read once, outputs written once.
        flops: floating-point operations of the matrix products.
        goals: all of them must be met.
        dtype: the operands of the products, whose rate is the limit's.
    """

    case: str
    size_bytes: int
    flops: float = 0.0
    goals: tuple[Goal, ...] = ()
    dtype: Literal["bf16", "fp8"] = "bf16"

    def limit_us(self, rates: Rates) -> float:
        """The time that the device needs at least."""
        flops_per_s = rates.fp8_flops_per_s if self.dtype == "fp8" else rates.bf16_flops_per_s
        return max(self.size_bytes / rates.read_bytes_per_s, self.flops / flops_per_s) * 1e6


@dataclass(frozen=True, slots=True)
class Error:
    """How far our result is from the reference in float32; a figure that does not apply is None."""

    cosine: float
    max_abs: float
    lse: float | None = None

    @staticmethod
    def of(got: Any, want: Any, lse: Any = None, want_lse: Any = None) -> Error:
        """Of tensors of one shape; compared in float64. NaN in either is a cosine of NaN, which meets nothing."""
        one, other = got.double().flatten(), want.double().flatten()
        norm = one.norm() * other.norm()
        cosine = float(one @ other / norm) if float(norm) != 0 else float(one.norm() == other.norm())
        lse_error = None
        if lse is not None:
            same = lse == want_lse  # both -inf where there is no key
            lse_error = float((lse.double() - want_lse.double()).masked_fill(same, 0).abs().max())
        return Error(cosine, float((one - other).abs().max()), lse_error)

    def worst(self, other: Error) -> Error:
        """The worse of both in each figure; NaN is worst."""
        both = [x for x in (self.lse, other.lse) if x is not None]
        return Error(
            math.nan if math.isnan(self.cosine + other.cosine) else min(self.cosine, other.cosine),
            math.nan if math.isnan(self.max_abs + other.max_abs) else max(self.max_abs, other.max_abs),
            None if not both else math.nan if math.isnan(sum(both)) else max(both),
        )

    def problem(self, *, cosine: float = 0.99999, max_abs: float = math.inf, lse: float = 1e-3) -> str:
        """What is out of bounds; empty where nothing is."""
        if not self.cosine > cosine:
            return f"wrong: cosine {self.cosine:.7f}, must be above {cosine}"
        if not self.max_abs <= max_abs:
            return f"wrong: off by {self.max_abs:.3g}, must be within {max_abs:.3g}"
        if self.lse is not None and not self.lse <= lse:
            return f"wrong: LSE off by {self.lse:.3g}, must be within {lse:.3g}"
        return ""


@dataclass(frozen=True, slots=True)
class Result:
    """What was measured of a work.

    Attributes:
        ours_us: our time, the mean of two measurements; None where there is none, and `note` says why.
        spread_us: how far apart those two were, before and after the peers.
        solution: the kernel that was timed.
        peers_us: their times.
        absent: why a peer has no time.
        error: of our result, which is checked before it is timed.
    """

    work: Work
    ours_us: float | None
    spread_us: float = 0.0
    solution: str = ""
    peers_us: Mapping[str, float] = field(default_factory=dict)
    absent: Mapping[str, str] = field(default_factory=dict)
    error: Error | None = None
    note: str = ""

    @staticmethod
    def failed(work: Work, note: str, error: Error | None = None) -> Result:
        """A work that has no time."""
        return Result(work, None, error=error, note=note)

    def with_note(self, note: str) -> Result:
        """The same with a further note."""
        return replace(self, note="; ".join(x for x in (self.note, note) if x))

    def ratio(self, goal: Goal, rates: Rates) -> float | None:
        """How far we are of the goal: to be held against `goal.ratio`; None where it cannot be said."""
        if self.ours_us is None:
            return None
        if goal.over == (LIMIT,):
            return self.work.limit_us(rates) / self.ours_us
        known = [self.peers_us[name] for name in goal.over if name in self.peers_us]
        return min(known) / self.ours_us if known else None

    def met(self, goal: Goal, rates: Rates) -> bool | None:
        """Whether it is met; None where it cannot be said. A result that is wrong has no time and meets nothing."""
        ratio = self.ratio(goal, rates)
        if ratio is None:
            return False if self.error is not None and self.ours_us is None else None
        return ratio >= goal.ratio


@dataclass(frozen=True, slots=True)
class Family:
    """Shapes of one kind of work and how they are measured; see the module's text.

    Attributes:
        name: of the module, such as "gqa_decode".
        summary: one line.
        shapes: in the order in which they are measured; the first two are those of a quick run.
        work: of a shape; needs no GPU.
        measure: of a shape, on one. TokenSpeedKernelError, RuntimeError and OSError that it raises become the row's note.
    """

    name: str
    summary: str
    shapes: Sequence[Any]
    work: Callable[[Any], Work]
    measure: Callable[[Any, Any], Result]
