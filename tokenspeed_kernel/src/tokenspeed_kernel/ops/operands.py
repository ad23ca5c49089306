"""Arguments of the wrong kind, and tensors without data: refused with a sentence about what to do.

No op looks at the kinds of its arguments on the way through: a list has no shape, so that reading it raises. Each public op has an
except clause around all it does, which asks `refuse_kinds` whether an argument was the reason.
"""

from __future__ import annotations

import functools
import numbers
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch

from tokenspeed_kernel.errors import NoKernelError, ShapeError, TokenSpeedKernelError
from tokenspeed_kernel.quantized import QuantizedTensor

__all__ = ["OPERAND_ERRORS", "check_operands", "refuse_kinds", "tensor_error"]

OPERAND_ERRORS: Final = (AttributeError, TypeError, ValueError, LookupError, RuntimeError, AssertionError)
"""What an argument of the wrong kind can raise, in a check or in a kernel."""


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
        return ShapeError(op, expected=f"{name} to be a tensor", got=_shown(operand), fix=_fix(name, operand))
    raise AssertionError("every operand is a tensor")


def refuse_kinds(function: Callable[..., Any], arguments: Mapping[str, object], error: BaseException) -> None:
    """Raise for the first argument of a public op that is not of the kind that the op's annotations name; return if all are.

    Args:
        function: the public op.
        arguments: by name, such as the op's `locals()`; other names are not looked at.
        error: what the call raised; the cause of what is raised instead.
    Raises:
        ShapeError: an argument is of another kind.
    """
    if isinstance(error, TokenSpeedKernelError) and not isinstance(error, ShapeError | NoKernelError):
        return  # it is about that very argument, and knows more of it
    for name, hint in _hints(function).items():
        if name in arguments and not _fits(arguments[name], hint):
            got = arguments[name]
            family = function.__module__.split(".")[2]
            kinds, shown, fix = _kinds(hint), _shown(got), None
            if "tensor" not in kinds:
                shown = _shown_inside(got)
            else:
                fix = _fix(name, got)
                if isinstance(got, QuantizedTensor):
                    kinds = kinds.replace("a tensor", "a plain tensor")
            raise ShapeError(f"{family}.{function.__name__}", expected=f"{name} to be {kinds}", got=shown, fix=fix) from error


@functools.cache
def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    return {name: hint for name, hint in typing.get_type_hints(function).items() if name != "return"}


def _fits(value: object, hint: Any) -> bool:
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any or hint is object:
        return True
    if origin is typing.Union or origin is types.UnionType:
        return any(_fits(value, one) for one in inner)
    if origin is typing.Literal:
        return value in inner
    if origin is tuple and inner[-1:] != (...,):
        return isinstance(value, tuple | list) and len(value) == len(inner) and all(map(_fits, value, inner))
    if origin in (tuple, list, Sequence):
        return isinstance(value, tuple | list) and all(_fits(one, inner[0]) for one in value)
    if origin is not None:
        return isinstance(value, origin)
    if hint in (int, float):
        return isinstance(value, numbers.Integral if hint is int else numbers.Real)
    return isinstance(value, hint)


def _kinds(hint: Any) -> str:
    """What a parameter takes, in words."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Union or origin is types.UnionType:
        # A quantized tensor is one in words.
        return " or ".join(_kinds(one) for one in inner if one is not QuantizedTensor or torch.Tensor not in inner)
    if origin in (tuple, list, Sequence):
        return f"a sequence of {', '.join(_plural(one) for one in inner if one is not ...)}"
    if hint is type(None):
        return "None"
    name = getattr(hint, "__name__", str(hint))
    return "a tensor" if hint is torch.Tensor else f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


def _plural(hint: Any) -> str:
    return "tensors" if hint is torch.Tensor else f"{getattr(hint, '__name__', str(hint))}s"


def _shown(value: object) -> str:
    kind = type(value).__name__
    return "None" if value is None else f"{'an' if kind[0] in 'aeiou' else 'a'} {kind}"


def _shown_inside(value: object) -> str:
    if not isinstance(value, list | tuple):
        return _shown(value)
    return f"{_shown(value)} of {' and '.join(sorted({type(one).__name__ for one in value})) or 'nothing'}"


def _fix(name: str, value: object) -> str:
    kind = type(value).__name__
    if kind == "PackedWeight":
        return "call the packed weight itself: packed(x, bias)"
    if kind == "ndarray":
        return f"pass torch.from_numpy({name})"
    if kind == "QuantizedTensor":
        return f"pass quantization.dequantize({name})"
    if value is None:
        return f"pass a tensor for {name}"
    return f"make {name} a tensor with torch.as_tensor"
