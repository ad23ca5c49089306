"""Compares results with the reference's, and says by how much they differ."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from tokenspeed_kernel.case import Case
from tokenspeed_kernel.errors import TokenSpeedKernelError
from tokenspeed_kernel.testing.tensors import tensors_of

__all__ = ["ConformanceError", "Difference", "compare"]

# A result that passes element by element within a loose tolerance must still point in the reference's direction.
_LEAST_COSINE: Final = 0.995
# Below this multiple of the absolute tolerance the values are noise, and have no direction.
_NOISE: Final = 10.0


class ConformanceError(TokenSpeedKernelError, AssertionError):
    """A kernel's result is not the reference's, or it broke the op's contract."""


@dataclass(frozen=True, slots=True)
class Difference:
    """How far a result is from the reference; the worst of several outputs.

    Attributes:
        absolute: largest absolute error.
        relative: largest error relative to the reference's value, where that exceeds the absolute tolerance.
        cosine: cosine of the angle between result and reference; 1 where both are zero or empty.
    """

    absolute: float = 0.0
    relative: float = 0.0
    cosine: float = 1.0

    def worst(self, other: Difference) -> Difference:
        """The worse of each figure."""
        return Difference(
            max(self.absolute, other.absolute), max(self.relative, other.relative), min(self.cosine, other.cosine)
        )


def compare(case: Case, label: str, got: Any, want: Any) -> Difference:
    """Hold every tensor of a result against the reference's.

    Args:
        case: its tolerances count, and its `comparable` is applied to neither side (the caller does that).
        label: what was run, for the message.
        got: result of the kernel, nested as the op returns it.
        want: result of the reference.
    Raises:
        ConformanceError: shape, dtype, device or a value differs; the message says which, where and by how much.
    """
    mine, truth = list(tensors_of(got, "output")), list(tensors_of(want, "output"))
    if [name for name, _ in mine] != [name for name, _ in truth]:
        raise ConformanceError(f"{label}: expected {_names(truth)}, got {_names(mine)}")
    total = Difference()
    for (name, one), (_, other) in zip(mine, truth, strict=True):
        total = total.worst(_compare(case, f"{label}: {name}", one, other))
    return total


def _names(found: Sequence[tuple[str, torch.Tensor]]) -> str:
    return ", ".join(name for name, _ in found) or "no tensor"


def _compare(case: Case, label: str, got: torch.Tensor, want: torch.Tensor) -> Difference:
    for fact in ("shape", "dtype", "device"):
        if getattr(got, fact) != getattr(want, fact):
            raise ConformanceError(f"{label}: expected {fact} {getattr(want, fact)}, got {getattr(got, fact)}")
    if want.numel() == 0:
        return Difference()
    tolerance = case.tolerance_of(want.dtype)
    if not want.dtype.is_floating_point or want.dtype is torch.float4_e2m1fn_x2:
        return _integers(case, label, got, want)
    mine, truth = got.double(), want.double()
    finite = truth.isfinite()
    special = ~finite & ~((mine == truth) | (mine.isnan() & truth.isnan()))
    if bool(special.any()):
        raise ConformanceError(_describe(label, mine, truth, special, "where the reference is not finite"))
    error = torch.where(finite, (mine - truth).abs(), 0.0)
    error = torch.where(finite & ~mine.isfinite(), math.inf, error)
    wrong = error > tolerance.absolute + tolerance.relative * torch.where(finite, truth.abs(), 0.0)
    if bool(wrong.any()):
        limits = f"beyond {tolerance.absolute:.3g} + {tolerance.relative:.3g} * |expected|"
        raise ConformanceError(_describe(label, mine, truth, wrong, limits))
    large = finite & (truth.abs() > tolerance.absolute)
    relative = torch.where(large, error / truth.abs(), 0.0)
    cosine = _cosine(torch.where(finite, mine, 0.0), torch.where(finite, truth, 0.0))
    size = float(torch.where(finite, truth, 0.0).square().mean().sqrt())
    if size > _NOISE * tolerance.absolute and cosine < _LEAST_COSINE:
        raise ConformanceError(f"{label}: expected a cosine of at least {_LEAST_COSINE} to the reference, got {cosine:.6f}")
    return Difference(float(error.max()), float(relative.max()), cosine)


def _integers(case: Case, label: str, got: torch.Tensor, want: torch.Tensor) -> Difference:
    if want.dtype is torch.float4_e2m1fn_x2:
        got, want = got.view(torch.uint8), want.view(torch.uint8)
    tolerance = case.tolerance.get(want.dtype)
    if tolerance is None:
        wrong = got != want
        limits = "where every number must agree"
    else:
        error = (got.double() - want.double()).abs()
        wrong = error > tolerance.absolute + tolerance.relative * want.double().abs()
        limits = f"beyond {tolerance.absolute:.3g} + {tolerance.relative:.3g} * |expected|"
    if bool(wrong.any()):
        raise ConformanceError(_describe(label, got, want, wrong, limits))
    if tolerance is None:
        return Difference()
    return Difference(float(error.max()), 0.0, _cosine(got.double(), want.double()))


def _describe(label: str, got: torch.Tensor, want: torch.Tensor, wrong: torch.Tensor, limits: str) -> str:
    places = wrong.nonzero()
    first = tuple(places[0].tolist())
    return (
        f"{label}: {len(places)} of {wrong.numel()} elements differ {limits}; "
        f"first at {list(first)}: expected {want[first].item():.8g}, got {got[first].item():.8g}"
    )


def _cosine(mine: torch.Tensor, truth: torch.Tensor) -> float:
    # Scaled first: squares of large values would overflow.
    scale = max(float(mine.abs().max()), float(truth.abs().max()))
    if scale == 0.0:
        return 1.0
    mine, truth = mine.flatten() / scale, truth.flatten() / scale
    norms = float(mine.norm() * truth.norm())
    return min(1.0, float(mine @ truth) / norms) if norms > 0 else 0.0
