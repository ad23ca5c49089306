"""The public op `quantize`."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import is_grad_enabled
from torch.compiler import is_compiling

from tokenspeed_kernel.dispatch import NEW_CALL, BoundOp, Kernel, check_devices, register_library_op
from tokenspeed_kernel.errors import FormatError, ShapeError
from tokenspeed_kernel.ops.operands import OPERAND_ERRORS, check_operands, refuse_kinds, tensor_error
from tokenspeed_kernel.ops.quantization.contract import QUANTIZE
from tokenspeed_kernel.quantized import QuantizedTensor, data_shape, scale_shape
from tokenspeed_kernel.signature import GGUF_BLOCKS, Format

__all__ = ["empty_quantized", "quantize"]

_quantize = BoundOp(QUANTIZE)
_kept_shape = functools.lru_cache(maxsize=4096)(scale_shape)
_BY_TEXT = {str(fmt): fmt for fmt in Format.scaled()}
_SCALE_DTYPES = {
    "nvfp4": torch.float8_e4m3fn,
    "mxfp4": torch.uint8,
    "mxfp8_e4m3": torch.uint8,
    "mxfp8_e5m2": torch.uint8,
    "mxint4": torch.bfloat16,
}


def quantize(
    x: torch.Tensor,
    format: Format | str,
    *,
    scale: torch.Tensor | None = None,
    global_scale: torch.Tensor | None = None,
    out: QuantizedTensor | None = None,
    solution: str | None = None,
) -> QuantizedTensor:
    """Return x in a scaled format: round to nearest, ties to even, beyond the largest number to that one.

    Scales are computed from the largest finite number of each block unless they are given. A block of zeros has scale 1. NaN stays
    NaN: in a format without one, the scale of its block becomes NaN. `docs/contracts/quantization.md` has each format's rule.

    Args:
        x: [..., rows, columns] fp32, bf16 or fp16, any strides.
        format: any scaled format but those of GGUF: a `Format`, or its text form, such as `fp8_e4m3@block_1x128`.
        scale: for the fp8 formats: what to divide by, in the shape that `QuantizedTensor` takes, fp32, bf16 or fp16.
        global_scale: for nvfp4: fp32, one a matrix.
        out: optional tensor of that format and shape, whose parts are written in place.
        solution: solution or kernel to insist on; chosen by the registry where left out.
    Returns:
        out, or a new tensor. Scales are fp32 for fp8, x's dtype for int4 and uint4; those that were given are taken as they are.
    Raises:
        ShapeError: shapes disagree, or a scale is given that the format computes itself.  FormatError: x cannot be quantized to it.
        NoKernelError: nothing qualifies.
    Source: Open Compute Project, Microscaling Formats (MX) 1.0, section 6.3; Micikevicius et al., FP8 Formats for Deep Learning,
        arXiv:2209.05433; DeepSeek-V3, arXiv:2412.19437, section 3.3 (blocks of 128).
    """
    fmt = _format_of(format)
    if is_compiling():
        data, computed, total, zero = _library_quantize(x, str(fmt), scale, global_scale, solution)
        result = QuantizedTensor(
            data,
            fmt,
            tuple(x.shape),
            scale if scale is not None else computed,
            (global_scale if global_scale is not None else total) if fmt.logical == "nvfp4" else None,
            zero if fmt.logical == "uint4" else None,
        )
        return result if out is None else _copied(result, out)
    try:
        return _run(x, fmt, scale, global_scale, out, solution)
    except OPERAND_ERRORS as error:
        refuse_kinds(quantize, locals(), error)
        raise


def _format_of(format: Format | str) -> Format:
    """A look-up where it can be: the compiler follows no cached function."""
    if isinstance(format, Format):
        return format
    return _BY_TEXT[format] if format in _BY_TEXT else Format.parse(format)


def _run(
    x: torch.Tensor,
    fmt: Format,
    scale: torch.Tensor | None,
    global_scale: torch.Tensor | None,
    out: QuantizedTensor | None,
    solution: str | None,
) -> QuantizedTensor:
    operands: tuple[Any, ...] = (x,)
    if scale is not None:
        operands += (scale,)
    if global_scale is not None:
        operands += (global_scale,)
    place = None if out is None else _place(fmt, x, out)
    key = (fmt.logical, fmt.scale, place, scale is None, global_scale is None, solution)
    looks_same, kernel = _quantize.seen.get(key, NEW_CALL)
    if not looks_same(*operands):
        kernel = _bind(x, fmt, scale, global_scale, out, solution)
        _quantize.remember(key, kernel, *operands)
    if scale is not None:
        scale = _as_kept(scale, _kept_shape(fmt, x.shape))
    if global_scale is not None:
        global_scale = _as_kept(global_scale, x.shape[:-2])
    if x.requires_grad and is_grad_enabled():
        with torch.no_grad():
            result: QuantizedTensor = kernel(x, fmt, scale, global_scale, out)
        return result
    result = kernel(x, fmt, scale, global_scale, out)
    return result


def _place(fmt: Format, x: torch.Tensor, out: QuantizedTensor) -> tuple[object, ...]:
    """What a given output adds to what was seen: it was checked itself when it was made."""
    if not isinstance(out, QuantizedTensor) or out.shape != x.shape or out.format != fmt:
        got = f"{out.format} {list(out.shape)}" if isinstance(out, QuantizedTensor) else type(out).__name__
        raise ShapeError(QUANTIZE.name, expected=f"out {fmt} {list(x.shape)}", got=got, fix="make out with empty_quantized")
    return out.shape, out.device


def _bind(
    x: torch.Tensor,
    fmt: Format,
    scale: torch.Tensor | None,
    global_scale: torch.Tensor | None,
    out: QuantizedTensor | None,
    solution: str | None,
) -> Kernel:
    """Check every operand, and return the kernel."""
    if isinstance(x, QuantizedTensor):
        raise ShapeError(QUANTIZE.name, expected="x to be a plain tensor", got=f"{x}", fix="dequantize it first")
    try:
        shape, dtype, device = x.shape, x.dtype, x.device
    except AttributeError:
        raise tensor_error(QUANTIZE.name, x=x) from None
    if scale is not None or global_scale is not None:
        _check_scales(fmt, shape, scale, global_scale)
    check_operands(QUANTIZE.name, x=x, scale=scale, global_scale=global_scale, out=out)
    target = None if out is None else out.data
    check_devices(QUANTIZE.name, device, scale=scale, global_scale=global_scale, out=target)
    if fmt.logical in GGUF_BLOCKS:
        raise FormatError(f"{QUANTIZE.name}: {fmt} is a format of files, which is read, not made\nFix: use int4@group_32.")
    data_shape(fmt, tuple(shape))
    return _quantize.kernel(device, (dtype, fmt), (), solution)


def _as_kept(part: torch.Tensor, shape: tuple[int, ...] | None) -> torch.Tensor:
    """The scales as a `QuantizedTensor` keeps them."""
    if shape is not None and part.shape != shape:
        part = part.reshape(shape)
    return part.detach() if part.requires_grad else part


def _check_scales(fmt: Format, shape: tuple[int, ...], scale: torch.Tensor | None, global_scale: torch.Tensor | None) -> None:
    """Refuse scales that the format does not take, or that a `QuantizedTensor` of that shape would not."""
    if scale is not None and not fmt.logical.startswith("fp8"):
        fix = "leave scale out"
        raise ShapeError(QUANTIZE.name, expected=f"{fmt}: no scale, for it is computed", got="one", fix=fix)
    if global_scale is not None and fmt.logical != "nvfp4":
        fix = "leave global_scale out"
        raise ShapeError(QUANTIZE.name, expected=f"{fmt}: no global_scale", got="one", fix=fix)
    given = scale if scale is not None else global_scale
    assert given is not None
    like = empty_quantized(fmt, tuple(shape), given.device)
    QuantizedTensor(like.data, fmt, like.shape, scale if scale is not None else like.scale, global_scale)


def empty_quantized(
    format: Format | str, shape: tuple[int, ...], device: torch.device | str, scale_dtype: torch.dtype = torch.float32
) -> QuantizedTensor:
    """Return a quantized tensor with room for everything, whose values are undefined: an `out` for `quantize`.

    Args:
        format: a scaled format.
        shape: logical shape.
        device: where to.
        scale_dtype: of fp8, int4 and uint4; the others have one of their own.
    Returns:
        The tensor: parts of the shapes and dtypes that `docs/contracts/quantization.md` gives for the format.
    Raises:
        ShapeError, FormatError: as `QuantizedTensor` does.
    Source: arXiv:2209.05433 (fp8); OCP Microscaling Formats (MX) 1.0, section 5 (mxfp8, mxfp4).
    """
    fmt = Format.parse(format) if isinstance(format, str) else format
    scales = scale_shape(fmt, shape)
    dtype = _SCALE_DTYPES.get(fmt.logical, scale_dtype)
    return QuantizedTensor(
        torch.empty(data_shape(fmt, shape), dtype=fmt.storage, device=device),
        fmt,
        tuple(shape),
        None if scales is None else torch.empty(scales, dtype=dtype, device=device),
        torch.empty(shape[:-2], device=device) if fmt.logical == "nvfp4" else None,
        None if scales is None or fmt.logical != "uint4" else torch.empty(scales, dtype=torch.uint8, device=device),
    )


def _copied(result: QuantizedTensor, out: QuantizedTensor) -> QuantizedTensor:
    for mine, theirs in zip(out.parts, result.parts, strict=True):
        mine.copy_(theirs)
    return out


def _run_library(
    x: torch.Tensor,
    fmt: str,
    scale: torch.Tensor | None = None,
    global_scale: torch.Tensor | None = None,
    solution: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    result = _run(x, Format.parse(fmt), scale, global_scale, None, solution)

    def part(tensor: torch.Tensor | None, given: torch.Tensor | None) -> torch.Tensor:
        return x.new_empty(0, dtype=torch.float32) if tensor is None or given is not None else tensor

    return result.data, part(result.scale, scale), part(result.global_scale, global_scale), part(result.zero_point, None)


def _fake(
    x: torch.Tensor,
    fmt: str,
    scale: torch.Tensor | None = None,
    global_scale: torch.Tensor | None = None,
    solution: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    parsed = Format.parse(fmt)
    shape = tuple(x.shape)
    nothing = x.new_empty(0, dtype=torch.float32)
    scales = scale_shape(parsed, shape)
    dtype = _SCALE_DTYPES.get(parsed.logical, torch.float32 if parsed.logical.startswith("fp8") else x.dtype)
    data = x.new_empty(data_shape(parsed, shape), dtype=parsed.storage)
    computed = nothing if scales is None or scale is not None else x.new_empty(scales, dtype=dtype)
    nv = parsed.logical == "nvfp4" and global_scale is None
    total = x.new_empty(shape[:-2], dtype=torch.float32) if nv else nothing.clone()
    zero = x.new_empty(scales, dtype=torch.uint8) if parsed.logical == "uint4" and scales is not None else nothing.clone()
    return data, computed, total, zero


_library_quantize = register_library_op(
    "quantize(Tensor x, str format, Tensor? scale=None, Tensor? global_scale=None, str? solution=None) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    _run_library,
    _fake,
)
