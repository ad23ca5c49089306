"""The cases of an op: shapes, inputs and tolerances. One list in `ops/<family>/cases.py` feeds the tests and the timing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

__all__ = ["Case", "Cost", "Tolerance"]


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Largest accepted error against the float64 reference: `|got - want| <= absolute + relative * |want|`."""

    relative: float
    absolute: float


@dataclass(frozen=True, slots=True)
class Cost:
    """Least work of a call of an op, where it is not every tensor read or written once.

    A family's `costs.py` has `COSTS`, by op; a case's own functions go before it.

    Args:
        moved_bytes: bytes read and written, from (arguments, result).
        flops: floating-point operations, from the arguments; None where bandwidth alone is the limit.
    """

    moved_bytes: Callable[[dict[str, Any], Any], int] | None = None
    flops: Callable[[dict[str, Any]], int] | None = None


_TOLERANCE: Mapping[torch.dtype, Tolerance] = {
    torch.float32: Tolerance(1e-5, 1e-5),
    torch.float16: Tolerance(2e-3, 2e-3),
    torch.bfloat16: Tolerance(1.6e-2, 1e-2),
}


@dataclass(frozen=True, slots=True)
class Case:
    """One call of an op.

    An op may return nothing, a tensor, a tuple of tensors, or an object that holds some (a `QuantizedTensor`). All tensors in
    it are compared: those of the dtypes in `tolerance` and the usual floats within a tolerance, the others exactly.

    Args:
        op: `family.op`.
        label: what is special about it, with the shape; unique within the op.
        build: makes the arguments from (CPU generator, device, dtype); the same generator state gives the same values. Tensors
            may be views of larger ones: what lies around them must stay as it is.
        outputs: names of the optional output arguments, in the order in which the op returns them; empty where it has none.
        tolerance: by dtype of the output, where the usual one does not fit; say why beside it.
        bench: it is a size worth timing (and too large for an interpreter).
        mutated: names of the arguments that the op writes in place (a cache); they are compared as outputs are.
        dtypes: those that `build` may be asked for; empty for fp32, bf16 and fp16.
        comparable: turns the op's result into what is compared, where equal bits are not what the op promises: the values of a
            packed tensor, the ids in sorted order.
        moved_bytes: least number of bytes that the call must read and write, from (arguments, result); where left out, every
            tensor of the arguments and of the result is counted once, and one that is written in place twice.
        flops: number of floating-point operations, from the arguments; None where bandwidth alone is the limit.
    """

    op: str
    label: str
    build: Callable[[torch.Generator, torch.device, torch.dtype], dict[str, Any]]
    outputs: tuple[str, ...] = ("out",)
    tolerance: Mapping[torch.dtype, Tolerance] = field(default_factory=dict)
    bench: bool = False
    mutated: tuple[str, ...] = ()
    dtypes: tuple[torch.dtype, ...] = ()
    comparable: Callable[[Any], Any] | None = None
    moved_bytes: Callable[[dict[str, Any], Any], int] | None = None
    flops: Callable[[dict[str, Any]], int] | None = None

    def tolerance_of(self, dtype: torch.dtype) -> Tolerance:
        """The tolerance for an output of that dtype; of one that is not listed, each number must agree exactly."""
        return self.tolerance.get(dtype) or _TOLERANCE.get(dtype) or Tolerance(0.0, 0.0)

    def takes(self, dtype: torch.dtype) -> bool:
        """Say whether `build` may be asked for inputs of that dtype."""
        return dtype in (self.dtypes or _TOLERANCE)

    def __str__(self) -> str:
        return f"{self.op}[{self.label}]"
