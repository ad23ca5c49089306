"""Public op for positions on several axes, as tokens of images and videos have them."""

from __future__ import annotations

from typing import Final, NoReturn

import torch
from torch.compiler import is_compiling

from tokenspeed_kernel.dispatch import BoundOp, check_devices, register_library_op
from tokenspeed_kernel.errors import ShapeError
from tokenspeed_kernel.ops.operands import OPERAND_ERRORS, refuse_kinds
from tokenspeed_kernel.ops.rope.contract import MULTI_AXIS_COS_SIN

__all__ = ["multi_axis_cos_sin"]

_OP: Final = MULTI_AXIS_COS_SIN.name
_BOUND: Final = BoundOp(MULTI_AXIS_COS_SIN)
_INTS: Final = (torch.int32, torch.int64)


def multi_axis_cos_sin(
    cos_sin_cache: torch.Tensor,
    positions: torch.Tensor,
    sections: tuple[int, ...],
    *,
    interleaved: bool = False,
    out: torch.Tensor | None = None,
    solution: str | None = None,
) -> torch.Tensor:
    """Gather the cosines and sines of positions on several axes: a table for `apply_rope` with a row for each token.

    All layers of a step share it: `apply_rope(q, k, torch.arange(num_tokens), multi_axis_cos_sin(...))`.

    Args:
        cos_sin_cache: [max_position, rotary_dim] fp32, cosines then sines, from `rope_cos_sin`; contiguous.
        positions: [num_axes, num_tokens] int32 or int64, rows of ``cos_sin_cache``; any strides. The CPU raises IndexError for
            others; a GPU, which cannot, fills their elements with NaN.
        sections: number of pairs that follow each axis; their sum is rotary_dim / 2.
        interleaved: the axes take turns, pair by pair, until each has had its share, and the first takes what is left; else they
            follow one another.
        out: optional [num_tokens, rotary_dim] fp32, contiguous, written in place.
        solution: solution or kernel to use instead of the best that qualifies.
    Returns:
        out, or a new tensor of that shape and dtype.
    Raises:
        ShapeError: shapes, dtypes or sections disagree.  NoKernelError: nothing qualifies.
    Source: arXiv:2409.12191, section 2.1; interleaved arXiv:2511.21631.
    """
    if is_compiling():
        result: torch.Tensor = _LIBRARY_OP(cos_sin_cache, positions, list(sections), interleaved, solution)
        return result if out is None else out.copy_(result)
    try:
        sections = tuple(sections)
        if (
            cos_sin_cache.dim() != 2
            or positions.dim() != 2
            or positions.shape[0] != len(sections)
            or not sections
            or min(sections) < 0
            or 2 * sum(sections) != cos_sin_cache.shape[1]
            or not cos_sin_cache.is_contiguous()
        ):
            _refuse(cos_sin_cache, positions, sections)
        shape = (positions.shape[1], cos_sin_cache.shape[1])
        if out is not None and (out.shape != shape or out.dtype is not cos_sin_cache.dtype or not out.is_contiguous()):
            expected = f"out {list(shape)} {str(cos_sin_cache.dtype).removeprefix('torch.')}, contiguous"
            raise ShapeError(_OP, expected=expected, got=_shown(out))
        device = cos_sin_cache.device
        given = None if out is None else out.device
        key = (device, positions.device, given, cos_sin_cache.dtype, positions.dtype, len(sections), solution)
        kernel = _BOUND.table.get(key)
        if kernel is None:
            if positions.dtype not in _INTS:
                _refuse(cos_sin_cache, positions, sections)
            check_devices(_OP, device, positions=positions, out=out)
            kernel = _BOUND.bind(key, device, (cos_sin_cache.dtype,), (len(sections),), solution)
        gathered: torch.Tensor = kernel(cos_sin_cache, positions, sections, interleaved=interleaved, out=out)
        return gathered
    except OPERAND_ERRORS as error:
        refuse_kinds(multi_axis_cos_sin, locals(), error)
        raise


def _shown(tensor: torch.Tensor) -> str:
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')} with strides {list(tensor.stride())}"


def _refuse(cos_sin_cache: torch.Tensor, positions: torch.Tensor, sections: tuple[int, ...]) -> NoReturn:
    """Say which operand does not fit."""
    if cos_sin_cache.dim() != 2 or not cos_sin_cache.is_contiguous():
        expected, fix = "cos_sin_cache [max_position, rotary_dim], contiguous", "build it with rope_cos_sin"
        raise ShapeError(_OP, expected=expected, got=_shown(cos_sin_cache), fix=fix)
    pairs = cos_sin_cache.shape[1] // 2
    if not sections or min(sections) < 0 or 2 * sum(sections) != cos_sin_cache.shape[1]:
        expected, fix = f"sections whose sum is rotary_dim / 2 = {pairs}", "pass the model's, RopeConfig.sections"
        raise ShapeError(_OP, expected=expected, got=str(sections), fix=fix)
    expected = f"positions [{len(sections)}, num_tokens] int32 or int64, a row for each section"
    raise ShapeError(_OP, expected=expected, got=_shown(positions))


def _eager(
    cos_sin_cache: torch.Tensor, positions: torch.Tensor, sections: list[int], interleaved: bool, solution: str | None
) -> torch.Tensor:
    return multi_axis_cos_sin(cos_sin_cache, positions, tuple(sections), interleaved=interleaved, solution=solution)


def _fake(cos_sin_cache: torch.Tensor, positions: torch.Tensor, *_: object) -> torch.Tensor:
    return cos_sin_cache.new_empty((positions.shape[1], cos_sin_cache.shape[1]))


_LIBRARY_OP: Final = register_library_op(
    "multi_axis_cos_sin(Tensor cos_sin_cache, Tensor positions, int[] sections, bool interleaved, str? solution) -> Tensor",
    _eager,
    _fake,
)
