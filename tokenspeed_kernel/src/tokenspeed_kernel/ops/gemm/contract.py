"""What the matrix products promise.

Products of fp32 operands are IEEE float32, never tf32. Half-precision ones accumulate in float32, add the bias there, and
round once. Any strides are taken.
"""

from __future__ import annotations

from collections.abc import Iterable

from tokenspeed_kernel.signature import Signature
from tokenspeed_kernel.spec import OpContract

__all__ = ["CONTRACTS", "MM", "PACK_WEIGHT", "mm_formats"]

MM = OpContract(
    name="gemm.mm",
    operands=("x", "weight", "bias", "out"),
    parameters=("x", "weight", "bias", "out", "out_dtype"),
    summary="x @ weight.T + bias",
)
PACK_WEIGHT = OpContract(
    name="gemm.pack_weight",
    operands=("weight",),
    parameters=("weight",),
    summary="a weight in the memory order that the platform multiplies by fastest",
)
CONTRACTS = (MM, PACK_WEIGHT)


def mm_formats(*, mixed_bias: bool, formats: Iterable[str] = ("fp32", "bf16", "fp16")) -> tuple[Signature, ...]:
    """Signatures in which x and weight share a format, and the output has it or is fp32.

    Args:
        mixed_bias: the bias may also be fp32 beside half-precision operands.
        formats: of x and weight.
    """
    return tuple(
        Signature.of(x=fmt, weight=fmt, bias=bias, out=out)
        for fmt in formats
        for bias in dict.fromkeys((fmt, "fp32") if mixed_bias else (fmt,))
        for out in dict.fromkeys((fmt, "fp32"))
    )
