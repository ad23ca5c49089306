"""Least work of linear attention: each token's operands once, each request's state read and written once, token by token."""

from __future__ import annotations

from typing import Any, Final

import torch

from tokenspeed_kernel.case import Cost
from tokenspeed_kernel.ops.linear_attention.contract import (
    CAUSAL_CONV1D_PREFILL,
    CAUSAL_CONV1D_UPDATE,
    GDN_DECODE,
    GDN_PREFILL,
    MAMBA2_PREFILL,
    SELECTIVE_STATE_UPDATE,
)

__all__ = ["COSTS"]


def _moved_bytes(inputs: dict[str, Any], result: torch.Tensor) -> int:
    states, slots = inputs["states"], inputs["state_indices"]
    live = (slots >= 0) & (slots < states.shape[0])
    known = inputs.get("has_initial_state")
    read = int((live if known is None else live & known).sum())
    state = states[0].numel() * states.element_size() if states.shape[0] else 0
    operands = [one for name, one in inputs.items() if isinstance(one, torch.Tensor) and name != "states"]
    return int((read + int(live.sum())) * state + sum(one.numel() * one.element_size() for one in (*operands, result)))


def _gdn_flops(inputs: dict[str, Any]) -> int:
    """For each element of a state and token: the decay, and two each for what the key recalls, the correction, and the query."""
    v = inputs["v"]
    return int(7 * v.numel() * inputs["k"].shape[-1])


def _mamba2_flops(inputs: dict[str, Any]) -> int:
    """For each element of a state and token: the decay, and two each for what enters and what is read."""
    return int(5 * inputs["x"].numel() * inputs["b"].shape[-1])


def _conv_flops(inputs: dict[str, Any]) -> int:
    return int(2 * inputs["x"].numel() * inputs["weight"].shape[-1])


COSTS: Final = {
    GDN_PREFILL.name: Cost(_moved_bytes, _gdn_flops),
    GDN_DECODE.name: Cost(_moved_bytes, _gdn_flops),
    CAUSAL_CONV1D_PREFILL.name: Cost(_moved_bytes, _conv_flops),
    CAUSAL_CONV1D_UPDATE.name: Cost(_moved_bytes, _conv_flops),
    MAMBA2_PREFILL.name: Cost(_moved_bytes, _mamba2_flops),
    SELECTIVE_STATE_UPDATE.name: Cost(_moved_bytes, _mamba2_flops),
}
"""By op."""
