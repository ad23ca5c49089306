"""Selective state space of Mamba2 on the CPU: chunks of tokens as matrix products, states carried from chunk to chunk.

Source: Transformers are SSMs, arXiv:2405.21060, section 6 (the block decomposition).
"""

from __future__ import annotations

import torch
from torch.nn.functional import silu, softplus

from tokenspeed_kernel.ops.linear_attention.cpu.requests import ragged_requests, sums_between, valid_rows

__all__ = ["mamba2_prefill", "selective_state_update"]

_CHUNK = 64


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
    if out is None:
        out = torch.empty(x.shape, dtype=x.dtype)
    step = _time_step(dt, dt_bias, dt_softplus, dt_limit)
    for first, last, slot, known in ragged_requests(states.shape[0], state_indices, cu_seqlens, has_initial_state, out):
        state = states[slot].clone() if known else torch.zeros_like(states[slot])
        for start in range(first, last, _CHUNK):
            rows = slice(start, min(start + _CHUNK, last))
            gate = None if z is None else z[rows]
            out[rows] = _chunk(x[rows].float(), step[rows], a, b[rows], c[rows], state, d, gate).to(out.dtype)
        states[slot] = state
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
    if out is None:
        out = torch.empty(x.shape, dtype=x.dtype)
    rows = valid_rows(states.shape[0], state_indices)
    if rows is not None:
        state_indices = state_indices[rows]
        x, dt, b, c = (one[rows] for one in (x, dt, b, c))
        z = None if z is None else z[rows]
    if state_indices.numel() == 0:
        return out.zero_()
    state = states[state_indices]
    num_reqs, num_heads, head_dim, state_dim = state.shape
    groups = b.shape[2]
    grouped = state.view(num_reqs, groups, num_heads // groups, head_dim, state_dim)
    step, x = _time_step(dt, dt_bias, dt_softplus, dt_limit), x.float()
    decay, weighted = (step * a).exp_()[..., None, None], x * step[..., None]
    b, c = b.float(), c.float()
    result = torch.empty(x.shape)
    for token in range(x.shape[1]):
        state.mul_(decay[:, token])
        grouped += weighted[:, token].view(num_reqs, groups, -1, head_dim, 1) * b[:, token, :, None, None, :]
        result[:, token] = torch.matmul(grouped, c[:, token, :, None, :, None]).view(num_reqs, num_heads, head_dim)
    states[state_indices] = state
    result = _finished(result, x, d, z)
    if rows is None:
        return out.copy_(result)
    out.zero_()
    out[rows] = result.to(out.dtype)
    return out


def _chunk(
    x: torch.Tensor,
    step: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    state: torch.Tensor,
    d: torch.Tensor | None,
    z: torch.Tensor | None,
) -> torch.Tensor:
    """Outputs [tokens, H, P] float32 of one chunk; `state` [H, P, N] is advanced in place."""
    num_heads = x.shape[1]
    group = num_heads // b.shape[1]
    logs = (step * a).T.contiguous()
    between = sums_between(logs).exp_()
    since_start = logs.cumsum(-1).exp_()[..., None]
    b, c = b.float().transpose(0, 1), c.float().transpose(0, 1)
    weighted = (x * step[..., None]).transpose(0, 1)
    scores = (c @ b.transpose(-1, -2)).repeat_interleave(group, 0).mul_(between)
    b, c = (one.repeat_interleave(group, 0) for one in (b, c))
    result = torch.baddbmm(scores @ weighted, c * since_start, state.transpose(-1, -2))
    state.mul_(since_start[:, -1:]).baddbmm_((weighted * between[:, -1, :, None]).transpose(-1, -2), b)
    return _finished(result.transpose(0, 1), x, d, z)


def _finished(result: torch.Tensor, x: torch.Tensor, d: torch.Tensor | None, z: torch.Tensor | None) -> torch.Tensor:
    """Add the skip connection, and apply the gate."""
    if d is not None:
        result = torch.addcmul(result, x, d.float()[:, None])
    return result if z is None else result * silu(z.float())


def _time_step(
    dt: torch.Tensor, dt_bias: torch.Tensor | None, dt_softplus: bool, dt_limit: tuple[float, float] | None
) -> torch.Tensor:
    dt = dt.float() if dt_bias is None else dt.float() + dt_bias.float()
    dt = softplus(dt) if dt_softplus else dt
    return dt if dt_limit is None else dt.clamp(*dt_limit)
