"""What the embedding ops promise: rows are copied bit for bit (of a table in a scaled format, dequantized: the same bits in every
kernel); an id outside the table gives a zero row."""

from __future__ import annotations

from tokenspeed_kernel.signature import Format, Signature
from tokenspeed_kernel.spec import OpContract

__all__ = ["CONTRACTS", "EMBEDDING", "FORMATS", "SCALED_FORMATS"]

EMBEDDING = OpContract(
    name="embedding.embedding",
    operands=("token_ids", "weight", "out"),
    parameters=("token_ids", "weight", "out", "out_dtype"),
    summary="rows of weight; zero where the id is outside the table",
)
CONTRACTS = (EMBEDDING,)

FORMATS = tuple(
    Signature.of(token_ids=ids, weight=fmt, out=fmt) for ids in ("int32", "int64") for fmt in ("fp32", "bf16", "fp16")
)
"""Formats that the CPU and Triton kernels take of a plain table."""
SCALED_FORMATS = tuple(
    Signature.of(token_ids=ids, weight=fmt, out=out)
    for ids in ("int32", "int64")
    for fmt in Format.scaled()
    if "fnuz" not in fmt.logical
    for out in ("fp32", "bf16", "fp16")
)
"""Formats that they take of a quantized one."""
