"""The cases of an op: shapes, inputs and tolerances. One list in `ops/<family>/cases.py` feeds the tests and the timing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

__all__ = ["Case", "Tolerance"]


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Largest accepted error against the float64 reference: `|got - want| <= absolute + relative * |want|`."""

    relative: float
    absolute: float


_TOLERANCE: Mapping[torch.dtype, Tolerance] = {
    torch.float32: Tolerance(1e-5, 1e-5),
    torch.float16: Tolerance(2e-3, 2e-3),
    torch.bfloat16: Tolerance(1.6e-2, 1e-2),
}


@dataclass(frozen=True, slots=True)
class Case:
    """One call of an op.

    Args:
        op: `family.op`.
        label: what is special about it, with the shape; unique within the op.
        build: makes the arguments from (CPU generator, device, dtype); the same generator state gives the same values.
        outputs: names of the optional output arguments, in the order in which the op returns them.
        tolerance: by dtype of the output, where the usual one does not fit; say why beside it.
        bench: it is a size worth timing (and too large for an interpreter).
    """

    op: str
    label: str
    build: Callable[[torch.Generator, torch.device, torch.dtype], dict[str, Any]]
    outputs: tuple[str, ...] = ("out",)
    tolerance: Mapping[torch.dtype, Tolerance] = field(default_factory=dict)
    bench: bool = False

    def tolerance_of(self, dtype: torch.dtype) -> Tolerance:
        """The tolerance for an output of that dtype; integers must agree exactly."""
        return self.tolerance.get(dtype) or _TOLERANCE.get(dtype) or Tolerance(0.0, 0.0)

    def __str__(self) -> str:
        return f"{self.op}[{self.label}]"
