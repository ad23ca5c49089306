"""Weights in the memory order that a platform multiplies by fastest: packed once, used for every product.

The life of a weight: load it, `pack_weight` it, let go of the original, multiply with the packed one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tokenspeed_kernel.dispatch import BoundOp
from tokenspeed_kernel.errors import ShapeError
from tokenspeed_kernel.ops.gemm.contract import PACK_WEIGHT
from tokenspeed_kernel.ops.operands import OPERAND_ERRORS, check_operands, refuse_kinds, tensor_error
from tokenspeed_kernel.quantized import QuantizedTensor
from tokenspeed_kernel.signature import Format
from tokenspeed_kernel.spec import KernelSpec

__all__ = ["PackedWeight", "pack_weight", "packing_kernel"]

_pack_weight = BoundOp(PACK_WEIGHT)
_table = _pack_weight.table

Multiply = Callable[[torch.Tensor, Any, torch.Tensor | None, torch.Tensor | None], torch.Tensor]
"""Takes x, the packed data, bias and out."""


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A weight [out_features, in_features] that one kernel has packed for itself.

    Attributes:
        data: in that kernel's own order and type; no other may read it.
        out_features: rows of the weight.
        in_features: columns of the weight.
        multiply: the kernel's product, bound when the weight was packed.
        solution: who packed it.
        dtypes: of x; where empty, that of data alone. With several, the bias may have x's dtype or be fp32.
    """

    data: Any
    out_features: int
    in_features: int
    multiply: Multiply
    solution: str
    dtypes: tuple[torch.dtype, ...] = ()

    def __post_init__(self) -> None:
        if not self.dtypes:
            object.__setattr__(self, "dtypes", (self.data.dtype,))

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None = None, *, out: torch.Tensor | None = None) -> torch.Tensor:
        """Multiply: `x @ weight.T + bias`, as `mm` does.

        Args:
            x: [..., in_features], one of `dtypes`, any strides.
            bias: optional [out_features], dtype of x; beside a quantized weight it may be fp32.
            out: optional [..., out_features], dtype of x, written in place; it must not overlap an input.
        Returns:
            out, or a new contiguous [..., out_features] of x's dtype.
        Raises:
            ShapeError: shapes or dtypes disagree.
        """
        try:
            shape, dtype = x.shape, x.dtype
        except AttributeError:
            raise tensor_error(PACK_WEIGHT.name, x=x) from None
        if not shape or shape[-1] != self.in_features or dtype not in self.dtypes:
            kinds = " or ".join(map(str, self.dtypes))
            raise ShapeError(PACK_WEIGHT.name, expected=f"x [..., {self.in_features}] {kinds}", got=f"{list(shape)} {dtype}")
        if bias is not None and (bias.shape != (self.out_features,) or not self._takes_bias(bias.dtype, dtype)):
            expected = f"bias [{self.out_features}] {dtype}"
            raise ShapeError(PACK_WEIGHT.name, expected=expected, got=f"{list(bias.shape)} {bias.dtype}")
        if out is not None and (out.shape != (*shape[:-1], self.out_features) or out.dtype is not dtype):
            expected = f"out {[*shape[:-1], self.out_features]} {dtype}"
            raise ShapeError(PACK_WEIGHT.name, expected=expected, got=f"{list(out.shape)} {out.dtype}")
        if torch.is_grad_enabled() and (x.requires_grad or (bias is not None and bias.requires_grad)):
            with torch.no_grad():
                return self.multiply(x, self.data, bias, out)
        return self.multiply(x, self.data, bias, out)

    def _takes_bias(self, bias: torch.dtype, x: torch.dtype) -> bool:
        return bias is x or (len(self.dtypes) > 1 and bias is torch.float32)


def pack_weight(
    weight: torch.Tensor | QuantizedTensor, *, round_activations: bool = False, solution: str | None = None
) -> PackedWeight:
    """Pack a weight for products with few and with many rows.

    Args:
        weight: [out_features, in_features] fp32, bf16 or fp16, any strides, or a `QuantizedTensor`, which stays quantized. It
            may be freed afterwards, unless the packed one shares its memory, as the `plain` solution's does.
        round_activations: allow products with a `QuantizedTensor` to round x to 8 bits, each run of 32 numbers of a row to
            multiples of its largest magnitude / 127. Byte products are several times faster, and engines for GGUF files do so;
            it adds a relative error of about 0.5% to each output. Without it x is never rounded.
        solution: solution or kernel to insist on; chosen by the registry where left out.
    Returns:
        The packed weight; call it with x.
    Raises:
        ShapeError: not a matrix.  NoKernelError: nothing qualifies.
    Source: Goto and van de Geijn, Anatomy of High-Performance Matrix Multiplication, ACM TOMS 34 (2008), section 5 (packing).
    """
    try:
        if isinstance(weight, torch.Tensor):
            kind: torch.dtype | Format = weight.dtype
        elif isinstance(weight, QuantizedTensor):
            kind = weight.format
        else:
            raise tensor_error(PACK_WEIGHT.name, weight=weight)
        if len(weight.shape) != 2:
            raise ShapeError(PACK_WEIGHT.name, expected="weight [out_features, in_features]", got=f"{list(weight.shape)}")
        device = weight.device
        key = (device, kind, round_activations, solution)
        kernel = _table.get(key)
        if kernel is None:
            check_operands(PACK_WEIGHT.name, weight=weight)
            kernel = _pack_weight.bind(key, device, (kind,), (round_activations,), solution)
        if isinstance(weight, torch.Tensor) and weight.requires_grad:
            weight = weight.detach()
        packed: PackedWeight = kernel(weight)
        return packed
    except OPERAND_ERRORS as error:
        refuse_kinds(pack_weight, locals(), error)
        raise


def packing_kernel(weight_format: torch.dtype | Format, device: torch.device, *, round_activations: bool = False) -> KernelSpec:
    """Return what is known of the kernel that `pack_weight` would choose: its name, its band, how it was verified.

    An engine asks before it loads, to decide whether weights of a format are worth keeping in it.

    Args:
        weight_format: dtype of the weight, or format of a `QuantizedTensor`.
        device: where the weight will be.
        round_activations: as in `pack_weight`.
    Returns:
        The kernel's spec.
    Raises:
        NoKernelError: nothing qualifies.
    Source: packing for the order in which a product reads, Goto and van de Geijn, ACM TOMS 34(3), 2008, section 4.
    """
    return _pack_weight.choose(device, (weight_format,), (round_activations,))
