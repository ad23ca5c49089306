"""Weights in the memory order that a platform multiplies by fastest: packed once, used for every product.

The life of a weight: load it, `pack_weight` it, let go of the original, multiply with the packed one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from tokenspeed_kernel.dispatch import BoundOp
from tokenspeed_kernel.errors import ShapeError
from tokenspeed_kernel.ops.gemm.contract import PACK_WEIGHT

__all__ = ["PackedWeight", "pack_weight"]

_pack_weight = BoundOp(PACK_WEIGHT)

Multiply = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None], torch.Tensor]
"""Takes x, the packed data, bias and out."""


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A weight [out_features, in_features] that one kernel has packed for itself.

    Attributes:
        data: in that kernel's own order; no other may read it.
        out_features: rows of the weight.
        in_features: columns of the weight.
        multiply: the kernel's product, bound when the weight was packed.
        solution: who packed it.
    """

    data: torch.Tensor
    out_features: int
    in_features: int
    multiply: Multiply
    solution: str

    def __call__(
        self, x: torch.Tensor, bias: torch.Tensor | None = None, *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Multiply: `x @ weight.T + bias`, as `mm` does.

        Args:
            x: [..., in_features], dtype of the weight, any strides.
            bias: optional [out_features], dtype of the weight.
            out: optional [..., out_features], dtype of the weight, written in place; it must not overlap an input.
        Returns:
            out, or a new contiguous [..., out_features].
        Raises:
            ShapeError: shapes or dtypes disagree.
        """
        if x.dim() == 0 or x.shape[-1] != self.in_features or x.dtype is not self.data.dtype:
            raise ShapeError(
                PACK_WEIGHT.name,
                expected=f"x [..., {self.in_features}] {self.data.dtype}",
                got=f"{list(x.shape)} {x.dtype}",
            )
        if bias is not None and (bias.shape != (self.out_features,) or bias.dtype is not self.data.dtype):
            raise ShapeError(
                PACK_WEIGHT.name,
                expected=f"bias [{self.out_features}] {self.data.dtype}",
                got=f"{list(bias.shape)} {bias.dtype}",
            )
        if out is not None and (out.shape != (*x.shape[:-1], self.out_features) or out.dtype is not x.dtype):
            raise ShapeError(
                PACK_WEIGHT.name,
                expected=f"out {[*x.shape[:-1], self.out_features]} {x.dtype}",
                got=f"{list(out.shape)} {out.dtype}",
            )
        return self.multiply(x, self.data, bias, out)


def pack_weight(weight: torch.Tensor, *, solution: str | None = None) -> PackedWeight:
    """Pack a weight for products with few and with many rows.

    Args:
        weight: [out_features, in_features] fp32, bf16 or fp16, any strides. It may be freed afterwards, unless the packed
            one shares its memory, as the `plain` solution's does.
        solution: solution or kernel to insist on; chosen by the registry where left out.
    Returns:
        The packed weight; call it with x.
    Raises:
        ShapeError: not a matrix.  NoKernelError: nothing qualifies.
    Source: Goto and van de Geijn, Anatomy of High-Performance Matrix Multiplication, ACM TOMS 34 (2008), section 5 (packing).
    """
    if weight.dim() != 2:
        raise ShapeError(PACK_WEIGHT.name, expected="weight [out_features, in_features]", got=f"{list(weight.shape)}")
    packed: PackedWeight = _pack_weight.kernel(weight.device, (weight.dtype,), (), solution)(weight)
    return packed
