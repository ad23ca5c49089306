"""Public ops that put keys and values into fp8."""

from __future__ import annotations

from typing import Final, NoReturn

import torch
from torch.compiler import is_compiling

from tokenspeed_kernel.dispatch import NEW_CALL, BoundOp, check_devices, register_library_op
from tokenspeed_kernel.errors import ShapeError
from tokenspeed_kernel.ops.kvcache.contract import QUANTIZE_KV, WRITE_SCALED_KV
from tokenspeed_kernel.ops.operands import OPERAND_ERRORS, refuse_kinds
from tokenspeed_kernel.signature import Format

__all__ = ["quantize_kv", "write_scaled_kv"]

_WRITE: Final = BoundOp(WRITE_SCALED_KV)
_QUANTIZE: Final = BoundOp(QUANTIZE_KV)
_FP8: Final = torch.float8_e4m3fn
_BY_TENSOR: Final = Format.parse("fp8_e4m3@tensor")
_BY_HEAD: Final = Format.parse("fp8_e4m3@head")


def write_scaled_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
    *,
    solution: str | None = None,
) -> None:
    """Divide new tokens' keys and values by their scales, and write them into their slots of a paged fp8 cache, in place.

    The quotient is taken in float32 and rounded to nearest even. What is beyond the range of fp8 becomes its largest number, 448
    with its sign; NaN stays NaN. No two tokens may have the same slot.

    Args:
        k: [num_tokens, num_kv_heads, head_dim] fp32, fp16 or bf16, last dimension contiguous.
        v: as k.
        k_cache: [num_pages, page_size, num_kv_heads, head_dim] float8_e4m3fn, last dimension contiguous.
        v_cache: as k_cache.
        slot_mapping: [num_tokens] int64, page * page_size + offset; a token whose slot is negative or beyond the cache is ignored.
        k_scale: [] or [num_kv_heads] fp32, positive; what a stored key is multiplied by to give its value.
        v_scale: as k_scale, of the same shape.
        solution: solution or kernel to use instead of the best that qualifies.
    Returns:
        None; the caches are written.
    Raises:
        ShapeError: shapes, dtypes or strides disagree.  NoKernelError: nothing qualifies.
    Source: FP8 Formats for Deep Learning, arXiv:2209.05433, table 1 and section 3.1.
    """
    if is_compiling():
        _WRITE_LIBRARY(k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale, solution)
        return
    try:
        operands = (k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale)
        key = (k.shape, solution)
        looks_same, kernel = _WRITE.seen.get(key, NEW_CALL)
        if not looks_same(*operands):
            op = WRITE_SCALED_KV.name
            shape, cache_shape = k.shape, k_cache.shape
            if (
                len(shape) != 3
                or len(cache_shape) != 4
                or v.shape != shape
                or v_cache.shape != cache_shape
                or cache_shape[2:] != shape[1:]
                or slot_mapping.shape != shape[:1]
                or slot_mapping.dtype is not torch.int64
                or k_cache.dtype is not _FP8
                or v_cache.dtype is not _FP8
                or not (_packed(k) and _packed(v) and _packed(k_cache) and _packed(v_cache))
                or not _scales_fit(k, k_scale, v_scale)
            ):
                _refuse_write(op, k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale)
            device, by_head = k.device, k_scale.dim() == 1
            if v.dtype is not k.dtype:
                _refuse_write(op, k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale)
            others = {"v": v, "k_cache": k_cache, "v_cache": v_cache, "slot_mapping": slot_mapping}
            check_devices(op, device, **others, k_scale=k_scale, v_scale=v_scale)
            stored = _BY_HEAD if by_head else _BY_TENSOR
            kernel = _WRITE.kernel(device, (k.dtype, v.dtype, stored, stored), (shape[2], cache_shape[1]), solution)
            _WRITE.remember(key, kernel, *operands)
        kernel(k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale)
    except OPERAND_ERRORS as error:
        refuse_kinds(write_scaled_kv, locals(), error)
        raise


