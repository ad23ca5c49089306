"""An operand that may be quantized, as `torch.library` ops take it: its tensors one by one, its format as text."""

from __future__ import annotations

import torch

from tokenspeed_kernel.quantized import QuantizedTensor
from tokenspeed_kernel.signature import Format

__all__ = ["Parts", "data_of", "kind_of", "put_together", "schema", "taken_apart", "wants_gradient"]

Parts = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, str, list[int]]
"""Values, scales, global scales, zero points, format (empty for a plain tensor) and shape."""


def schema(name: str, prefix: str = "") -> str:
    """Return the arguments of one operand in a library op's schema.

    Args:
        name: of the values.
        prefix: of the others.
    """
    others = "".join(f"Tensor? {prefix}{part}, " for part in ("scale", "global_scale", "zero_point"))
    return f"Tensor {name}, {others}str {prefix}format, SymInt[] {prefix}shape"


def taken_apart(operand: torch.Tensor | QuantizedTensor) -> Parts:
    """Return the arguments for an operand."""
    if isinstance(operand, torch.Tensor):
        return operand, None, None, None, "", []
    parts = (operand.data, operand.scale, operand.global_scale, operand.zero_point)
    return *parts, str(operand.format), list(operand.shape)


def put_together(
    data: torch.Tensor,
    scale: torch.Tensor | None,
    global_scale: torch.Tensor | None,
    zero_point: torch.Tensor | None,
    fmt: str,
    shape: list[int],
) -> torch.Tensor | QuantizedTensor:
    """Return the operand that `taken_apart` took apart."""
    return QuantizedTensor(data, Format.parse(fmt), tuple(shape), scale, global_scale, zero_point) if fmt else data


def data_of(operand: torch.Tensor | QuantizedTensor) -> torch.Tensor:
    """Return the tensor itself, or the values of a quantized one."""
    return operand.data if isinstance(operand, QuantizedTensor) else operand


def kind_of(operand: torch.Tensor | QuantizedTensor) -> torch.dtype | Format:
    """Return what a kernel is chosen by: dtype or format."""
    return operand.format if isinstance(operand, QuantizedTensor) else operand.dtype


def wants_gradient(*operands: torch.Tensor | QuantizedTensor | None) -> bool:
    """Say whether a plain operand requires a gradient; a quantized tensor has let go of those of its parts."""
    for operand in operands:  # noqa: SIM110  # on the hot path, where a generator costs more than the loop
        if operand is not None and type(operand) is not QuantizedTensor and operand.requires_grad:  # type: ignore[union-attr]
            return True
    return False
