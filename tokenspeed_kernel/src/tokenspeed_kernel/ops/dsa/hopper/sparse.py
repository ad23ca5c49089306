"""Launcher of attention to given slots on Hopper; what the programs do is in `stream`."""

from __future__ import annotations

import torch

from tokenspeed_kernel.ops.dsa.hopper.planner import LATENT_DIM, ROWS, SparsePlan, plan_sparse
from tokenspeed_kernel.ops.dsa.hopper.stream import sparse_stream_kernel
from tokenspeed_kernel.ops.dsa.triton import sparse as portable
from tokenspeed_kernel.ops.mla.triton.merge import merge_parts
from tokenspeed_kernel.ops.mla.triton.tuning import device_facts

__all__ = ["sparse_decode", "sparse_prefill"]

_LOG2E = 1.4426950408889634


def sparse_decode(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    slots: torch.Tensor,
    *,
    softmax_scale: float,
    latent_dim: int = LATENT_DIM,
    return_lse: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """See `tokenspeed_kernel.ops.dsa.sparse_decode`."""
    if not _takes(q, kv_cache):
        return portable.sparse_decode(
            q, kv_cache, slots, softmax_scale=softmax_scale, latent_dim=latent_dim, return_lse=return_lse, out=out
        )
    if out is None:
        out = torch.empty((*q.shape[:3], latent_dim), dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device) if return_lse else None
    strides = (q.stride()[:3], slots.stride()[:2], out.stride()[:3])
    launch(q, kv_cache, slots, strides, q.shape[0] * q.shape[1], q.shape[1], softmax_scale, out, lse)
    return out if lse is None else (out, lse)


def sparse_prefill(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    slots: torch.Tensor,
    *,
    softmax_scale: float,
    latent_dim: int = LATENT_DIM,
    return_lse: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """See `tokenspeed_kernel.ops.dsa.sparse_prefill`."""
    if not _takes(q, kv_cache):
        return portable.sparse_prefill(
            q, kv_cache, slots, softmax_scale=softmax_scale, latent_dim=latent_dim, return_lse=return_lse, out=out
        )
    if out is None:
        out = torch.empty((*q.shape[:2], latent_dim), dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device) if return_lse else None
    strides = ((q.stride(0), 0, q.stride(1)), (slots.stride(0), 0), (out.stride(0), 0, out.stride(1)))
    launch(q, kv_cache, slots, strides, q.shape[0], 1, softmax_scale, out, lse)
    return out if lse is None else (out, lse)


def launch(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    slots: torch.Tensor,
    strides: tuple[tuple[int, ...], ...],
    num_tokens: int,
    q_len: int,
    softmax_scale: float,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    plan: SparsePlan | None = None,
) -> None:
    """Attend, and merge where a token's slots are split.

    Args:
        q, kv_cache, slots, softmax_scale, out: of the op.
        strides: of (request, query, head) of q, (request, query) of slots, (request, query, head) of out.
        num_tokens, q_len: tokens in all, and those that the first stride spans.
        lse: [num_tokens, num_heads] float32, contiguous, written where given.
        plan: instead of the one for this device.
    """
    num_heads = q.shape[-2]
    num_slots = slots.shape[-1]
    if num_tokens == 0:
        return
    num_pages, page_size, _ = kv_cache.shape
    if plan is None:
        plan = plan_sparse(num_tokens, num_heads, num_slots, device_facts(q.device).processors)
    kv_page, kv_token = _strides(kv_cache)
    q_strides, slots_strides, out_strides = strides
    first_out, first_lse, first_strides, out_split, splits = out, lse, out_strides, 0, plan.splits
    if splits > 1:
        first_out = torch.empty((num_tokens * num_heads, splits, LATENT_DIM), dtype=torch.float32, device=q.device)
        first_lse = torch.empty((num_tokens * num_heads, splits), dtype=torch.float32, device=q.device)
        head = splits * LATENT_DIM
        first_strides, out_split = (q_len * num_heads * head, num_heads * head, head), LATENT_DIM
    sparse_stream_kernel[(num_tokens * -(-num_heads // ROWS), splits)](
        q, kv_cache, first_out, first_out if first_lse is None else first_lse, slots,
        num_slots, num_pages * page_size, page_size, float(softmax_scale) * _LOG2E, splits, q_len,
        *q_strides, kv_page, kv_token, *slots_strides, *first_strides, out_split, splits,
        HEADS=num_heads, KEYS=plan.keys, STAGES=plan.stages, PARTS=plan.parts, FLAT=kv_page == page_size * kv_token,
        LSE=first_lse is not None, GATHER_REGISTERS=plan.gather_registers, WEIGH_REGISTERS=plan.weigh_registers, num_warps=8,
    )  # fmt: skip
    if splits > 1:
        assert first_lse is not None
        merge_parts(first_out, first_lse, out, lse, q_len, out_strides)


def _strides(kv_cache: torch.Tensor) -> tuple[int, int]:
    """Of pages and rows; where a page is one row the latter is not looked at by anybody, and may be anything."""
    page, row, _ = kv_cache.stride()
    return page, page if kv_cache.shape[1] == 1 else row


def _takes(q: torch.Tensor, kv_cache: torch.Tensor) -> bool:
    """Whether the rows of a product are not mostly empty, and copies of 16 bytes aligned, as Triton knows from strides of 16."""
    if q.shape[-2] < ROWS // 2 or (q.data_ptr() | kv_cache.data_ptr()) % 16:
        return False
    return not any(stride % 16 for stride in (*q.stride()[:-1], *_strides(kv_cache)))
