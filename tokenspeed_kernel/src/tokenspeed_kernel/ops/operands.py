"""Operands that are no tensors, or tensors without data: refused with a sentence about what to do."""

from __future__ import annotations

import torch

from tokenspeed_kernel.errors import ShapeError
from tokenspeed_kernel.quantized import QuantizedTensor

__all__ = ["check_operands", "tensor_error"]


def check_operands(op: str, **operands: object) -> None:
    """Refuse what is not a tensor with data. A family calls it where a table has no entry: never on the hot path.

    Args:
        op: name of the op.
        operands: by name; None is an absent one.
    Raises:
        ShapeError: an operand is of another type, or all are on the meta device.
    """
    given = {name: operand for name, operand in operands.items() if operand is not None}
    for name, operand in given.items():
        if not isinstance(operand, torch.Tensor | QuantizedTensor):
            raise tensor_error(op, **{name: operand})
    # One operand on another device than the rest is `check_devices`' matter.
    if all(operand.device.type == "meta" for operand in given.values()):  # type: ignore[attr-defined]
        fix = "give them data, with torch.empty_like(..., device='cpu') or by loading it"
        raise ShapeError(op, expected="operands with data", got="tensors on the meta device", fix=fix)


def tensor_error(op: str, **operands: object) -> ShapeError:
    """Return the error for the first operand that is not a tensor.

    Args:
        op: name of the op.
        operands: by name.
    """
    for name, operand in operands.items():
        if isinstance(operand, torch.Tensor | QuantizedTensor):
            continue
        kind = type(operand).__name__
        fix = f"make {name} a tensor with torch.as_tensor"
        if kind == "PackedWeight":
            fix = "call the packed weight itself: packed(x, bias)"
        elif kind == "ndarray":
            fix = f"pass torch.from_numpy({name})"
        return ShapeError(op, expected=f"{name} to be a tensor", got=f"a {kind}", fix=fix)
    raise AssertionError("every operand is a tensor")
