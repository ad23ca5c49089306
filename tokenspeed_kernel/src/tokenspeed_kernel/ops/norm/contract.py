"""What the norm ops promise.

Every implementation computes in float32 or better, rounds once to the output's dtype, and takes any strides.
"""

from __future__ import annotations

from tokenspeed_kernel.signature import Signature
from tokenspeed_kernel.spec import OpContract

__all__ = [
    "CONTRACTS",
    "FLOAT_FORMATS",
    "FUSED_ADD_GEMMA_RMS_NORM",
    "FUSED_ADD_RMS_NORM",
    "GATED_RMS_NORM",
    "GEMMA_RMS_NORM",
    "LAYER_NORM",
    "RMS_NORM",
]

RMS_NORM = OpContract(
    name="norm.rms_norm",
    operands=("x", "weight"),
    parameters=("x", "weight", "eps", "out"),
    summary="x / sqrt(mean(x^2) + eps) * weight over the last dimension",
)
FUSED_ADD_RMS_NORM = OpContract(
    name="norm.fused_add_rms_norm",
    operands=("x", "residual", "weight"),
    parameters=("x", "residual", "weight", "eps", "out", "residual_out"),
    summary="residual_out = x + residual; out = rms_norm(residual_out, weight)",
)
GEMMA_RMS_NORM = OpContract(
    name="norm.gemma_rms_norm",
    operands=("x", "weight"),
    parameters=("x", "weight", "eps", "out"),
    summary="x / sqrt(mean(x^2) + eps) * (1 + weight) over the last dimension",
)
FUSED_ADD_GEMMA_RMS_NORM = OpContract(
    name="norm.fused_add_gemma_rms_norm",
    operands=("x", "residual", "weight"),
    parameters=("x", "residual", "weight", "eps", "out", "residual_out"),
    summary="residual_out = x + residual; out = gemma_rms_norm(residual_out, weight)",
)
LAYER_NORM = OpContract(
    name="norm.layer_norm",
    operands=("x", "weight", "bias"),
    parameters=("x", "weight", "bias", "eps", "out"),
    summary="(x - mean(x)) / sqrt(var(x) + eps) * weight + bias over the last dimension",
)
GATED_RMS_NORM = OpContract(
    name="norm.gated_rms_norm",
    operands=("x", "gate", "weight"),
    parameters=("x", "gate", "weight", "eps", "norm_before_gate", "group_size", "out"),
    summary="rms_norm(x, weight) * silu(gate), or rms_norm(x * silu(gate), weight), over groups of the last dimension",
)
CONTRACTS = (RMS_NORM, FUSED_ADD_RMS_NORM, GEMMA_RMS_NORM, FUSED_ADD_GEMMA_RMS_NORM, LAYER_NORM, GATED_RMS_NORM)

_FLOATS = ("fp32", "bf16", "fp16")
# The weight may stay in float32 beside half-precision activations.
_PAIRS = tuple((fmt, weight) for fmt in _FLOATS for weight in dict.fromkeys((fmt, "fp32")))
_PLAIN = tuple(Signature.of(x=fmt, weight=weight) for fmt, weight in _PAIRS)
_ADDED = tuple(Signature.of(x=fmt, residual=fmt, weight=weight) for fmt, weight in _PAIRS)
FLOAT_FORMATS = {
    RMS_NORM.name: _PLAIN,
    FUSED_ADD_RMS_NORM.name: _ADDED,
    GEMMA_RMS_NORM.name: _PLAIN,
    FUSED_ADD_GEMMA_RMS_NORM.name: _ADDED,
    LAYER_NORM.name: tuple(Signature.of(x=fmt, weight=weight, bias=weight) for fmt, weight in _PAIRS),
    GATED_RMS_NORM.name: tuple(Signature.of(x=fmt, gate=fmt, weight=weight) for fmt, weight in _PAIRS),
}
"""Formats that the CPU and Triton kernels take."""
