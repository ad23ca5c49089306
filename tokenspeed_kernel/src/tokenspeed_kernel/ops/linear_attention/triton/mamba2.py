"""Mamba2's selective state space in Triton: one program a request, a head and a block of its elements, from chunk to chunk.

The state is held transposed, [state_dim, head_dim], as its products need it.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from tokenspeed_kernel.ops.linear_attention.triton.chunks import request_rows, sums_between
from tokenspeed_kernel.ops.linear_attention.triton.memory import shared_bytes

__all__ = ["mamba2_config", "mamba2_prefill", "selective_state_update"]


@triton.jit
def _time_step(dt, bias, lowest, highest, BIAS: tl.constexpr, SOFTPLUS: tl.constexpr, LIMIT: tl.constexpr):
    dt = dt.to(tl.float32)
    if BIAS:
        dt += bias
    if SOFTPLUS:
        dt = tl.where(dt > 20.0, dt, tl.log(1.0 + tl.exp(tl.minimum(dt, 20.0))))
    if LIMIT:
        dt = tl.minimum(tl.maximum(dt, lowest), highest)
    return dt


@triton.jit
def _mamba2_prefill_kernel(
    x_ptr, dt_ptr, a_ptr, b_ptr, c_ptr, states_ptr, d_ptr, z_ptr, dt_bias_ptr, slots_ptr, bounds_ptr, known_ptr, out_ptr,
    num_slots, lowest, highest, slot_step, known_step, x_row, x_head, dt_row, dt_head, a_step, b_row, b_group, c_row, c_group,
    state_slot, state_head, state_dim, d_step, z_row, z_head, dt_bias_step, out_row, out_head,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, STATE_DIM: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
    CHUNK: tl.constexpr, KNOWN: tl.constexpr, SKIP: tl.constexpr, GATE: tl.constexpr,
    BIAS: tl.constexpr, SOFTPLUS: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0)
    head = tl.program_id(1)
    first, end, slot = request_rows(request, bounds_ptr, slots_ptr, slot_step, num_slots)
    place = tl.arange(0, CHUNK)
    dims = tl.arange(0, BLOCK_N)
    columns = tl.program_id(2) * BLOCK_P + tl.arange(0, BLOCK_P)
    in_columns = (columns < HEAD_DIM)[None, :]
    dtype = x_ptr.dtype.element_ty
    if slot < 0:
        for start in range(first, end, CHUNK):
            rows = (start + place).to(tl.int64)
            target = out_ptr + rows[:, None] * out_row + head * out_head + columns[None, :]
            tl.store(target, tl.zeros([CHUNK, BLOCK_P], dtype), mask=(rows < end)[:, None] & in_columns)
    elif first < end:
        at = states_ptr + slot * state_slot + head * state_head + columns[None, :] * state_dim + dims[:, None]
        in_state = (dims < STATE_DIM)[:, None] & in_columns
        known_dims = STATE_DIM
        if KNOWN:
            known_dims = tl.where(tl.load(known_ptr + request * known_step) != 0, STATE_DIM, 0)
        state = tl.load(at, mask=(dims < known_dims)[:, None] & in_columns, other=0.0)
        a = tl.load(a_ptr + head * a_step).to(tl.float32)
        bias = 0.0
        if BIAS:
            bias = tl.load(dt_bias_ptr + head * dt_bias_step).to(tl.float32)
        skip = 0.0
        if SKIP:
            skip = tl.load(d_ptr + head * d_step).to(tl.float32)
        for start in range(first, end, CHUNK):
            rows = (start + place).to(tl.int64)
            inside = rows < end
            mask = inside[:, None] & (dims < STATE_DIM)[None, :]
            block = inside[:, None] & in_columns
            x = tl.load(x_ptr + rows[:, None] * x_row + head * x_head + columns[None, :], mask=block, other=0.0)
            b = tl.load(b_ptr + rows[:, None] * b_row + (head // GROUP) * b_group + dims[None, :], mask=mask, other=0.0)
            c = tl.load(c_ptr + rows[:, None] * c_row + (head // GROUP) * c_group + dims[None, :], mask=mask, other=0.0)
            dt = tl.load(dt_ptr + rows * dt_row + head * dt_head, mask=inside, other=0.0)
            step = tl.where(inside, _time_step(dt, bias, lowest, highest, BIAS, SOFTPLUS, LIMIT), 0.0)
            after = rows + 1
            later = (after < end) & (after < start + CHUNK)
            next_dt = tl.load(dt_ptr + after * dt_row + head * dt_head, mask=later, other=0.0)
            next_step = tl.where(later, _time_step(next_dt, bias, lowest, highest, BIAS, SOFTPLUS, LIMIT), 0.0)
            until_end = tl.cumsum(next_step * a, 0, reverse=True)
            logs = step * a
            scores = tl.dot(c, tl.trans(b), input_precision="ieee") * tl.exp(sums_between(logs, CHUNK))
            weighted = x.to(tl.float32) * step[:, None]
            from_state = tl.dot(c, state.to(dtype), input_precision="ieee") * tl.exp(tl.cumsum(logs, 0))[:, None]
            result = from_state + tl.dot(scores.to(dtype), weighted.to(dtype), input_precision="ieee")
            if SKIP:
                result += skip * x.to(tl.float32)
            if GATE:
                z = tl.load(z_ptr + rows[:, None] * z_row + head * z_head + columns[None, :], mask=block, other=0.0).to(tl.float32)
                result = result * z / (1.0 + tl.exp(-z))
            tl.store(out_ptr + rows[:, None] * out_row + head * out_head + columns[None, :], result.to(dtype), mask=block)
            faded = (weighted * tl.exp(until_end)[:, None]).to(dtype)
            state = state * tl.exp(tl.sum(logs, 0)) + tl.dot(tl.trans(b), faded, input_precision="ieee")
        tl.store(at, state, mask=in_state)


@triton.jit
def _selective_state_update_kernel(
    x_ptr, dt_ptr, a_ptr, b_ptr, c_ptr, states_ptr, d_ptr, z_ptr, dt_bias_ptr, slots_ptr, out_ptr,
    num_slots, q_len, lowest, highest, slot_step, x_req, x_row, x_head, dt_req, dt_row, dt_head, a_step,
    b_req, b_row, b_group, c_req, c_row, c_group, state_slot, state_head, state_dim, d_step, z_req, z_row, z_head, dt_bias_step,
    out_req, out_row, out_head,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, STATE_DIM: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
    SKIP: tl.constexpr, GATE: tl.constexpr, BIAS: tl.constexpr, SOFTPLUS: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    slot = tl.load(slots_ptr + request * slot_step).to(tl.int64)
    dims = tl.arange(0, BLOCK_N)
    columns = tl.program_id(2) * BLOCK_P + tl.arange(0, BLOCK_P)
    in_dims, in_columns = dims < STATE_DIM, columns < HEAD_DIM
    out_ptr += request * out_req + head * out_head
    if (slot < 0) | (slot >= num_slots):
        for token in range(q_len):
            tl.store(out_ptr + token * out_row + columns, tl.zeros([BLOCK_P], out_ptr.dtype.element_ty), mask=in_columns)
    else:
        at = states_ptr + slot * state_slot + head * state_head + columns[:, None] * state_dim + dims[None, :]
        in_state = in_columns[:, None] & in_dims[None, :]
        state = tl.load(at, mask=in_state, other=0.0)
        a = tl.load(a_ptr + head * a_step).to(tl.float32)
        bias = 0.0
        if BIAS:
            bias = tl.load(dt_bias_ptr + head * dt_bias_step).to(tl.float32)
        group = head // GROUP
        for token in range(q_len):
            x = tl.load(x_ptr + request * x_req + token * x_row + head * x_head + columns, mask=in_columns, other=0.0)
            x = x.to(tl.float32)
            b = tl.load(b_ptr + request * b_req + token * b_row + group * b_group + dims, mask=in_dims, other=0.0).to(tl.float32)
            c = tl.load(c_ptr + request * c_req + token * c_row + group * c_group + dims, mask=in_dims, other=0.0).to(tl.float32)
            dt = tl.load(dt_ptr + request * dt_req + token * dt_row + head * dt_head)
            step = _time_step(dt, bias, lowest, highest, BIAS, SOFTPLUS, LIMIT)
            state = state * tl.exp(step * a) + (x * step)[:, None] * b[None, :]
            result = tl.sum(state * c[None, :], 1)
            if SKIP:
                result += tl.load(d_ptr + head * d_step).to(tl.float32) * x
            if GATE:
                z = tl.load(z_ptr + request * z_req + token * z_row + head * z_head + columns, mask=in_columns, other=0.0)
                z = z.to(tl.float32)
                result = result * z / (1.0 + tl.exp(-z))
            tl.store(out_ptr + token * out_row + columns, result.to(out_ptr.dtype.element_ty), mask=in_columns)
        tl.store(at, state, mask=in_state)


@functools.cache
def mamba2_config(item_bytes: int, head_dim: int, state_dim: int, shared: int) -> tuple[int, int, int, int]:
    """(tokens of a chunk, block of the head dimension, warps, stages) that fit a block's shared memory of `shared` bytes."""
    block_n = max(16, triton.next_power_of_2(state_dim))
    half = item_bytes == 2  # float32 products take no matrix unit: small tiles, or they spill
    chunk = (64 if block_n <= 128 else 32) if half else 16
    block_p = min(32 if block_n <= 128 else 16, max(16, triton.next_power_of_2(head_dim)))
    step = item_bytes * chunk * (2 * block_n + 2 * block_p)
    extra = item_bytes * (block_n * block_p + chunk * (chunk + 2 * block_p)) + 4 * chunk * chunk
    stages = 2 if 2 * step + extra <= shared else 1
    return chunk, block_p, 4 if half else 8, stages


