"""The cache write; its other ops are in `scaled` and `pages`."""

from __future__ import annotations

from typing import Final, NoReturn

import torch
from torch.compiler import is_compiling

from tokenspeed_kernel.dispatch import NEW_CALL, BoundOp, check_devices, register_library_op
from tokenspeed_kernel.errors import ShapeError
from tokenspeed_kernel.ops.kvcache.contract import WRITE_KV
from tokenspeed_kernel.ops.kvcache.scaled import write_scaled_kv
from tokenspeed_kernel.ops.operands import OPERAND_ERRORS, refuse_kinds

_INT64: Final = torch.int64
_WRITE_KV: Final = BoundOp(WRITE_KV)
_SEEN: Final = _WRITE_KV.seen


def write_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    solution: str | None = None,
) -> None:
    """Write new tokens' keys and values into their slots of a paged cache, in place.

    Values are rounded to the cache's dtype. No two tokens may have the same slot. With scales the caches are fp8, and the call is
    one of `write_scaled_kv`.

    Args:
        k: [num_tokens, num_kv_heads, head_dim] fp32, fp16, bf16 (fp64 on the CPU), last dimension contiguous.
        v: as k.
        k_cache: [num_pages, page_size, num_kv_heads, head_dim], any of these dtypes, last dimension contiguous.
        v_cache: as k_cache.
        slot_mapping: [num_tokens] int64, page * page_size + offset; a token whose slot is negative or beyond the cache is ignored.
        k_scale: only with fp8 caches: [] or [num_kv_heads] fp32, what a stored key is multiplied by to give its value.
        v_scale: as k_scale, for values.
        solution: solution or kernel to use instead of the best that qualifies.
    Returns:
        None; the caches are written.
    Raises:
        ShapeError: shapes, dtypes or strides disagree.  NoKernelError: nothing qualifies.
    Source: paged attention, arXiv:2309.06180, section 4.
    """
    if k_scale is not None or v_scale is not None:
        if k_scale is None or v_scale is None:
            expected, fix = "k_scale and v_scale together", "pass torch.ones([]) for the one that scales nothing"
            raise ShapeError("kvcache.write_kv", expected=expected, got="one of them", fix=fix)
        write_scaled_kv(k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale, solution=solution)
        return
    if is_compiling():
        _LIBRARY_OP(k, v, k_cache, v_cache, slot_mapping, solution)
        return
    try:
        operands = (k, v, k_cache, v_cache, slot_mapping)
        key = (k.shape, solution)
        looks_same, kernel = _SEEN.get(key, NEW_CALL)
        if not looks_same(*operands):
            k_shape, cache_shape, dtype, cache_dtype = k.shape, k_cache.shape, k.dtype, k_cache.dtype
            try:
                num_tokens, num_kv_heads, head_dim = k_shape
                _, page_size, cache_heads, cache_dim = cache_shape
            except ValueError:
                _refuse(k, v, k_cache, v_cache, slot_mapping)
            if (
                v.shape != k_shape
                or v_cache.shape != cache_shape
                or cache_heads != num_kv_heads
                or cache_dim != head_dim
                or slot_mapping.shape != (num_tokens,)
                or (not k.is_contiguous() and k.stride()[2] != 1)
                or v.stride()[2] != 1
                or (not k_cache.is_contiguous() and k_cache.stride()[3] != 1)
                or (not v_cache.is_contiguous() and v_cache.stride()[3] != 1)
                or v.dtype is not dtype
                or v_cache.dtype is not cache_dtype
                or slot_mapping.dtype is not _INT64
            ):
                _refuse(k, v, k_cache, v_cache, slot_mapping)
            device = k.device
            if cache_dtype.itemsize == 1:  # fp8 means nothing without its scale
                expected, got = (
                    "k_scale and v_scale with an fp8 cache",
                    f"a cache of {str(cache_dtype).removeprefix('torch.')} alone",
                )
                raise ShapeError("kvcache.write_kv", expected=expected, got=got, fix="pass both scales, ones where there are none")
            check_devices("kvcache.write_kv", device, v=v, k_cache=k_cache, v_cache=v_cache, slot_mapping=slot_mapping)
            dtypes = (dtype, dtype, cache_dtype, cache_dtype)
            kernel = _WRITE_KV.kernel(device, dtypes, (head_dim, page_size), solution)
            _WRITE_KV.remember(key, kernel, *operands)
        kernel(k, v, k_cache, v_cache, slot_mapping)
    except OPERAND_ERRORS as error:
        refuse_kinds(write_kv, locals(), error)
        raise


def _refuse(k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slot_mapping: torch.Tensor) -> NoReturn:
    """Say which operand does not fit."""

    def fail(expected: str, got: torch.Tensor) -> NoReturn:
        dtype = str(got.dtype).removeprefix("torch.")
        shown = f"{list(got.shape)} {dtype} with strides {list(got.stride())}"
        raise ShapeError("kvcache.write_kv", expected=expected, got=shown)

    if k.dim() != 3 or k.stride(2) != 1:
        fail("k [num_tokens, num_kv_heads, head_dim], last dimension contiguous", k)
    num_tokens, num_kv_heads, head_dim = k.shape
    if v.shape != k.shape or v.dtype != k.dtype or v.stride(2) != 1:
        fail(f"v like k, {list(k.shape)} {str(k.dtype).removeprefix('torch.')}, last dimension contiguous", v)
    if k_cache.dim() != 4 or k_cache.shape[2:] != (num_kv_heads, head_dim) or k_cache.stride(3) != 1:
        fail(f"k_cache [num_pages, page_size, {num_kv_heads}, {head_dim}], last dimension contiguous", k_cache)
    if v_cache.shape != k_cache.shape or v_cache.dtype != k_cache.dtype or v_cache.stride(3) != 1:
        fail(f"v_cache like k_cache, {list(k_cache.shape)}, last dimension contiguous", v_cache)
    fail(f"slot_mapping [{num_tokens}] int64", slot_mapping)


def _eager(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    solution: str | None,
) -> None:
    write_kv(k, v, k_cache, v_cache, slot_mapping, solution=solution)


def _fake(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    solution: str | None,
) -> None:
    return None


_LIBRARY_OP: Final = register_library_op(
    "write_kv(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slot_mapping, str? solution) -> ()",
    _eager,
    _fake,
)
