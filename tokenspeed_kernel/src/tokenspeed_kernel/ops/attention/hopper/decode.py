"""Launcher of paged decoding on Hopper; what the programs do is in `stream`, who takes what in `planner`."""

from __future__ import annotations

import functools

import torch

from tokenspeed_kernel.ops.attention.hopper.planner import StreamPlan, plan_stream
from tokenspeed_kernel.ops.attention.hopper.stream import decode_stream_kernel
from tokenspeed_kernel.ops.attention.plan import AttentionPlan
from tokenspeed_kernel.ops.attention.triton.processors import num_processors

__all__ = ["mha_decode"]

_LOG2E = 1.4426950408889634
_WIDE_FROM = 2**31
"""Products of tiles and programs from here on take 64-bit division on the device, which is slow."""


def mha_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seqlen_k: int,
    softmax_scale: float | None = None,
    sliding_window: int | None = None,
    logit_cap: float | None = None,
    sinks: torch.Tensor | None = None,
    return_lse: bool = False,
    out: torch.Tensor | None = None,
    plan: AttentionPlan | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """See `tokenspeed_kernel.ops.attention.mha_decode`."""
    num_reqs, num_heads, head_dim = q.shape
    num_pages, page_size, num_kv_heads, _ = k_cache.shape
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    # A tensor that is not used still needs an address.
    lse = torch.empty((num_reqs, num_heads), dtype=torch.float32, device=q.device) if return_lse else q
    if num_reqs == 0:
        return (out, lse) if return_lse else out
    if page_table.stride(1) != 1:
        page_table = page_table.contiguous()
    stream = _planned(num_reqs, num_heads, num_kv_heads, head_dim, q.device)
    # All layers of a step may share one work space: a launch leaves it as the next expects it.
    if plan is None:
        parts, stats, arrivals = _work_space(stream, num_reqs, head_dim, q.device)
    else:
        key = ("hopper_mha_decode", stream, num_reqs, head_dim)
        parts, stats, arrivals = plan.prepared(key, lambda: _work_space(stream, num_reqs, head_dim, q.device))
    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    # The most tiles that lengths up to the page table's make.
    most_tiles = num_reqs * stream.blocks * (page_table.shape[1] * page_size // stream.tile + 2)
    chained = q.device.type == "cuda"
    decode_stream_kernel[(stream.programs,)](
        q, k_cache, v_cache, out, lse, q if sinks is None else sinks, page_table, seq_lens.contiguous(), parts, stats, arrivals,
        num_reqs, num_pages, page_table.shape[1], float(scale) if logit_cap else float(scale) * _LOG2E, float(logit_cap or 0),
        sliding_window or 0, stream.min_tiles, q.stride(0), q.stride(1), *k_cache.stride()[:3], *v_cache.stride()[:3],
        out.stride(0), out.stride(1), page_table.stride(0),
        REQS=_bucket(num_reqs), KV_HEADS=num_kv_heads, GROUP=num_heads // num_kv_heads, HEAD_DIM=head_dim, PAGE_SIZE=page_size,
        HEADS=stream.heads, CHUNKS=stream.chunks, BLOCK_M=stream.block_m, BLOCK_N=stream.block_n, ROWS=stream.rows,
        PARTS=stream.parts, WINDOW=sliding_window is not None, CAP=logit_cap is not None, SINKS=sinks is not None, LSE=return_lse,
        WIDE=most_tiles * stream.programs >= _WIDE_FROM, CHAINED=chained, launch_pdl=chained,
        num_warps=stream.num_warps, num_stages=stream.num_stages,
    )  # fmt: skip
    return (out, lse) if return_lse else out


@functools.lru_cache(maxsize=1024)
def _planned(num_reqs: int, num_heads: int, num_kv_heads: int, head_dim: int, device: torch.device) -> StreamPlan:
    return plan_stream(num_reqs, num_heads, num_kv_heads, head_dim, num_processors(device))


def _work_space(
    stream: StreamPlan, num_reqs: int, head_dim: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Parts, their maxima and denominators, and how many parts of each item have arrived: none yet."""
    rows = 2 * stream.programs * stream.part_rows
    return (
        torch.empty((rows, head_dim), dtype=torch.float32, device=device),
        torch.empty((rows, 2), dtype=torch.float32, device=device),
        torch.zeros(num_reqs * stream.blocks, dtype=torch.int32, device=device),
    )


def _bucket(num_reqs: int) -> int:
    """Sizes for which a kernel is compiled: powers of 4."""
    size = 1
    while size < num_reqs:
        size *= 4
    return size
