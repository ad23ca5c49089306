"""What the matrix products promise.

Products of fp32 operands are IEEE float32, never tf32. Half-precision ones accumulate in float32, add the bias there, and
round once. Any strides are taken. A weight in a scaled format may be rounded to x's dtype before it is multiplied; x is rounded
only where the caller of `pack_weight` allows it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

from tokenspeed_kernel.signature import Format, Signature
from tokenspeed_kernel.spec import OpContract
from tokenspeed_kernel.traits import Trait

__all__ = [
    "BMM",
    "CONTRACTS",
    "GROUPED_MM_CONTIGUOUS",
    "GROUPED_MM_MASKED",
    "MANY_ROWS",
    "MM",
    "PACK_WEIGHT",
    "SCALED_PAIRS",
    "WEIGHT_FORMATS",
    "grouped_formats",
    "mm_formats",
    "scaled_formats",
    "weight_only_formats",
]

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
BMM = OpContract(
    name="gemm.bmm",
    operands=("x", "weight", "out"),
    parameters=("x", "weight", "out", "out_dtype"),
    summary="x[b] @ weight[b].T for each b",
    by_position=True,
)
GROUPED_MM_CONTIGUOUS = OpContract(
    name="gemm.grouped_mm_contiguous",
    operands=("x", "weight", "offsets", "expert_ids", "out"),
    parameters=("x", "weight", "offsets", "expert_ids", "out", "out_dtype"),
    summary="each row of x by the weight of its expert, rows sorted by expert",
    by_position=True,
)
GROUPED_MM_MASKED = OpContract(
    name="gemm.grouped_mm_masked",
    operands=("x", "weight", "masked_m", "out"),
    parameters=("x", "weight", "masked_m", "out", "out_dtype"),
    summary="the first masked_m[e] rows of x[e] by weight[e]",
    by_position=True,
)
CONTRACTS = (MM, PACK_WEIGHT, BMM, GROUPED_MM_CONTIGUOUS, GROUPED_MM_MASKED)


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


@functools.cache
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
SCALED_PAIRS = (
    *((f"{x}@{token}", f"fp8_e4m3@{channel}") for x in _FP8 for token in ("tensor", "token") for channel in ("tensor", "channel")),
    *((f"{x}@block_1x128", "fp8_e4m3@block_128x128") for x in _FP8),
    *((x, weight) for x in ("mxfp8_e4m3@block_32", "mxfp4@block_32") for weight in ("mxfp8_e4m3@block_32", "mxfp4@block_32")),
    ("nvfp4@block_16", "nvfp4@block_16"),
)
"""Formats of x and weight in which the kernels here take both quantized."""


@functools.cache
def scaled_formats(pairs: Iterable[tuple[str, str]] = SCALED_PAIRS) -> tuple[Signature, ...]:
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


@functools.cache
def grouped_formats(rows: str = "", *, integers: Iterable[str] = ("int32", "int64"), scaled: bool = True) -> tuple[Signature, ...]:
    """Signatures of the products of stacks: plain, with a quantized weight, with both quantized; the output has x's format or is
    fp32 (any of the three, for a quantized x).

    Args:
        rows: name of the operand of whole numbers; empty where there is none.
        integers: its formats.
        scaled: also with quantized operands.
    """
    plain = ("fp32", "bf16", "fp16")
    triples = [(x, x, out) for x in plain for out in dict.fromkeys((x, "fp32"))]
    if scaled:
        triples += [(x, weight, out) for x in plain for weight in WEIGHT_FORMATS for out in dict.fromkeys((x, "fp32"))]
        triples += [(x, weight, out) for x, weight in SCALED_PAIRS for out in plain]
    extras: list[dict[str, str]] = [{rows: one} for one in integers] if rows else [{}]
    return tuple(Signature.of(x=x, weight=weight, out=out, **extra) for x, weight, out in triples for extra in extras)
