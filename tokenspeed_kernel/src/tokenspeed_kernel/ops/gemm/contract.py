"""What the matrix products promise.

Products of fp32 operands are IEEE float32, never tf32. Half-precision ones accumulate in float32, add the bias there, and
round once. Any strides are taken. A weight in a scaled format may be rounded to x's dtype before it is multiplied; x is rounded
only where the caller of `pack_weight` allows it.
"""

from __future__ import annotations

from collections.abc import Iterable

from tokenspeed_kernel.signature import Format, Signature
from tokenspeed_kernel.spec import OpContract
from tokenspeed_kernel.traits import Trait

__all__ = ["CONTRACTS", "MANY_ROWS", "MM", "PACK_WEIGHT", "WEIGHT_FORMATS", "mm_formats", "scaled_formats", "weight_only_formats"]

MANY_ROWS = 1 << 20
"""Value of the trait `max_rows` for more than 64 rows."""

MM = OpContract(
    name="gemm.mm",
    operands=("x", "weight", "bias", "out"),
    parameters=("x", "weight", "bias", "out", "out_dtype"),
    traits=(Trait("max_rows", f"rows of x, rounded up to 1, 16, 64 or (for more) {MANY_ROWS}"),),
    summary="x @ weight.T + bias",
)
_ROUND_ACTIVATIONS = Trait(
    "round_activations", "x may be rounded to 8 bits, with a scale for each 32, before a quantized weight multiplies it"
)
PACK_WEIGHT = OpContract(
    name="gemm.pack_weight",
    operands=("weight",),
    parameters=("weight",),
    traits=(_ROUND_ACTIVATIONS,),
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


_WEIGHT_LAYOUTS = ("tensor", "channel", "block_128x128", "block_16", "block_32", "group_32", "group_64", "group_128", "inline")
WEIGHT_FORMATS = tuple(str(fmt) for fmt in Format.scaled() if "fnuz" not in fmt.logical and fmt.scale in _WEIGHT_LAYOUTS)
"""Scaled formats in which the kernels here take a weight."""


def weight_only_formats(
    weights: Iterable[str] = WEIGHT_FORMATS, formats: Iterable[str] = ("fp32", "bf16", "fp16")
) -> tuple[Signature, ...]:
    """Signatures with a weight in a scaled format: bias and output have x's format or are fp32.

    Args:
        weights: formats of the weight.
        formats: of x.
    """
    return tuple(
        Signature.of(x=fmt, weight=weight, bias=bias, out=out)
        for fmt in formats
        for weight in weights
        for bias in dict.fromkeys((fmt, "fp32"))
        for out in dict.fromkeys((fmt, "fp32"))
    )


_FP8 = ("fp8_e4m3", "fp8_e5m2")
_SCALED_PAIRS = (
    *((f"{x}@{token}", f"fp8_e4m3@{channel}") for x in _FP8 for token in ("tensor", "token") for channel in ("tensor", "channel")),
    *((f"{x}@block_1x128", "fp8_e4m3@block_128x128") for x in _FP8),
    *((x, weight) for x in ("mxfp8_e4m3@block_32", "mxfp4@block_32") for weight in ("mxfp8_e4m3@block_32", "mxfp4@block_32")),
    ("nvfp4@block_16", "nvfp4@block_16"),
)


def scaled_formats(pairs: Iterable[tuple[str, str]] = _SCALED_PAIRS) -> tuple[Signature, ...]:
    """Signatures in which x is quantized too: the output is fp32, bf16 or fp16, the bias has its format or is fp32.

    Args:
        pairs: formats of x and weight.
    """
    return tuple(
        Signature.of(x=x, weight=weight, bias=bias, out=out)
        for x, weight in pairs
        for out in ("bf16", "fp16", "fp32")
        for bias in dict.fromkeys((out, "fp32"))
    )
