"""Launchers of prefill on Hopper, ragged and paged; what the programs do is in `prefill_tiles`."""

from __future__ import annotations

import math

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tokenspeed_kernel.ops.attention.hopper.prefill_tiles import prefill_kernel
from tokenspeed_kernel.ops.attention.plan import AttentionPlan
from tokenspeed_kernel.ops.attention.triton import extend
from tokenspeed_kernel.ops.attention.triton.processors import num_processors

__all__ = ["attend", "bulk_copies", "mha_extend", "mha_prefill", "new_counters"]

_LOG2E = 1.4426950408889634
_NO_PAGES = 1 << 30
_ROWS = 128
_SWIZZLED = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
# Tuned on an H200: perf/baselines/h200/hopper.prefill.txt. Registers of a thread that multiplies, and of the warp that brings.
_BLOCK_N, _STAGES, _PACK, _LATE, _REGISTERS, _BRING_REGISTERS = 128, 2, 8, True, 240, 24


def mha_extend(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float | None = None,
    causal: bool = True,
    sliding_window: int | None = None,
    logit_cap: float | None = None,
    sinks: torch.Tensor | None = None,
    return_lse: bool = False,
    out: torch.Tensor | None = None,
    plan: AttentionPlan | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """See `tokenspeed_kernel.ops.attention.mha_extend`."""
    if not bulk_copies(q, k_cache, v_cache, softmax_scale):
        return extend.mha_extend(
            q, k_cache, v_cache, page_table, cu_seqlens_q, seq_lens, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k,
            softmax_scale=softmax_scale, causal=causal, sliding_window=sliding_window, logit_cap=logit_cap, sinks=sinks,
            return_lse=return_lse, out=out, plan=plan,
        )  # fmt: skip
    # All layers of a step may share the counters: a launch leaves them as the next expects them.
    counters = new_counters(q.device) if plan is None else plan.prepared("hopper_prefill", lambda: new_counters(q.device))
    return attend(
        q, k_cache, v_cache, page_table, cu_seqlens_q, seq_lens, softmax_scale=softmax_scale, causal=causal,
        sliding_window=sliding_window, logit_cap=logit_cap, sinks=sinks, return_lse=return_lse, out=out, counters=counters,
    )  # fmt: skip


def mha_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float | None = None,
    causal: bool = True,
    sliding_window: int | None = None,
    logit_cap: float | None = None,
    sinks: torch.Tensor | None = None,
    return_lse: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """See `tokenspeed_kernel.ops.attention.mha_prefill`."""
    if not bulk_copies(q, k, v, softmax_scale):
        return extend.mha_prefill(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k, softmax_scale=softmax_scale,
            causal=causal, sliding_window=sliding_window, logit_cap=logit_cap, sinks=sinks, return_lse=return_lse, out=out,
        )  # fmt: skip
    return attend(
        q, k, v, None, cu_seqlens_q, cu_seqlens_k, softmax_scale=softmax_scale, causal=causal, sliding_window=sliding_window,
        logit_cap=logit_cap, sinks=sinks, return_lse=return_lse, out=out, counters=new_counters(q.device),
    )  # fmt: skip


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    page_table: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor,
    lengths: torch.Tensor,
    *,
    softmax_scale: float | None,
    causal: bool,
    sliding_window: int | None = None,
    logit_cap: float | None = None,
    sinks: torch.Tensor | None = None,
    return_lse: bool,
    out: torch.Tensor | None,
    counters: torch.Tensor,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attend.

    Args:
        q: [num_tokens, num_heads, head_dim].
        k, v: ragged (3 dimensions) or paged (4), as `bulk_copies` takes them; head_dim is 64, 128, or 192 with 128 of values.
        page_table: of paged keys, else None.
        cu_seqlens_q: [num_reqs + 1] int32.
        lengths: lengths of requests (paged), or cu_seqlens_k.
        softmax_scale, causal, sliding_window, logit_cap, sinks, return_lse, out: of the ops.
        counters: from `new_counters`; calls that may run at the same time need their own.
    """
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads, value_dim, num_reqs = k.shape[-2], v.shape[-1], cu_seqlens_q.shape[0] - 1
    if out is None:
        out = torch.empty((num_tokens, num_heads, value_dim), dtype=q.dtype, device=q.device)
    # A tensor that is not used still needs an address.
    lse = torch.empty((num_tokens, num_heads), dtype=torch.float32, device=q.device) if return_lse else q
    if num_tokens == 0 or num_reqs == 0:
        return (out, lse) if return_lse else out
    scale = float(head_dim**-0.5 if softmax_scale is None else softmax_scale)
    rest = head_dim % 128 if head_dim > 128 else 0
    if page_table is None:
        # Ragged keys are one page without end.
        num_pages, page_size, page_rows, table, max_pages, pages_row = 0, _NO_PAGES, (0, 0), q, 1, 0
    else:
        num_pages, page_size = k.shape[:2]
        page_rows = (k.stride(0) // k.stride(1), v.stride(0) // v.stride(1))
        table = page_table if page_table.stride(1) == 1 else page_table.contiguous()
        max_pages, pages_row = table.shape[1], table.stride(0)
    box = min(_BLOCK_N, page_size)
    # With 192 elements of keys shared memory has no room for results but that of the queries.
    staged = 0 if not _is_matrix(out) else 2 if rest else 1
    pack = math.gcd(num_heads // num_kv_heads, _PACK)
    queries = _ROWS // pack
    num_places = num_tokens // queries + num_reqs
    programs = min(num_processors(q.device), num_places * (num_heads // pack))
    prefill_kernel[(programs,)](
        _matrix(q, min(queries, 64)), _matrix(k, box), _matrix(v, box), _matrix(out if staged else q, min(queries, 64)),
        out, lse, q if sinks is None else sinks,
        cu_seqlens_q.contiguous(), lengths.contiguous(), table, counters,
        num_places, num_reqs, num_pages, max_pages, scale if logit_cap else scale * _LOG2E, float(logit_cap or 0),
        sliding_window or 0, q.stride(1), k.stride(-2), v.stride(-2), out.stride(0), out.stride(1), pages_row, *page_rows,
        HEADS=num_heads, GROUP=num_heads // num_kv_heads, PACK=pack, HEAD_DIM=head_dim - rest, REST=rest, VALUE_DIM=value_dim,
        STAGED=staged, BLOCK_N=_BLOCK_N, STAGES=_STAGES, PAGED=page_table is not None, PAGE_SIZE=page_size, CAUSAL=causal,
        WINDOW=sliding_window is not None, CAP=logit_cap is not None, SINKS=sinks is not None, LSE=return_lse, LATE=_LATE,
        REGISTERS=_REGISTERS, BRING_REGISTERS=_BRING_REGISTERS, num_warps=4,
    )  # fmt: skip
    return (out, lse) if return_lse else out


def bulk_copies(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax_scale: float | None) -> bool:
    """Whether the kernel takes the tensors, and its softmax the scale: maxima are found before they are scaled."""
    return k.shape[0] > 0 and (softmax_scale is None or softmax_scale > 0) and all(_is_matrix(one) for one in (q, k, v))


def new_counters(device: torch.device) -> torch.Tensor:
    """Blocks taken, and programs that have ended: a launch leaves them as it found them."""
    return torch.zeros(2, dtype=torch.int32, device=device)


def _is_matrix(tensor: torch.Tensor) -> bool:
    """Whether [..., heads, head_dim] is one matrix of rows, one token each, for the copy engine: it takes steps of 16 bytes."""
    *pages, row, head = tensor.stride()[:-1]
    heads, head_dim = tensor.shape[-2:]
    return (
        row % 8 == 0
        and head % 8 == 0
        and head >= head_dim
        and row >= (heads - 1) * head + head_dim
        and all(page % row == 0 and page >= row * tensor.shape[1] for page in pages)
        and tensor.data_ptr() % 16 == 0
    )


def _matrix(tensor: torch.Tensor, box: int) -> TensorDescriptor:
    """Rows of one token each, of which the copy engine takes `box` at a time, and 64 elements."""
    rows, (*_, row, head, _) = tensor.shape[0], tensor.stride()
    if tensor.dim() == 4:
        rows = (rows - 1) * (tensor.stride(0) // row) + tensor.shape[1]
    return TensorDescriptor(tensor, [rows, (tensor.shape[-2] - 1) * head + tensor.shape[-1]], [row, 1], [box, 64], _SWIZZLED)
