"""Attention to fp8 caches with scales.

A stored key times its scale is the key, and q'(s k) = (s q)'k: scaling the queries before, and the outputs after, takes the place
of scaling every key and value. The ops between see fp8 numbers as they stand.
"""

from __future__ import annotations

from typing import Any

import torch

from tokenspeed_kernel.errors import ShapeError
from tokenspeed_kernel.ops.attention.api import mha_decode, mha_extend

__all__ = ["mha_decode_scaled", "mha_extend_scaled"]

Attended = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


def mha_decode_scaled(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
    **options: Any,
) -> Attended:
    """`mha_decode` to an fp8 cache, as `kvcache.write_scaled_kv` writes it.

    Args:
        q: [num_reqs, num_heads, head_dim] fp32, fp16 or bf16; its product with the scale is rounded to this dtype.
        k_cache: [num_pages, page_size, num_kv_heads, head_dim] float8_e4m3fn.
        v_cache: as k_cache.
        page_table: as in `mha_decode`.
        seq_lens: as in `mha_decode`.
        k_scale: [] or [num_kv_heads] fp32, what a stored key is multiplied by to give its value.
        v_scale: as k_scale, for values.
        options: max_seqlen_k and the other keyword arguments of `mha_decode`.
    Returns:
        As `mha_decode`; the LSE is that of the scaled keys.
    Raises:
        ShapeError: shapes, dtypes, strides or options disagree.  NoKernelError: nothing qualifies.
    Source: FP8 Formats for Deep Learning, arXiv:2209.05433.
    """
    scaled = _scaled_queries("attention.mha_decode_scaled", q, k_cache, v_cache, k_scale, v_scale)
    return _scaled_outputs(mha_decode(scaled, k_cache, v_cache, page_table, seq_lens, **options), k_cache, v_scale)


def mha_extend_scaled(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
    **options: Any,
) -> Attended:
    """`mha_extend` to an fp8 cache, as `kvcache.write_scaled_kv` writes it.

    Args:
        q: [num_tokens, num_heads, head_dim] fp32, fp16 or bf16; its product with the scale is rounded to this dtype.
        k_cache: [num_pages, page_size, num_kv_heads, head_dim] float8_e4m3fn.
        v_cache: as k_cache.
        page_table: as in `mha_extend`.
        cu_seqlens_q: as in `mha_extend`.
        seq_lens: as in `mha_extend`.
        k_scale: [] or [num_kv_heads] fp32, what a stored key is multiplied by to give its value.
        v_scale: as k_scale, for values.
        options: max_seqlen_q, max_seqlen_k and the other keyword arguments of `mha_extend`.
    Returns:
        As `mha_extend`; the LSE is that of the scaled keys.
    Raises:
        ShapeError: shapes, dtypes, strides or options disagree.  NoKernelError: nothing qualifies.
    Source: FP8 Formats for Deep Learning, arXiv:2209.05433.
    """
    scaled = _scaled_queries("attention.mha_extend_scaled", q, k_cache, v_cache, k_scale, v_scale)
    attended = mha_extend(scaled, k_cache, v_cache, page_table, cu_seqlens_q, seq_lens, **options)
    return _scaled_outputs(attended, k_cache, v_scale)


def _scaled_queries(
    op: str, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, k_scale: torch.Tensor, v_scale: torch.Tensor
) -> torch.Tensor:
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if cache.dtype is not torch.float8_e4m3fn:
            fix = "leave the scales away for other caches"
            raise ShapeError(op, expected=f"{name} float8_e4m3fn", got=str(cache.dtype).removeprefix("torch."), fix=fix)
    heads = k_cache.shape[2] if k_cache.dim() == 4 else -1
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if scale.dtype is not torch.float32 or scale.device != q.device or (scale.dim() and scale.shape != (heads,)):
            got = f"{list(scale.shape)} {str(scale.dtype).removeprefix('torch.')} on {scale.device}"
            fix = "give one scale for all heads, or one for each"
            raise ShapeError(op, expected=f"{name} [] or [{heads}] float32 on {q.device}", got=got, fix=fix)
    if q.dim() != 3 or heads < 1 or q.shape[1] % heads:
        expected = f"q [rows, num_heads, head_dim] with a multiple of {heads} heads"
        raise ShapeError(op, expected=expected, got=str(list(q.shape)))
    return (q * _by_query_head(k_scale, q.shape[1])).to(q.dtype)


def _scaled_outputs(attended: Attended, k_cache: torch.Tensor, v_scale: torch.Tensor) -> Attended:
    result = attended[0] if isinstance(attended, tuple) else attended
    result.mul_(_by_query_head(v_scale, result.shape[1]))
    return attended


def _by_query_head(scale: torch.Tensor, num_heads: int) -> torch.Tensor:
    """For each query head the scale of its key head, [num_heads, 1], or the one scale."""
    return scale if scale.dim() == 0 else scale.repeat_interleave(num_heads // scale.shape[0])[:, None]