def mamba2_prefill(
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    states: torch.Tensor,
    state_indices: torch.Tensor,
    cu_seqlens: torch.Tensor,
    *,
    has_initial_state: torch.Tensor | None = None,
    d: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `tokenspeed_kernel.ops.linear_attention.mamba2_prefill`."""
    num_tokens, num_heads, head_dim = x.shape
    groups, state_dim = b.shape[1:]
    num_reqs = state_indices.shape[0]
    if out is None:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if num_tokens == 0 or num_reqs == 0:
        return out
    chunk, block_p, warps, stages = mamba2_config(x.element_size(), head_dim, state_dim, shared_bytes(x.device))
    bounds = cu_seqlens.contiguous()
    known = bounds if has_initial_state is None else has_initial_state.view(torch.uint8)
    skip, bias, gate = a if d is None else d, a if dt_bias is None else dt_bias, x if z is None else z
    lowest, highest = (0.0, 0.0) if dt_limit is None else dt_limit
    _mamba2_prefill_kernel[(num_reqs, num_heads, triton.cdiv(head_dim, block_p))](
        x, dt, a, b, c, states, skip, gate, bias, state_indices, bounds, known, out, states.shape[0], float(lowest), float(highest),
        state_indices.stride(0), known.stride(0), x.stride(0), x.stride(1), *dt.stride(), a.stride(0), b.stride(0), b.stride(1),
        c.stride(0), c.stride(1), *states.stride()[:3], skip.stride(0), gate.stride(0), gate.stride(1), bias.stride(0),
        out.stride(0), out.stride(1),
        GROUP=num_heads // groups, HEAD_DIM=head_dim, STATE_DIM=state_dim, BLOCK_P=block_p,
        BLOCK_N=max(16, triton.next_power_of_2(state_dim)), CHUNK=chunk, KNOWN=has_initial_state is not None, SKIP=d is not None,
        GATE=z is not None, BIAS=dt_bias is not None, SOFTPLUS=dt_softplus, LIMIT=dt_limit is not None,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out


def selective_state_update(
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    states: torch.Tensor,
    state_indices: torch.Tensor,
    *,
    d: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `tokenspeed_kernel.ops.linear_attention.selective_state_update`."""
    num_reqs, q_len, num_heads, head_dim = x.shape
    groups, state_dim = b.shape[2:]
    if out is None:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if num_reqs == 0 or q_len == 0:
        return out
    block_n = triton.next_power_of_2(state_dim)
    block_p = min(triton.next_power_of_2(head_dim), max(1, 4096 // block_n))
    skip, bias, gate = a if d is None else d, a if dt_bias is None else dt_bias, x if z is None else z
    lowest, highest = (0.0, 0.0) if dt_limit is None else dt_limit
    _selective_state_update_kernel[(num_reqs, num_heads, triton.cdiv(head_dim, block_p))](
        x, dt, a, b, c, states, skip, gate, bias, state_indices, out, states.shape[0], q_len, float(lowest), float(highest),
        state_indices.stride(0), *x.stride()[:3], *dt.stride(), a.stride(0), *b.stride()[:3], *c.stride()[:3], *states.stride()[:3],
        skip.stride(0), *gate.stride()[:3], bias.stride(0), *out.stride()[:3],
        GROUP=num_heads // groups, HEAD_DIM=head_dim, STATE_DIM=state_dim, BLOCK_P=block_p, BLOCK_N=block_n,
        SKIP=d is not None, GATE=z is not None, BIAS=dt_bias is not None, SOFTPLUS=dt_softplus, LIMIT=dt_limit is not None,
        num_warps=4,
    )  # fmt: skip
    return out
