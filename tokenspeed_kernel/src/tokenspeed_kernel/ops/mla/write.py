"""Public op: write new tokens' latent rows into a paged cache."""

from __future__ import annotations

from typing import Final

import torch
from torch.compiler import is_compiling

from tokenspeed_kernel.dispatch import NEW_CALL, BoundOp, check_devices, register_library_op
from tokenspeed_kernel.ops.mla.check import check_packed, refuse
from tokenspeed_kernel.ops.mla.contract import WRITE_MLA_CACHE
from tokenspeed_kernel.ops.operands import OPERAND_ERRORS, refuse_kinds

__all__ = ["write_mla_cache"]

_WRITE: Final = BoundOp(WRITE_MLA_CACHE)
_INT64: Final = torch.int64


def write_mla_cache(
    latent: torch.Tensor,
    rope: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    solution: str | None = None,
) -> None:
    """Write new tokens' latent rows into their slots of a paged cache, in place.

    A slot's row is the token's latent elements, and after them its rope elements. Values are rounded to the cache's dtype; into a
    cache of packed rows (uint8) the latent elements are quantized to fp8 by blocks of 128. No two tokens may have the same slot.

    Args:
        latent: [num_tokens, latent_dim] fp32, fp16, bf16 (fp64 on the CPU), last dimension contiguous.
        rope: [num_tokens, rope_dim] of latent's dtype, last dimension contiguous; rope is already applied.
        kv_cache: [num_pages, page_size, latent_dim + rope_dim], any of these dtypes, last dimension contiguous; or packed rows of
            fp8, uint8 [num_pages, page_size, latent_dim + latent_dim / 32 + 2 * rope_dim], pages and tokens at multiples of 4 bytes
            (see docs/contracts/mla.md).
        slot_mapping: [num_tokens] int64, page * page_size + offset; a token whose slot is negative or beyond the cache is ignored.
        solution: solution or kernel to use instead of the best that qualifies.
    Returns:
        None; the cache is written.
    Raises:
        ShapeError: shapes, dtypes or strides disagree.  NoKernelError: nothing qualifies.
    Source: DeepSeek-V2, arXiv:2405.04434, section 2.1; paging arXiv:2309.06180, section 4.
    """
    if is_compiling():
        _LIBRARY_OP(latent, rope, kv_cache, slot_mapping, solution)
        return
    try:
        operands = (latent, rope, kv_cache, slot_mapping)
        key = (latent.shape, solution)
        looks_same, kernel = _WRITE.seen.get(key, NEW_CALL)
        if not looks_same(*operands):
            latent_shape, rope_shape, cache_shape = latent.shape, rope.shape, kv_cache.shape
            dtype, cache_dtype, device = latent.dtype, kv_cache.dtype, latent.device
            if (
                len(latent_shape) != 2
                or len(rope_shape) != 2
                or len(cache_shape) != 3
                or rope_shape[0] != latent_shape[0]
                or (cache_shape[2] != latent_shape[1] + rope_shape[1] and cache_dtype is not torch.uint8)
                or rope.dtype is not dtype
                or slot_mapping.shape != (latent_shape[0],)
                or slot_mapping.dtype is not _INT64
                or latent.stride()[1] != 1
                or rope.stride()[1] != 1
                or kv_cache.stride()[2] != 1
            ):
                _check(latent, rope, kv_cache, slot_mapping)
            if cache_dtype is torch.uint8:
                check_packed(WRITE_MLA_CACHE.name, kv_cache, latent_shape[1], rope_shape[1])
            check_devices(WRITE_MLA_CACHE.name, device, rope=rope, kv_cache=kv_cache, slot_mapping=slot_mapping)
            traits = (latent_shape[1], rope_shape[1], cache_shape[1])
            kernel = _WRITE.kernel(device, (dtype, dtype, cache_dtype), traits, solution)
            _WRITE.remember(key, kernel, *operands)
        kernel(latent, rope, kv_cache, slot_mapping)
    except OPERAND_ERRORS as error:
        refuse_kinds(write_mla_cache, locals(), error)
        raise


def _check(latent: torch.Tensor, rope: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """Say which operand does not fit."""
    op = WRITE_MLA_CACHE.name
    if latent.dim() != 2 or latent.stride(1) != 1:
        refuse(op, "latent [num_tokens, latent_dim], last dimension contiguous", latent, strides=True)
    num_tokens, latent_dim = latent.shape
    if rope.dim() != 2 or rope.shape[0] != num_tokens or rope.dtype != latent.dtype or rope.stride(1) != 1:
        dtype = str(latent.dtype).removeprefix("torch.")
        refuse(op, f"rope [{num_tokens}, rope_dim] {dtype}, last dimension contiguous", rope, strides=True)
    width = latent_dim + rope.shape[1]
    packed = kv_cache.dtype is torch.uint8
    if kv_cache.dim() != 3 or (kv_cache.shape[2] != width and not packed) or kv_cache.stride(2) != 1:
        refuse(op, f"kv_cache [num_pages, page_size, {width}], last dimension contiguous", kv_cache, strides=True)
    refuse(op, f"slot_mapping [{num_tokens}] int64", slot_mapping)


def _eager(
    latent: torch.Tensor,
    rope: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    solution: str | None = None,
) -> None:
    write_mla_cache(latent, rope, kv_cache, slot_mapping, solution=solution)


def _fake(
    latent: torch.Tensor,
    rope: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    solution: str | None = None,
) -> None:
    return None


_LIBRARY_OP: Final = register_library_op(
    "write_mla_cache(Tensor latent, Tensor rope, Tensor(a!) kv_cache, Tensor slot_mapping, str? solution=None) -> ()",
    _eager,
    _fake,
)
