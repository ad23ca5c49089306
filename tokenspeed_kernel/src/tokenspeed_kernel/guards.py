"""Recognizing operands that look like those of a call that was checked before.

Reading shape, dtype, device and strides of one tensor in Python costs 0.3 us, so that an op with eight operands would spend more
than 2 us on it. PyTorch has the comparison in C++, for the guards of its compiled graphs; it is used where it is there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

__all__ = ["NEVER", "Recognize", "recognizer"]

Recognize = Callable[..., bool]
"""Takes as many operands as it was made of, in the same order; True where each looks the same."""


def _native() -> Any:
    """PyTorch's comparison, which is no part of its public interface, or None where it is not there or works otherwise."""
    try:
        from torch._C._dynamo.guards import TensorGuards

        one = torch.empty(2)
        guards: Any = TensorGuards
        check = guards(one, dynamic_dims_sizes=[[2]], dynamic_dims_strides=[[1]]).check
        works = check(torch.empty(2)) and not check(torch.empty(3)) and not check(None)
    except (ImportError, TypeError, RuntimeError):
        return None
    return guards if works else None


_TensorGuards: Any = _native()


def NEVER(*_: object) -> bool:
    """Recognize nothing: for a call that was not seen yet."""
    return False


def recognizer(*operands: torch.Tensor) -> Recognize:
    """Return what tells whether other operands have the type, dtype, device, shape and strides of these.

    A stricter answer than asked for is allowed, for it only means that the caller checks again: PyTorch's comparison also counts
    whether a gradient is wanted. One tensor in two places is never recognized by it, so that such calls are compared in Python.
    No operand is kept alive.
    """
    if _TensorGuards is None or len(set(map(id, operands))) < len(operands):
        return _in_python(*operands)
    sizes, strides = [list(one.shape) for one in operands], [list(one.stride()) for one in operands]
    guards = _TensorGuards(*operands, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
    check: Recognize = guards.check
    return check


def _in_python(*operands: torch.Tensor) -> Recognize:
    looks: Final = [(type(one), one.shape, one.dtype, one.device, one.stride()) for one in operands]

    def check(*given: Any) -> bool:
        for one, (kind, shape, dtype, device, stride) in zip(given, looks, strict=True):
            if type(one) is not kind or one.shape != shape or one.dtype is not dtype:
                return False
            if one.device != device or one.stride() != stride:
                return False
        return True

    return check
