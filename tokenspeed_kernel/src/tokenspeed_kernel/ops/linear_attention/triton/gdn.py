"""Gated delta rule in Triton.

Prefill takes two kernels. The first solves each chunk's triangular system, all chunks at once; the second carries the state from
chunk to chunk, each program a block of the value dimension. See `cpu/gdn.py` for the equations.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from tokenspeed_kernel.ops.linear_attention.triton.chunks import (
    find_chunk,
    l2_normalized,
    request_rows,
    sums_between,
    sums_until_end,
)
from tokenspeed_kernel.ops.linear_attention.triton.memory import shared_bytes

__all__ = ["gdn_decode", "gdn_prefill", "scan_config"]


@triton.jit
def _solve_chunks_kernel(
    q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr, slots_ptr, bounds_ptr, keys_ptr, values_ptr, scores_ptr,
    num_reqs, num_slots, num_heads, slot_step, q_row, q_head, k_row, k_head, v_row, v_head, g_row, g_head, beta_row, beta_head,
    GROUP: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_K: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_R: tl.constexpr, L2: tl.constexpr,
):  # fmt: skip
    request, start, end, _ = find_chunk(tl.program_id(0), bounds_ptr, num_reqs, CHUNK, BLOCK_R)
    if request >= num_reqs:
        return
    slot = tl.load(slots_ptr + request * slot_step)
    if (slot < 0) | (slot >= num_slots):
        return
    head = tl.program_id(1)
    place = tl.arange(0, CHUNK)
    rows = (start + place).to(tl.int64)
    inside = rows < end
    dims = tl.arange(0, BLOCK_K)
    mask = inside[:, None] & (dims < KEY_DIM)[None, :]
    dtype = k_ptr.dtype.element_ty
    q = tl.load(q_ptr + rows[:, None] * q_row + (head // GROUP) * q_head + dims[None, :], mask=mask, other=0.0)
    k = tl.load(k_ptr + rows[:, None] * k_row + (head // GROUP) * k_head + dims[None, :], mask=mask, other=0.0)
    if L2:
        q = l2_normalized(q).to(dtype)
        k = l2_normalized(k).to(dtype)
    g = tl.load(g_ptr + rows * g_row + head * g_head, mask=inside, other=0.0).to(tl.float32)
    beta = tl.load(beta_ptr + rows * beta_row + head * beta_head, mask=inside, other=0.0).to(tl.float32)
    decay = tl.exp(sums_between(g, CHUNK))
    row_heads = rows * num_heads + head  # the scratch tensors are contiguous

    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * decay
    to_scores = scores_ptr + row_heads[:, None] * CHUNK + place[None, :]
    tl.store(to_scores, scores.to(dtype), mask=inside[:, None])

    system = tl.dot(k, tl.trans(k), input_precision="ieee") * beta[:, None] * decay
    # Rows of the inverse of the unit triangular matrix, one after the other, each from those before it: the product of
    # powers that would need no loop loses all digits where keys repeat.
    inverse = tl.where(place[:, None] > place[None, :], -system, 0.0)
    for index in range(1, tl.minimum(end - start, CHUNK)):
        mine = place[:, None] == index
        row = tl.sum(tl.where(mine, inverse, 0.0), 0)
        row += tl.sum(row[:, None] * inverse, 0)
        inverse = tl.where(mine, row[None, :], inverse)
    inverse = tl.where(place[:, None] == place[None, :], 1.0, inverse).to(dtype)

    weighted = k.to(tl.float32) * (beta * tl.exp(tl.cumsum(g, 0)))[:, None]
    keys = tl.dot(inverse, weighted.to(dtype), input_precision="ieee")
    tl.store(keys_ptr + row_heads[:, None] * KEY_DIM + dims[None, :], keys.to(dtype), mask=mask)
    # Blocks as wide as the keys: with `inverse` on the left of products of two widths, the narrower one comes out wrong from row
    # 16 on (H200, Triton 3.6, half precision, 4 warps; right with one warp).
    for first in range(0, VALUE_DIM, BLOCK_K):
        columns = first + dims
        block = inside[:, None] & (columns < VALUE_DIM)[None, :]
        v = tl.load(v_ptr + rows[:, None] * v_row + head * v_head + columns[None, :], mask=block, other=0.0).to(tl.float32)
        values = tl.dot(inverse, (v * beta[:, None]).to(dtype), input_precision="ieee")
        tl.store(values_ptr + row_heads[:, None] * VALUE_DIM + columns[None, :], values.to(dtype), mask=block)


@triton.jit
def _scan_chunks_kernel(
    q_ptr, k_ptr, g_ptr, keys_ptr, values_ptr, scores_ptr, states_ptr, slots_ptr, bounds_ptr, known_ptr, out_ptr,
    num_slots, num_heads, scale, slot_step, known_step, q_row, q_head, k_row, k_head, g_row, g_head,
    state_slot, state_head, state_key, out_row, out_head,
    GROUP: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    CHUNK: tl.constexpr, L2: tl.constexpr, KNOWN: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0)
    head = tl.program_id(1)
    first, end, slot = request_rows(request, bounds_ptr, slots_ptr, slot_step, num_slots)
    place = tl.arange(0, CHUNK)
    dims = tl.arange(0, BLOCK_K)
    columns = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    in_columns = (columns < VALUE_DIM)[None, :]
    dtype = k_ptr.dtype.element_ty
    if slot < 0:
        for start in range(first, end, CHUNK):
            rows = (start + place).to(tl.int64)
            target = out_ptr + rows[:, None] * out_row + head * out_head + columns[None, :]
            tl.store(target, tl.zeros([CHUNK, BLOCK_V], dtype), mask=(rows < end)[:, None] & in_columns)
    elif first < end:
        at = states_ptr + slot * state_slot + head * state_head + dims[:, None] * state_key + columns[None, :]
        in_state = (dims < KEY_DIM)[:, None] & in_columns
        known_dims = KEY_DIM
        if KNOWN:
            known_dims = tl.where(tl.load(known_ptr + request * known_step) != 0, KEY_DIM, 0)
        state = tl.load(at, mask=(dims < known_dims)[:, None] & in_columns, other=0.0)
        for start in range(first, end, CHUNK):
            rows = (start + place).to(tl.int64)
            inside = rows < end
            mask = inside[:, None] & (dims < KEY_DIM)[None, :]
            block = inside[:, None] & in_columns
            row_heads = rows * num_heads + head
            q = tl.load(q_ptr + rows[:, None] * q_row + (head // GROUP) * q_head + dims[None, :], mask=mask, other=0.0)
            k = tl.load(k_ptr + rows[:, None] * k_row + (head // GROUP) * k_head + dims[None, :], mask=mask, other=0.0)
            keys = tl.load(keys_ptr + row_heads[:, None] * KEY_DIM + dims[None, :], mask=mask, other=0.0)
            values = tl.load(values_ptr + row_heads[:, None] * VALUE_DIM + columns[None, :], mask=block, other=0.0)
            scores = tl.load(scores_ptr + row_heads[:, None] * CHUNK + place[None, :], mask=inside[:, None], other=0.0)
            g = tl.load(g_ptr + rows * g_row + head * g_head, mask=inside, other=0.0).to(tl.float32)
            until_end = sums_until_end(g_ptr + head * g_head, rows, g_row, end, start + CHUNK)
            if L2:
                q = l2_normalized(q).to(dtype)
                k = l2_normalized(k).to(dtype)
            rounded = state.to(dtype)
            corrections = values.to(tl.float32) - tl.dot(keys, rounded, input_precision="ieee")
            from_state = tl.dot(q, rounded, input_precision="ieee") * tl.exp(tl.cumsum(g, 0))[:, None]
            result = (from_state + tl.dot(scores, corrections.to(dtype), input_precision="ieee")) * scale
            tl.store(out_ptr + rows[:, None] * out_row + head * out_head + columns[None, :], result.to(dtype), mask=block)
            faded = (corrections * tl.exp(until_end)[:, None]).to(dtype)
            state = state * tl.exp(tl.sum(g, 0)) + tl.dot(tl.trans(k), faded, input_precision="ieee")
        tl.store(at, state, mask=in_state)


@triton.jit
def _gdn_decode_kernel(
    q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr, states_ptr, slots_ptr, out_ptr, num_slots, q_len, scale, slot_step,
    q_req, q_row, q_head, k_req, k_row, k_head, v_req, v_row, v_head, g_req, g_row, g_head, beta_req, beta_row, beta_head,
    state_slot, state_head, state_key, out_req, out_row, out_head,
    GROUP: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    L2: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    slot = tl.load(slots_ptr + request * slot_step).to(tl.int64)
    dims = tl.arange(0, BLOCK_K)
    columns = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    in_dims, in_columns = dims < KEY_DIM, columns < VALUE_DIM
    out_ptr += request * out_req + head * out_head
    if (slot < 0) | (slot >= num_slots):
        for token in range(q_len):
            tl.store(out_ptr + token * out_row + columns, tl.zeros([BLOCK_V], out_ptr.dtype.element_ty), mask=in_columns)
    else:
        at = states_ptr + slot * state_slot + head * state_head + dims[:, None] * state_key + columns[None, :]
        in_state = in_dims[:, None] & in_columns[None, :]
        state = tl.load(at, mask=in_state, other=0.0)
        for token in range(q_len):
            key_head = head // GROUP
            q = tl.load(q_ptr + request * q_req + token * q_row + key_head * q_head + dims, mask=in_dims, other=0.0).to(tl.float32)
            k = tl.load(k_ptr + request * k_req + token * k_row + key_head * k_head + dims, mask=in_dims, other=0.0).to(tl.float32)
            v = tl.load(v_ptr + request * v_req + token * v_row + head * v_head + columns, mask=in_columns, other=0.0)
            g = tl.load(g_ptr + request * g_req + token * g_row + head * g_head).to(tl.float32)
            beta = tl.load(beta_ptr + request * beta_req + token * beta_row + head * beta_head).to(tl.float32)
            if L2:
                q = q / tl.sqrt(tl.sum(q * q, 0) + 1e-6)
                k = k / tl.sqrt(tl.sum(k * k, 0) + 1e-6)
            state *= tl.exp(g)
            error = (v.to(tl.float32) - tl.sum(state * k[:, None], 0)) * beta
            state += k[:, None] * error[None, :]
            result = tl.sum(state * q[:, None], 0) * scale
            tl.store(out_ptr + token * out_row + columns, result.to(out_ptr.dtype.element_ty), mask=in_columns)
        tl.store(at, state, mask=in_state)


@functools.cache
def scan_config(item_bytes: int, key_dim: int, value_dim: int, shared: int) -> tuple[int, int, int, int]:
    """(tokens of a chunk, block of the value dimension, warps, stages) that fit a block's shared memory of `shared` bytes."""
    block_k = max(16, triton.next_power_of_2(key_dim))
    half = item_bytes == 2  # float32 products take no matrix unit: small tiles, or they spill
    chunk = (64 if block_k <= 128 else 32) if half else 16
    block_v = min(32 if block_k <= 128 else 16, max(16, triton.next_power_of_2(value_dim)))
    # Operands of one step: q, k, keys; values; scores. The state and one operand more are laid out anew for each product.
    step = item_bytes * chunk * (3 * block_k + block_v + chunk)
    extra = item_bytes * block_k * (block_v + chunk)
    stages = 2 if 2 * step + extra <= shared else 1
    return chunk, block_v, 4 if half else 8, stages


