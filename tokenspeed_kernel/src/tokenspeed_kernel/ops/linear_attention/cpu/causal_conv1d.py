"""Causal convolution of each channel on the CPU: one multiply-add of the whole batch for each tap."""

from __future__ import annotations

import torch
from torch.nn.functional import silu

from tokenspeed_kernel.ops.linear_attention.cpu.requests import ragged_requests, valid_rows

__all__ = ["causal_conv1d_prefill", "causal_conv1d_update"]


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
        out = torch.empty(x.shape, dtype=x.dtype)
    for first, last, slot, known in ragged_requests(states.shape[0], state_indices, cu_seqlens, has_initial_state, out):
        past = states[slot].T if known else torch.zeros_like(states[slot].T)
        inputs = torch.cat((past.float(), x[first:last].float()))
        out[first:last] = _convolve(inputs[None], weight, bias, activation)[0].to(out.dtype)
        states[slot] = inputs[last - first :].T.to(states.dtype)
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
        out = torch.empty(x.shape, dtype=x.dtype)
    rows = valid_rows(states.shape[0], state_indices)
    if rows is not None:
        state_indices, x = state_indices[rows], x[rows]
    if state_indices.numel() == 0:
        return out.zero_()
    inputs = torch.cat((states[state_indices].transpose(1, 2).float(), x.float()), 1)
    result = _convolve(inputs, weight, bias, activation)
    states[state_indices] = inputs[:, x.shape[1] :].transpose(1, 2).to(states.dtype)
    if rows is None:
        return out.copy_(result)
    out.zero_()
    out[rows] = result.to(out.dtype)
    return out


def _convolve(inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str | None) -> torch.Tensor:
    """[requests, width - 1 + tokens, channels] to [requests, tokens, channels], float32."""
    num_channels, width = weight.shape
    num_tokens = inputs.shape[1] - (width - 1)
    taps = weight.float()
    start = torch.zeros(num_channels) if bias is None else bias.float()
    result = start.repeat(inputs.shape[0], num_tokens, 1)
    for tap in range(width):
        result.addcmul_(inputs[:, tap : tap + num_tokens], taps[:, tap])
    return silu(result, inplace=True) if activation == "silu" else result
