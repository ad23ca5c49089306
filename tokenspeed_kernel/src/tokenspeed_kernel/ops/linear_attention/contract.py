"""What the linear-attention ops are: operands, parameters, and the traits that a kernel may restrict.

Every implementation computes in float32 or better where it does not feed a matrix unit, keeps the states in float32, and rounds
once to the output's dtype.
"""

from __future__ import annotations

from typing import Final

from tokenspeed_kernel.signature import Signature
from tokenspeed_kernel.spec import OpContract
from tokenspeed_kernel.traits import Trait

__all__ = [
    "CAUSAL_CONV1D_PREFILL",
    "CAUSAL_CONV1D_UPDATE",
    "CONTRACTS",
    "FORMATS",
    "GDN_DECODE",
    "GDN_PREFILL",
    "MAMBA2_PREFILL",
    "SELECTIVE_STATE_UPDATE",
]

_KEY_DIM: Final = Trait("key_dim", "elements of one query or key head")
_VALUE_DIM: Final = Trait("value_dim", "elements of one value head")
_HEAD_DIM: Final = Trait("head_dim", "elements of one head of x")
_STATE_DIM: Final = Trait("state_dim", "elements that the state holds for each element of a head")
_WIDTH: Final = Trait("width", "inputs that one output of the convolution depends on")

GDN_PREFILL: Final = OpContract(
    name="linear_attention.gdn_prefill",
    operands=("q", "k", "v", "g", "beta", "states"),
    parameters=(
        *("q", "k", "v", "g", "beta", "states", "state_indices", "cu_seqlens"),
        *("has_initial_state", "scale", "qk_l2norm", "out"),
    ),
    traits=(_KEY_DIM, _VALUE_DIM),
    summary="gated delta rule over ragged requests, from and to states in a pool",
    by_position=True,
)
GDN_DECODE: Final = OpContract(
    name="linear_attention.gdn_decode",
    operands=("q", "k", "v", "g", "beta", "states"),
    parameters=("q", "k", "v", "g", "beta", "states", "state_indices", "scale", "qk_l2norm", "out"),
    traits=(_KEY_DIM, _VALUE_DIM),
    summary="gated delta rule for the newest tokens of each request",
    by_position=True,
)
CAUSAL_CONV1D_PREFILL: Final = OpContract(
    name="linear_attention.causal_conv1d_prefill",
    operands=("x", "weight", "bias", "states"),
    parameters=("x", "weight", "bias", "states", "state_indices", "cu_seqlens", "has_initial_state", "activation", "out"),
    traits=(_WIDTH,),
    summary="causal convolution of each channel over ragged requests, from and to states in a pool",
    by_position=True,
)
CAUSAL_CONV1D_UPDATE: Final = OpContract(
    name="linear_attention.causal_conv1d_update",
    operands=("x", "weight", "bias", "states"),
    parameters=("x", "weight", "bias", "states", "state_indices", "activation", "out"),
    traits=(_WIDTH,),
    summary="causal convolution of each channel for the newest tokens of each request",
    by_position=True,
)
MAMBA2_PREFILL: Final = OpContract(
    name="linear_attention.mamba2_prefill",
    operands=("x", "dt", "a", "b", "c", "states", "d", "z", "dt_bias"),
    parameters=(
        *("x", "dt", "a", "b", "c", "states", "state_indices", "cu_seqlens", "has_initial_state"),
        *("d", "z", "dt_bias", "dt_softplus", "dt_limit", "out"),
    ),
    traits=(_HEAD_DIM, _STATE_DIM),
    summary="selective state space of Mamba2 over ragged requests, from and to states in a pool",
    by_position=True,
)
SELECTIVE_STATE_UPDATE: Final = OpContract(
    name="linear_attention.selective_state_update",
    operands=("x", "dt", "a", "b", "c", "states", "d", "z", "dt_bias"),
    parameters=(
        *("x", "dt", "a", "b", "c", "states", "state_indices"),
        *("d", "z", "dt_bias", "dt_softplus", "dt_limit", "out"),
    ),
    traits=(_HEAD_DIM, _STATE_DIM),
    summary="selective state space of Mamba2 for the newest tokens of each request",
    by_position=True,
)

CONTRACTS: Final = (
    GDN_PREFILL,
    GDN_DECODE,
    CAUSAL_CONV1D_PREFILL,
    CAUSAL_CONV1D_UPDATE,
    MAMBA2_PREFILL,
    SELECTIVE_STATE_UPDATE,
)

_FLOATS: Final = ("fp32", "bf16", "fp16")


def _with_fp32(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys((text, "fp32")))


_GDN: Final = tuple(
    Signature.of(q=text, k=text, v=text, g="fp32", beta=beta, states="fp32") for text in _FLOATS for beta in _with_fp32(text)
)
_CONV: Final = tuple(
    Signature.of(x=text, weight=weight, bias=weight, states=states)
    for text in _FLOATS
    for weight in _with_fp32(text)
    for states in _with_fp32(text)
)
_SSM: Final = tuple(
    Signature.of(x=text, dt=dt, a="fp32", b=text, c=text, states="fp32", d=small, z=text, dt_bias=small)
    for text in _FLOATS
    for dt in _with_fp32(text)
    for small in _with_fp32(text)
)
FORMATS: Final = {
    GDN_PREFILL.name: _GDN,
    GDN_DECODE.name: _GDN,
    CAUSAL_CONV1D_PREFILL.name: _CONV,
    CAUSAL_CONV1D_UPDATE.name: _CONV,
    MAMBA2_PREFILL.name: _SSM,
    SELECTIVE_STATE_UPDATE.name: _SSM,
}
"""Formats that the CPU and Triton kernels take."""
