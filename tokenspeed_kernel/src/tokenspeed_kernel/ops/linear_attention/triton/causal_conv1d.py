"""Causal convolution of each channel in Triton: one program a block of tokens of one request and of channels."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tokenspeed_kernel.ops.linear_attention.triton.chunks import find_chunk

__all__ = ["causal_conv1d_prefill", "causal_conv1d_update"]

_BLOCK_T = 16
_BLOCK_C = 128


@triton.jit
def _causal_conv1d_kernel(
    x_ptr, weight_ptr, bias_ptr, states_ptr, slots_ptr, bounds_ptr, known_ptr, out_ptr, num_reqs, num_slots, num_channels, q_len,
    slot_step, known_step, x_req, x_row, weight_channel, weight_tap, bias_step, state_slot, state_channel, state_place,
    out_req, out_row,
    WIDTH: tl.constexpr, RAGGED: tl.constexpr, KNOWN: tl.constexpr, BIAS: tl.constexpr, SILU: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    if RAGGED:
        request, start, end, chunk = find_chunk(tl.program_id(0), bounds_ptr, num_reqs, BLOCK_T, BLOCK_R)
        if request >= num_reqs:
            return
        first = start - chunk * BLOCK_T
    else:
        blocks = (q_len + BLOCK_T - 1) // BLOCK_T
        request = tl.program_id(0) // blocks
        chunk = tl.program_id(0) % blocks
        first = 0
        start = chunk * BLOCK_T
        end = q_len
        x_ptr += request.to(tl.int64) * x_req
        out_ptr += request.to(tl.int64) * out_req
    channels = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    in_channels = channels < num_channels
    rows = (start + tl.arange(0, BLOCK_T)).to(tl.int64)
    target = out_ptr + rows[:, None] * out_row + channels[None, :]
    block = (rows < end)[:, None] & in_channels[None, :]
    slot = tl.load(slots_ptr + request.to(tl.int64) * slot_step).to(tl.int64)
    if (slot < 0) | (slot >= num_slots):
        tl.store(target, tl.zeros([BLOCK_T, BLOCK_C], out_ptr.dtype.element_ty), mask=block)
    else:
        before = first  # rows before it are in the state
        if KNOWN:
            before = tl.where(tl.load(known_ptr + request * known_step) != 0, first, -(2**30))
        past = states_ptr + slot * state_slot + channels.to(tl.int64) * state_channel
        total = tl.zeros([BLOCK_T, BLOCK_C], tl.float32)
        if BIAS:
            total += tl.load(bias_ptr + channels * bias_step, mask=in_channels, other=0.0).to(tl.float32)[None, :]
        for tap in tl.static_range(WIDTH):
            weight = tl.load(weight_ptr + channels.to(tl.int64) * weight_channel + tap * weight_tap, mask=in_channels, other=0.0)
            source = rows - (WIDTH - 1) + tap
            mask = ((source >= first) & (source < end))[:, None] & in_channels[None, :]
            x = tl.load(x_ptr + source[:, None] * x_row + channels[None, :], mask=mask, other=0.0).to(tl.float32)
            if tap < WIDTH - 1:  # noqa: SIM102 - one is known when it is compiled, the other when it runs
                if chunk == 0:  # before the request's first token: its state
                    place = source - first + (WIDTH - 1)
                    mask = (source < before)[:, None] & in_channels[None, :]
                    x += tl.load(past[None, :] + place[:, None] * state_place, mask=mask, other=0.0).to(tl.float32)
            total += x * weight.to(tl.float32)[None, :]
        if SILU:
            total = total / (1.0 + tl.exp(-total))
        tl.store(target, total.to(out_ptr.dtype.element_ty), mask=block)
        if chunk == 0:
            # The one program that reads the state also writes it, when all of its threads have read: each new place comes from
            # the tail of the tokens or from a later place of the old state, which is still there.
            tl.debug_barrier()
            for kept in tl.static_range(WIDTH - 1):
                moved_from = end - (WIDTH - 1) + kept
                # Masks of a block's type: a scalar beside a block is refused in the interpreter.
                new_channels = tl.where(moved_from >= first, num_channels, 0)
                old_channels = tl.where(moved_from < before, num_channels, 0)
                new = tl.load(x_ptr + moved_from.to(tl.int64) * x_row + channels, mask=channels < new_channels, other=0.0)
                old = tl.load(past + (moved_from - first + (WIDTH - 1)) * state_place, mask=channels < old_channels, other=0.0)
                moved = new.to(tl.float32) + old.to(tl.float32)  # one of them is 0
                tl.debug_barrier()
                tl.store(past + kept * state_place, moved.to(states_ptr.dtype.element_ty), mask=in_channels)


def causal_conv1d_prefill(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    states: torch.Tensor,
    state_indices: torch.Tensor,
    cu_seqlens: torch.Tensor,
    *,
    has_initial_state: torch.Tensor | None = None,
    activation: str | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `tokenspeed_kernel.ops.linear_attention.causal_conv1d_prefill`."""
    if out is None:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    num_tokens, num_reqs = x.shape[0], state_indices.shape[0]
    if x.numel() == 0 or num_reqs == 0:
        return out
    bounds = cu_seqlens.contiguous()
    blocks = num_tokens // _BLOCK_T + min(num_reqs, num_tokens)
    strides = (0, x.stride(0), 0, out.stride(0))
    _launch(x, weight, bias, states, state_indices, bounds, has_initial_state, activation, out, blocks, 0, strides)
    return out


def causal_conv1d_update(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    states: torch.Tensor,
    state_indices: torch.Tensor,
    *,
    activation: str | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `tokenspeed_kernel.ops.linear_attention.causal_conv1d_update`."""
    if out is None:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    num_reqs, q_len, _ = x.shape
    if x.numel() == 0:
        return out
    strides = (x.stride(0), x.stride(1), out.stride(0), out.stride(1))
    blocks = num_reqs * triton.cdiv(q_len, _BLOCK_T)
    _launch(x, weight, bias, states, state_indices, None, None, activation, out, blocks, q_len, strides)
    return out


def _launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    states: torch.Tensor,
    state_indices: torch.Tensor,
    bounds: torch.Tensor | None,
    has_initial_state: torch.Tensor | None,
    activation: str | None,
    out: torch.Tensor,
    blocks: int,
    q_len: int,
    strides: tuple[int, int, int, int],
) -> None:
    num_channels, width = weight.shape
    num_reqs = state_indices.shape[0]
    block_t = _BLOCK_T if bounds is not None else min(_BLOCK_T, triton.next_power_of_2(q_len))
    if bounds is None:
        blocks = num_reqs * triton.cdiv(q_len, block_t)
    known = x if has_initial_state is None else has_initial_state.view(torch.uint8)
    x_req, x_row, out_req, out_row = strides
    _causal_conv1d_kernel[(blocks, triton.cdiv(num_channels, _BLOCK_C))](
        x, weight, weight if bias is None else bias, states, state_indices, x if bounds is None else bounds, known, out,
        num_reqs, states.shape[0], num_channels, q_len, state_indices.stride(0), known.stride(0), x_req, x_row,
        *weight.stride(), 0 if bias is None else bias.stride(0), *states.stride(), out_req, out_row,
        WIDTH=width, RAGGED=bounds is not None, KNOWN=has_initial_state is not None, BIAS=bias is not None,
        SILU=activation == "silu", BLOCK_T=block_t, BLOCK_C=_BLOCK_C, BLOCK_R=triton.next_power_of_2(num_reqs), num_warps=4,
    )  # fmt: skip
