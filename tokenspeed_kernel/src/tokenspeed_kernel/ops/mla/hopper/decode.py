"""Launcher of latent decoding on Hopper; what the programs do is in `stream`, `wide` and `merge`, who takes what in `planner`."""

from __future__ import annotations

import functools
import math
from typing import Any, Final

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tokenspeed_kernel.ops.attention.plan import AttentionPlan
from tokenspeed_kernel.ops.mla.hopper.merge import latent_merge_kernel
from tokenspeed_kernel.ops.mla.hopper.planner import FEW_ROWS, LATENT_DIM, MERGE_WARPS, PAGE_SIZE, LatentPlan, plan_latent
from tokenspeed_kernel.ops.mla.hopper.stream import latent_stream_kernel
from tokenspeed_kernel.ops.mla.hopper.wide import latent_wide_kernel
from tokenspeed_kernel.ops.mla.triton import paged

__all__ = ["SCORE_REGISTERS", "launch", "mla_decode", "work_space"]

_LOG2E: Final = 1.4426950408889634
_ROPE_DIM: Final = 64
SCORE_REGISTERS: Final = 104
"""Of each thread that computes scores in `wide`: what it needs, so that most are left for the results."""
_SWIZZLED: Final = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
_WorkSpace = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def mla_decode(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    max_seqlen_k: int,
    softmax_scale: float,
    latent_dim: int = LATENT_DIM,
    causal: bool = True,
    return_lse: bool = False,
    out: torch.Tensor | None = None,
    plan: AttentionPlan | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """See `tokenspeed_kernel.ops.mla.mla_decode`."""
    num_reqs, q_len, num_heads, _ = q.shape
    num_pages = kv_cache.shape[0]
    if not _bulk_copies(kv_cache):
        # The copy engine takes steps of 16 bytes, and here pages that lie a whole number of rows apart.
        return paged.mla_decode(
            q, kv_cache, page_table, seq_lens, max_seqlen_k=max_seqlen_k, softmax_scale=softmax_scale, latent_dim=latent_dim,
            causal=causal, return_lse=return_lse, out=out, plan=plan,
        )  # fmt: skip
    if out is None:
        out = torch.empty((num_reqs, q_len, num_heads, latent_dim), dtype=q.dtype, device=q.device)
    lse = torch.empty((num_reqs, q_len, num_heads), dtype=torch.float32, device=q.device) if return_lse else None
    if num_reqs == 0 or q_len == 0:
        return out if lse is None else (out, lse)
    if num_pages == 0:
        out.zero_()
        return out if lse is None else (out, lse.fill_(-math.inf))
    stream = _planned(num_reqs, q_len * num_heads, -(-max_seqlen_k // PAGE_SIZE), q.device)
    # All layers of a step may share one work space: each layer's parts are merged before the next begins.
    if plan is None:
        space = work_space(stream, q.device)
    else:
        space = plan.prepared(("hopper_mla_decode", stream), lambda: work_space(stream, q.device))
    launch(stream, space, q, kv_cache, page_table, seq_lens, softmax_scale, causal, out, lse)
    return out if lse is None else (out, lse)


def launch(
    stream: LatentPlan,
    space: _WorkSpace,
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    softmax_scale: float,
    causal: bool,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    """Attend and merge.

    Args:
        stream: from `plan_latent`, for this batch.
        space: parts, their maxima and denominators, and notes of which there are.
        q, kv_cache, page_table, seq_lens, softmax_scale, causal, out: of the op; neither is empty.
        lse: [num_reqs, q_len, num_heads] float32, contiguous, written where given.
    """
    num_reqs, q_len, num_heads, _ = q.shape
    num_pages = kv_cache.shape[0]
    page_row, row = kv_cache.stride()[:2]
    if page_table.stride(1) != 1:
        page_table = page_table.contiguous()
    seq_lens = seq_lens.contiguous()
    page_rows = page_row // row if num_pages > 1 else PAGE_SIZE
    num_rows = (num_pages - 1) * page_rows + PAGE_SIZE
    parts, stats, notes = space
    lse_or_any = stats if lse is None else lse  # a tensor that is not used still needs an address
    arguments = (
        q, out, lse_or_any, page_table, seq_lens, parts, stats, notes,
        num_reqs, num_pages, page_table.shape[1], q_len, float(softmax_scale) * _LOG2E,
        *q.stride()[:3], *out.stride()[:3], page_table.stride(0), page_rows,
    )  # fmt: skip
    constants: dict[str, Any] = {
        "REQS": _bucket(num_reqs), "HEADS": num_heads, "CAUSAL": causal, "LSE": lse is not None, "BY_REQUEST": stream.by_request,
    }  # fmt: skip
    shape, strides = [num_rows, LATENT_DIM + _ROPE_DIM], [row, 1]
    latent = TensorDescriptor(kv_cache, shape, strides, [PAGE_SIZE, LATENT_DIM], _SWIZZLED)
    rope = TensorDescriptor(kv_cache, shape, strides, [PAGE_SIZE, _ROPE_DIM], _SWIZZLED)
    if stream.rows == FEW_ROWS:
        latent_stream_kernel[(stream.programs,)](latent, rope, *arguments, **constants, ROWS=stream.rows, num_warps=4)
    else:
        latent_wide_kernel[(stream.programs,)](latent, rope, *arguments, **constants, SCORE_REGS=SCORE_REGISTERS, num_warps=8)
    if stream.groups > 1:
        grid = (stream.notes * (stream.rows // stream.merge_rows), LATENT_DIM // stream.merge_slice)
        latent_merge_kernel[grid](
            out, lse_or_any, notes, parts, stats, q_len, *out.stride()[:3], HEADS=num_heads, ROWS=stream.rows,
            TAKEN=stream.merge_rows, PARTS=stream.merge_parts, SLICE=stream.merge_slice, LSE=lse is not None,
            num_warps=MERGE_WARPS,
        )  # fmt: skip


def _bulk_copies(kv_cache: torch.Tensor) -> bool:
    """Whether the cache is one matrix of rows, of which the copy engine takes 64 at a time."""
    page_row, row, _ = kv_cache.stride()
    return row % 8 == 0 and row > 0 and page_row % row == 0 and kv_cache.data_ptr() % 16 == 0


@functools.lru_cache(maxsize=1024)
def _planned(num_reqs: int, query_rows: int, max_tiles: int, device: torch.device) -> LatentPlan:
    return plan_latent(num_reqs, query_rows, max_tiles, torch.cuda.get_device_properties(device).multi_processor_count)


def work_space(stream: LatentPlan, device: torch.device) -> _WorkSpace:
    """Two parts for each program, their maxima and denominators, and the notes."""
    rows = 2 * stream.programs * stream.rows
    return (
        torch.empty((rows, LATENT_DIM), dtype=torch.bfloat16, device=device),
        torch.empty((rows, 2), dtype=torch.float32, device=device),
        torch.empty((stream.notes, 4), dtype=torch.int32, device=device),
    )


def _bucket(num_reqs: int) -> int:
    """Sizes for which a kernel is compiled: 1, and powers of 8 up from there."""
    size = 1
    while size < num_reqs:
        size *= 8
    return size
