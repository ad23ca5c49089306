"""The truth of the linear-attention family: the recurrences as they are written, one token at a time, in float64."""

from __future__ import annotations

import torch
from torch.nn.functional import silu, softplus

__all__ = [
    "causal_conv1d_prefill",
    "causal_conv1d_update",
    "gdn_decode",
    "gdn_prefill",
    "mamba2_prefill",
    "selective_state_update",
]

_L2_EPS = 1e-6


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
    result = torch.zeros((*q.shape[:1], *v.shape[1:]), dtype=torch.float64, device=q.device)
    for first, last, slot, known in _requests(states, state_indices, cu_seqlens, has_initial_state):
        rows = slice(first, last)
        state = _initial(states[slot], known)
        result[rows] = _delta_rule(q[rows], k[rows], v[rows], g[rows], beta[rows], state, scale, qk_l2norm)
        states[slot] = state.to(states.dtype)
    return result.to(q.dtype) if out is None else out.copy_(result)


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
    result = torch.zeros((*q.shape[:2], *v.shape[2:]), dtype=torch.float64, device=q.device)
    for request, slot in enumerate(state_indices.tolist()):
        if 0 <= slot < states.shape[0]:
            state = states[slot].double()
            at = request
            result[at] = _delta_rule(q[at], k[at], v[at], g[at], beta[at], state, scale, qk_l2norm)
            states[slot] = state.to(states.dtype)
    return result.to(q.dtype) if out is None else out.copy_(result)


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
    result = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for first, last, slot, known in _requests(states, state_indices, cu_seqlens, has_initial_state):
        past = _initial(states[slot], known)
        result[first:last], past = _convolve(x[first:last], weight, bias, past, activation)
        states[slot] = past.to(states.dtype)
    return result.to(x.dtype) if out is None else out.copy_(result)


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
    result = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for request, slot in enumerate(state_indices.tolist()):
        if 0 <= slot < states.shape[0]:
            result[request], past = _convolve(x[request], weight, bias, states[slot].double(), activation)
            states[slot] = past.to(states.dtype)
    return result.to(x.dtype) if out is None else out.copy_(result)


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
    result = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for first, last, slot, known in _requests(states, state_indices, cu_seqlens, has_initial_state):
        rows = slice(first, last)
        state = _initial(states[slot], known)
        gate = None if z is None else z[rows]
        step = _time_step(dt[rows], dt_bias, dt_softplus, dt_limit)
        result[rows] = _state_space(x[rows], step, a, b[rows], c[rows], state, d, gate)
        states[slot] = state.to(states.dtype)
    return result.to(x.dtype) if out is None else out.copy_(result)


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
    result = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for request, slot in enumerate(state_indices.tolist()):
        if 0 <= slot < states.shape[0]:
            state = states[slot].double()
            gate = None if z is None else z[request]
            step = _time_step(dt[request], dt_bias, dt_softplus, dt_limit)
            result[request] = _state_space(x[request], step, a, b[request], c[request], state, d, gate)
            states[slot] = state.to(states.dtype)
    return result.to(x.dtype) if out is None else out.copy_(result)


def _requests(
    states: torch.Tensor, state_indices: torch.Tensor, cu_seqlens: torch.Tensor, has_initial_state: torch.Tensor | None
) -> list[tuple[int, int, int, bool]]:
    """(first row, last row, slot, whether the slot's state counts) of each request that has tokens and a valid slot."""
    bounds, slots = cu_seqlens.tolist(), state_indices.tolist()
    known = [True] * len(slots) if has_initial_state is None else has_initial_state.tolist()
    rows = zip(bounds[:-1], bounds[1:], slots, known, strict=True)
    return [(first, last, slot, bool(has)) for first, last, slot, has in rows if last > first and 0 <= slot < states.shape[0]]


def _initial(state: torch.Tensor, known: bool) -> torch.Tensor:
    """What a request starts from; where the slot's state does not count it is not read, because it may be NaN."""
    return state.double() if known else torch.zeros_like(state, dtype=torch.float64)


def _delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    scale: float | None,
    qk_l2norm: bool,
) -> torch.Tensor:
    """Outputs [tokens, Hv, V] of one request; `state` [Hv, K, V] float64 is advanced in place."""
    q, k = q.double(), k.double()
    if qk_l2norm:
        q, k = (one / torch.sqrt(one.square().sum(-1, keepdim=True) + _L2_EPS) for one in (q, k))
    group = v.shape[1] // q.shape[1]
    q, k = (one.repeat_interleave(group, 1) for one in (q, k))
    q = q * (q.shape[-1] ** -0.5 if scale is None else scale)
    v, beta, decay = v.double(), beta.double()[..., None], g.double().exp()[..., None, None]
    outputs = torch.empty_like(v)
    for token in range(v.shape[0]):
        state *= decay[token]
        error = v[token] - torch.einsum("hkv,hk->hv", state, k[token])
        state += k[token][:, :, None] * (beta[token] * error)[:, None, :]
        outputs[token] = torch.einsum("hkv,hk->hv", state, q[token])
    return outputs


def _convolve(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, past: torch.Tensor, activation: str | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs [tokens, channels] and the new past [channels, width - 1] of one request."""
    width = weight.shape[1]
    inputs = torch.cat((past, x.double().T), 1)
    outputs = torch.stack([(inputs[:, t : t + width] * weight.double()).sum(1) for t in range(x.shape[0])])
    if bias is not None:
        outputs = outputs + bias.double()
    return (silu(outputs) if activation == "silu" else outputs), inputs[:, inputs.shape[1] - (width - 1) :]


def _time_step(
    dt: torch.Tensor, dt_bias: torch.Tensor | None, dt_softplus: bool, dt_limit: tuple[float, float] | None
) -> torch.Tensor:
    dt = dt.double() if dt_bias is None else dt.double() + dt_bias.double()
    dt = softplus(dt) if dt_softplus else dt
    return dt if dt_limit is None else dt.clamp(*dt_limit)


def _state_space(
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    state: torch.Tensor,
    d: torch.Tensor | None,
    z: torch.Tensor | None,
) -> torch.Tensor:
    """Outputs [tokens, H, P] of one request; `state` [H, P, N] float64 is advanced in place."""
    group = x.shape[1] // b.shape[1]
    b, c = (one.double().repeat_interleave(group, 1) for one in (b, c))
    x, decay = x.double(), (dt * a.double()).exp()[..., None, None]
    outputs = torch.empty_like(x)
    for token in range(x.shape[0]):
        state *= decay[token]
        state += (dt[token][:, None] * x[token])[:, :, None] * b[token][:, None, :]
        outputs[token] = torch.einsum("hpn,hn->hp", state, c[token])
    if d is not None:
        outputs += d.double()[:, None] * x
    return outputs if z is None else outputs * silu(z.double())