def quantize_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
    *,
    k_out: torch.Tensor | None = None,
    v_out: torch.Tensor | None = None,
    solution: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Divide keys and values by their scales, and round them to fp8, as `write_scaled_kv` does.

    Args:
        k: [num_tokens, num_kv_heads, head_dim] fp32, fp16 or bf16, last dimension contiguous.
        v: as k.
        k_scale: [] or [num_kv_heads] fp32, positive; what a stored key is multiplied by to give its value.
        v_scale: as k_scale, of the same shape.
        k_out: optional, like k, float8_e4m3fn, last dimension contiguous, written in place.
        v_out: as k_out.
        solution: solution or kernel to use instead of the best that qualifies.
    Returns:
        (k_out, v_out), or new contiguous tensors.
    Raises:
        ShapeError: shapes, dtypes or strides disagree.  NoKernelError: nothing qualifies.
    Source: FP8 Formats for Deep Learning, arXiv:2209.05433, table 1 and section 3.1.
    """
    if is_compiling():
        kept_k, kept_v = _QUANTIZE_LIBRARY(k, v, k_scale, v_scale, solution)
        return (kept_k if k_out is None else k_out.copy_(kept_k), kept_v if v_out is None else v_out.copy_(kept_v))
    try:
        operands: tuple[torch.Tensor, ...] = (k, v, k_scale, v_scale)
        if k_out is not None:
            operands += (k_out,)
        if v_out is not None:
            operands += (v_out,)
        key = (k.shape, k_out is None, v_out is None, solution)
        looks_same, kernel = _QUANTIZE.seen.get(key, NEW_CALL)
        if not looks_same(*operands):
            op = QUANTIZE_KV.name
            shape = k.shape
            if (
                len(shape) != 3
                or v.shape != shape
                or not (_packed(k) and _packed(v))
                or not _scales_fit(k, k_scale, v_scale)
                or (k_out is not None and (k_out.shape != shape or k_out.dtype is not _FP8 or not _packed(k_out)))
                or (v_out is not None and (v_out.shape != shape or v_out.dtype is not _FP8 or not _packed(v_out)))
            ):
                _refuse_quantize(op, k, v, k_scale, v_scale, k_out, v_out)
            device, by_head = k.device, k_scale.dim() == 1
            if v.dtype is not k.dtype:
                _refuse_quantize(op, k, v, k_scale, v_scale, k_out, v_out)
            check_devices(op, device, v=v, k_scale=k_scale, v_scale=v_scale, k_out=k_out, v_out=v_out)
            stored = _BY_HEAD if by_head else _BY_TENSOR
            kernel = _QUANTIZE.kernel(device, (k.dtype, v.dtype, stored, stored), (shape[2],), solution)
            _QUANTIZE.remember(key, kernel, *operands)
        result: tuple[torch.Tensor, torch.Tensor] = kernel(k, v, k_scale, v_scale, k_out, v_out)
        return result
    except OPERAND_ERRORS as error:
        refuse_kinds(quantize_kv, locals(), error)
        raise


def _packed(x: torch.Tensor) -> bool:
    return x.stride(-1) == 1 or x.is_contiguous()


def _scales_fit(k: torch.Tensor, k_scale: torch.Tensor, v_scale: torch.Tensor) -> bool:
    return (
        k_scale.dtype is torch.float32
        and v_scale.dtype is torch.float32
        and k_scale.shape == v_scale.shape
        and (k_scale.dim() == 0 or k_scale.shape == k.shape[1:2])
    )


def _fail(op: str, expected: str, got: torch.Tensor, fix: str | None = None) -> NoReturn:
    shown = f"{list(got.shape)} {str(got.dtype).removeprefix('torch.')} with strides {list(got.stride())}"
    raise ShapeError(op, expected=expected, got=shown, fix=fix)


def _refuse_new(op: str, k: torch.Tensor, v: torch.Tensor, k_scale: torch.Tensor, v_scale: torch.Tensor) -> None:
    """Say which of the new keys, values and scales does not fit, if one does not."""
    if k.dim() != 3 or not _packed(k):
        _fail(op, "k [num_tokens, num_kv_heads, head_dim], last dimension contiguous", k)
    if v.shape != k.shape or v.dtype is not k.dtype or not _packed(v):
        _fail(op, f"v like k, {list(k.shape)} {str(k.dtype).removeprefix('torch.')}, last dimension contiguous", v)
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if scale.dtype is not torch.float32 or (scale.dim() != 0 and scale.shape != k.shape[1:2]):
            _fail(op, f"{name} [] or [{k.shape[1]}] float32", scale, "give one scale for all heads, or one for each")
    if k_scale.shape != v_scale.shape:
        _fail(op, f"v_scale like k_scale, {list(k_scale.shape)}", v_scale)


def _refuse_write(
    op: str,
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
) -> NoReturn:
    _refuse_new(op, k, v, k_scale, v_scale)
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if cache.dtype is not _FP8:
            _fail(op, f"{name} float8_e4m3fn", cache, "leave k_scale and v_scale away for other caches")
    heads = ", ".join(map(str, k.shape[1:]))
    if k_cache.dim() != 4 or k_cache.shape[2:] != k.shape[1:] or not _packed(k_cache):
        _fail(op, f"k_cache [num_pages, page_size, {heads}], last dimension contiguous", k_cache)
    if v_cache.shape != k_cache.shape or not _packed(v_cache):
        _fail(op, f"v_cache like k_cache, {list(k_cache.shape)}, last dimension contiguous", v_cache)
    _fail(op, f"slot_mapping [{k.shape[0]}] int64", slot_mapping)


def _refuse_quantize(
    op: str,
    k: torch.Tensor,
    v: torch.Tensor,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
    k_out: torch.Tensor | None,
    v_out: torch.Tensor | None,
) -> NoReturn:
    _refuse_new(op, k, v, k_scale, v_scale)
    for name, out in (("k_out", k_out), ("v_out", v_out)):
        if out is not None and (out.shape != k.shape or out.dtype is not _FP8 or not _packed(out)):
            _fail(op, f"{name} {list(k.shape)} float8_e4m3fn, last dimension contiguous", out)
    raise AssertionError(f"unreachable: {op} refused an operand, but every check of it passes")


def _run_write(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
    solution: str | None,
) -> None:
    write_scaled_kv(k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale, solution=solution)


def _fake_write(*_: object) -> None:
    return None


def _run_quantize(
    k: torch.Tensor, v: torch.Tensor, k_scale: torch.Tensor, v_scale: torch.Tensor, solution: str | None
) -> tuple[torch.Tensor, torch.Tensor]:
    return quantize_kv(k, v, k_scale, v_scale, solution=solution)


def _fake_quantize(k: torch.Tensor, v: torch.Tensor, *_: object) -> tuple[torch.Tensor, torch.Tensor]:
    return k.new_empty(k.shape, dtype=_FP8), v.new_empty(v.shape, dtype=_FP8)


_WRITE_LIBRARY: Final = register_library_op(
    "write_scaled_kv(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slot_mapping, Tensor k_scale, "
    "Tensor v_scale, str? solution) -> ()",
    _run_write,
    _fake_write,
)
_QUANTIZE_LIBRARY: Final = register_library_op(
    "quantize_kv(Tensor k, Tensor v, Tensor k_scale, Tensor v_scale, str? solution) -> (Tensor, Tensor)",
    _run_quantize,
    _fake_quantize,
)
