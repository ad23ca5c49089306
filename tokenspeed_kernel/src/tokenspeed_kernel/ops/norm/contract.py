"""What the norm ops promise.

Every implementation computes in float32 or better, rounds once to the output's dtype, and takes any strides.
"""

from __future__ import annotations

from tokenspeed_kernel.signature import Signature
from tokenspeed_kernel.spec import OpContract

__all__ = ["CONTRACTS", "FLOAT_FORMATS", "FUSED_ADD_RMS_NORM", "RMS_NORM"]

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
CONTRACTS = (RMS_NORM, FUSED_ADD_RMS_NORM)

_FLOATS = ("fp32", "bf16", "fp16")
FLOAT_FORMATS = {
    # The weight may stay in float32 beside half-precision activations.
    RMS_NORM.name: tuple(
        Signature.of(x=fmt, weight=weight) for fmt in _FLOATS for weight in dict.fromkeys((fmt, "fp32"))
    ),
    FUSED_ADD_RMS_NORM.name: tuple(
        Signature.of(x=fmt, residual=fmt, weight=weight) for fmt in _FLOATS for weight in dict.fromkeys((fmt, "fp32"))
    ),
}
"""Formats that the CPU and Triton kernels take."""
