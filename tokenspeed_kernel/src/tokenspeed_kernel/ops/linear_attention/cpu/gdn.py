"""Gated delta rule on the CPU: chunks of tokens as matrix products, states carried from chunk to chunk.

Within a chunk of tokens 1..C, with D(i, j) = exp(g(j+1) + ... + g(i)), the corrections u of the values solve the unit lower
triangular system u(i) + sum over j < i of beta(i) D(i, j) k(i).k(j) u(j) = beta(i) (v(i) - exp(g(1) + ... + g(i)) S'k(i)).
Source: Gated Delta Networks, arXiv:2412.06464, section 3.3; the chunked form of the delta rule, arXiv:2406.06484.
"""

from __future__ import annotations

import torch

from tokenspeed_kernel.ops.linear_attention.cpu.requests import l2_normalized, ragged_requests, sums_between, valid_rows

__all__ = ["gdn_decode", "gdn_prefill"]

_CHUNK = 64
_CHUNKS_AT_ONCE = 16  # bounds the memory of one pass: 1024 tokens


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
    if out is None:
        out = torch.empty(v.shape, dtype=v.dtype)
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    for first, last, slot, known in ragged_requests(states.shape[0], state_indices, cu_seqlens, has_initial_state, out):
        state = states[slot].clone() if known else torch.zeros_like(states[slot])
        for start in range(first, last, _CHUNK * _CHUNKS_AT_ONCE):
            rows = slice(start, min(start + _CHUNK * _CHUNKS_AT_ONCE, last))
            result = _pass(q[rows], k[rows], v[rows], g[rows], beta[rows], state, factor, qk_l2norm)
            out[rows] = result.to(out.dtype)
        states[slot] = state
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
    if out is None:
        out = torch.empty(v.shape, dtype=v.dtype)
    rows = valid_rows(states.shape[0], state_indices)
    if rows is not None:
        out.zero_()
        state_indices = state_indices[rows]
        q, k, v, g, beta = (one[rows] for one in (q, k, v, g, beta))
    if state_indices.numel() == 0:
        return out
    q, k, v = q.float(), k.float(), v.float()
    if qk_l2norm:
        q, k = l2_normalized(q), l2_normalized(k)
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    group = v.shape[2] // k.shape[2]
    decay, beta = g.float().exp()[..., None, None], beta.float()[..., None]
    state = states[state_indices]
    num_reqs, num_heads, key_dim, value_dim = state.shape
    grouped = state.view(num_reqs, num_heads // group, group, key_dim, value_dim)
    result = torch.empty(v.shape, dtype=torch.float32)
    for token in range(v.shape[1]):
        key, query = k[:, token, :, None, None, :], q[:, token, :, None, None, :] * factor
        state.mul_(decay[:, token])
        seen = torch.matmul(key, grouped).view(num_reqs, num_heads, value_dim)
        error = (v[:, token] - seen).mul_(beta[:, token])
        grouped += key.transpose(-1, -2) * error.view(num_reqs, num_heads // group, group, 1, value_dim)
        result[:, token] = torch.matmul(query, grouped).view(num_reqs, num_heads, value_dim)
    states[state_indices] = state
    if rows is None:
        return out.copy_(result)
    out[rows] = result.to(out.dtype)
    return out


def _pass(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    factor: float,
    qk_l2norm: bool,
) -> torch.Tensor:
    """Outputs [tokens, Hv, V] float32 of a stretch of one request; `state` [Hv, K, V] is advanced in place."""
    num_tokens, num_heads, value_dim = v.shape
    q, k = q.float(), k.float()
    if qk_l2norm:
        q, k = l2_normalized(q), l2_normalized(k)
    group = num_heads // k.shape[1]
    # [Hv, chunks, C, ...]; the padding has key 0 and beta 0, so that it changes nothing.
    q, k = (_chunked(one).repeat_interleave(group, 0) for one in (q * factor, k))
    v, beta, g = _chunked(v.float()), _chunked(beta.float()[..., None]), _chunked(g.float()[..., None]).squeeze(-1)
    between = sums_between(g).exp_()
    since_start = g.cumsum(-1).exp_()[..., None]
    weighted = k * beta
    system = (weighted @ k.transpose(-1, -2)).mul_(between).tril_(-1)
    right = torch.cat((v * beta, weighted * since_start), -1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    values, keys = solved[..., :value_dim], solved[..., value_dim:]
    scores = (q @ k.transpose(-1, -2)).mul_(between)
    queries = q * since_start
    until_end = k * between[..., -1, :, None]
    result = torch.empty_like(v)
    for chunk in range(v.shape[1]):
        corrections = torch.baddbmm(values[:, chunk], keys[:, chunk], state, alpha=-1)
        torch.baddbmm(scores[:, chunk] @ corrections, queries[:, chunk], state, out=result[:, chunk])
        state.mul_(since_start[:, chunk, -1, :, None]).baddbmm_(until_end[:, chunk].transpose(1, 2), corrections)
    return result.reshape(num_heads, -1, value_dim)[:, :num_tokens].transpose(0, 1)


def _chunked(x: torch.Tensor) -> torch.Tensor:
    """[tokens, heads, dim] to [heads, chunks, C, dim], padded with zeros."""
    num_tokens, num_heads, dim = x.shape
    size = min(_CHUNK, num_tokens)
    chunks = -(-num_tokens // size)
    padded = torch.zeros((num_heads, chunks * size, dim))
    padded[:, :num_tokens] = x.transpose(0, 1)
    return padded.view(num_heads, chunks, size, dim)
