"""What the activation ops promise: computed in float32 or better, rounded once to the output's dtype, any strides."""

from __future__ import annotations

from tokenspeed_kernel.signature import Signature
from tokenspeed_kernel.spec import OpContract

__all__ = ["CONTRACTS", "FORMATS", "GELU_AND_MUL", "SILU_AND_MUL", "SWIGLU_CLAMPED"]

SILU_AND_MUL = OpContract(
    name="activation.silu_and_mul",
    operands=("gate_up",),
    parameters=("gate_up", "out"),
    summary="silu(gate) * up, gate and up being the halves of the last dimension",
)
SWIGLU_CLAMPED = OpContract(
    name="activation.swiglu_clamped",
    operands=("gate_up",),
    parameters=("gate_up", "limit", "alpha", "up_offset", "interleaved", "out"),
    summary="SwiGLU of a clamped gate and a clamped, shifted up",
)
GELU_AND_MUL = OpContract(
    name="activation.gelu_and_mul",
    operands=("gate_up",),
    parameters=("gate_up", "approximate", "out"),
    summary="gelu(gate) * up, gate and up being the halves of the last dimension",
)
CONTRACTS = (SILU_AND_MUL, SWIGLU_CLAMPED, GELU_AND_MUL)

FORMATS = Signature.product(gate_up=("fp32", "bf16", "fp16"))
"""Formats that the CPU and Triton kernels take."""