def gdn_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    states: torch.Tensor,
    state_indices: torch.Tensor,
    cu_seqlens: torch.Tensor,
    *,
    has_initial_state: torch.Tensor | None = None,
    scale: float | None = None,
    qk_l2norm: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `tokenspeed_kernel.ops.linear_attention.gdn_prefill`."""
    num_tokens, num_heads, value_dim = v.shape
    _, key_heads, key_dim = q.shape
    num_reqs = state_indices.shape[0]
    if out is None:
        out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    if num_tokens == 0 or num_reqs == 0:
        return out
    chunk, block_v, warps, stages = scan_config(q.element_size(), key_dim, value_dim, shared_bytes(q.device))
    block_k = max(16, triton.next_power_of_2(key_dim))
    bounds = cu_seqlens.contiguous()
    keys = torch.empty((num_tokens, num_heads, key_dim), dtype=q.dtype, device=q.device)
    values = torch.empty((num_tokens, num_heads, value_dim), dtype=q.dtype, device=q.device)
    scores = torch.empty((num_tokens, num_heads, chunk), dtype=q.dtype, device=q.device)
    shape = {
        "GROUP": num_heads // key_heads, "KEY_DIM": key_dim, "VALUE_DIM": value_dim, "BLOCK_K": block_k, "BLOCK_V": block_v,
        "CHUNK": chunk, "L2": qk_l2norm,
    }  # fmt: skip
    solve = {name: value for name, value in shape.items() if name != "BLOCK_V"}
    # Each request adds at most one chunk that is not full; programs beyond the last chunk end at once.
    most_chunks = num_tokens // chunk + min(num_reqs, num_tokens)
    _solve_chunks_kernel[(most_chunks, num_heads)](
        q, k, v, g, beta, state_indices, bounds, keys, values, scores, num_reqs, states.shape[0], num_heads,
        state_indices.stride(0), q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        *g.stride(), *beta.stride(), **solve, BLOCK_R=triton.next_power_of_2(num_reqs), num_warps=warps, num_stages=1,
    )  # fmt: skip
    unused = bounds if has_initial_state is None else has_initial_state.view(torch.uint8)
    _scan_chunks_kernel[(num_reqs, num_heads, triton.cdiv(value_dim, block_v))](
        q, k, g, keys, values, scores, states, state_indices, bounds, unused, out, states.shape[0], num_heads,
        float(key_dim**-0.5 if scale is None else scale), state_indices.stride(0), unused.stride(0),
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), *g.stride(), *states.stride()[:3], out.stride(0), out.stride(1),
        **shape, KNOWN=has_initial_state is not None, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out


def gdn_decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    states: torch.Tensor,
    state_indices: torch.Tensor,
    *,
    scale: float | None = None,
    qk_l2norm: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `tokenspeed_kernel.ops.linear_attention.gdn_decode`."""
    num_reqs, q_len, num_heads, value_dim = v.shape
    key_heads, key_dim = q.shape[2:]
    if out is None:
        out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    if num_reqs == 0 or q_len == 0:
        return out
    block_k = triton.next_power_of_2(key_dim)
    # A program's part of the state stays in registers: 32 of them for each of 128 threads at 128 x 32.
    block_v = min(triton.next_power_of_2(value_dim), max(1, 4096 // block_k))
    _gdn_decode_kernel[(num_reqs, num_heads, triton.cdiv(value_dim, block_v))](
        q, k, v, g, beta, states, state_indices, out, states.shape[0], q_len,
        float(key_dim**-0.5 if scale is None else scale), state_indices.stride(0),
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *g.stride(), *beta.stride(), *states.stride()[:3], *out.stride()[:3],
        GROUP=num_heads // key_heads, KEY_DIM=key_dim, VALUE_DIM=value_dim, BLOCK_K=block_k, BLOCK_V=block_v, L2=qk_l2norm,
        num_warps=4,
    )  # fmt: skip
    return out
