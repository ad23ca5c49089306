"""Merging of attention states, in Triton: one pass over the states, which are separate tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

__all__ = ["launch", "merge_states"]

# Of 512 to 4096, the best at 1 to 4096 tokens on an H200: perf/baselines/h200/hopper.rope_write.txt.
_BLOCK_ELEMENTS = 1024


@triton.jit
def _merge_states_kernel(
    outs_ptr, lses_ptr, out_ptr, lse_ptr, num_rows,
    outs_token, outs_head, lses_token, lses_head, out_token, out_head, lse_token, lse_head,
    STATES: tl.constexpr, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    if CHAINED:
        # The programs of a launch start while the last of the one before it end, and wait here until its results are in memory.
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    live = row < num_rows
    token, head = row // HEADS, row % HEADS
    dims = tl.arange(0, BLOCK_D)
    mask = live[:, None] & (dims < HEAD_DIM)[None, :]
    top = tl.full([BLOCK_ROWS], float("-inf"), dtype=tl.float32)
    for i in tl.static_range(STATES):
        lse = tl.load(lses_ptr[i] + token * lses_token[i] + head * lses_head[i], mask=live, other=float("-inf"))
        top = tl.maximum(top, lse)
    base = tl.where(top == float("-inf"), 0.0, top)  # -inf - -inf is NaN
    total = tl.zeros([BLOCK_ROWS], dtype=tl.float32)
    acc = tl.zeros([BLOCK_ROWS, BLOCK_D], dtype=tl.float32)
    for i in tl.static_range(STATES):
        lse = tl.load(lses_ptr[i] + token * lses_token[i] + head * lses_head[i], mask=live, other=float("-inf"))
        rows = outs_ptr[i] + (token * outs_token[i] + head * outs_head[i])[:, None] + dims[None, :]
        # Read beside its LSE rather than after it, also where it has no weight; then it is not used, for it may be NaN.
        part = tl.load(rows, mask=mask, other=0.0).to(tl.float32)
        weight = tl.exp(lse - base)
        total += weight
        acc += tl.where((weight > 0.0)[:, None], part, 0.0) * weight[:, None]
    empty = total == 0.0
    # Not divided by 1: a single state must come out as it went in, whatever the device's division rounds.
    merged = tl.where((empty | (total == 1.0))[:, None], acc, acc / tl.where(empty, 1.0, total)[:, None])
    target = out_ptr + (token * out_token + head * out_head)[:, None] + dims[None, :]
    tl.store(target, merged.to(out_ptr.dtype.element_ty), mask=mask)
    lse = tl.where(empty, float("-inf"), tl.where(total == 1.0, base, base + tl.log(tl.where(empty, 1.0, total))))
    tl.store(lse_ptr + token * lse_token + head * lse_head, lse, mask=live)


def merge_states(
    outs: Sequence[torch.Tensor],
    lses: Sequence[torch.Tensor],
    *,
    out: torch.Tensor | None = None,
    lse_out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `tokenspeed_kernel.ops.attention.merge_states`."""
    return launch(outs, lses, out, lse_out, chained=False)


def launch(
    outs: Sequence[torch.Tensor],
    lses: Sequence[torch.Tensor],
    out: torch.Tensor | None,
    lse_out: torch.Tensor | None,
    *,
    chained: bool,
    block_elements: int = _BLOCK_ELEMENTS,
    num_warps: int = 4,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch the kernel; chained, it overlaps the end of the launch before it (sm_90 and later)."""
    num_tokens, num_heads, head_dim = outs[0].shape
    if out is None:
        out = torch.empty(outs[0].shape, dtype=outs[0].dtype, device=outs[0].device)
    if lse_out is None:
        lse_out = torch.empty((num_tokens, num_heads), dtype=torch.float32, device=outs[0].device)
    num_rows = num_tokens * num_heads
    if num_rows > 0:
        block_d = triton.next_power_of_2(head_dim)
        block_rows = max(1, block_elements // block_d)
        options = {"launch_pdl": True} if chained else {}
        _merge_states_kernel[(triton.cdiv(num_rows, block_rows),)](
            tuple(outs), tuple(lses), out, lse_out, num_rows,
            tuple(one.stride(0) for one in outs), tuple(one.stride(1) for one in outs),
            tuple(one.stride(0) for one in lses), tuple(one.stride(1) for one in lses),
            out.stride(0), out.stride(1), lse_out.stride(0), lse_out.stride(1),
            STATES=len(outs), HEADS=num_heads, HEAD_DIM=head_dim, BLOCK_D=block_d, BLOCK_ROWS=block_rows, CHAINED=chained,
            num_warps=num_warps, **options,
        )  # fmt: skip
    return out, lse_out
