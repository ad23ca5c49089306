"""What the embedding ops promise: rows are copied bit for bit; an id outside the table gives a zero row."""

from __future__ import annotations

from tokenspeed_kernel.signature import Signature
from tokenspeed_kernel.spec import OpContract

__all__ = ["CONTRACTS", "EMBEDDING", "FORMATS"]

EMBEDDING = OpContract(
    name="embedding.embedding",
    operands=("token_ids", "weight"),
    parameters=("token_ids", "weight", "out"),
    summary="rows of weight; zero where the id is outside the table",
)
CONTRACTS = (EMBEDDING,)

FORMATS = Signature.product(token_ids=("int32", "int64"), weight=("fp32", "bf16", "fp16"))
"""Formats that the CPU and Triton kernels take."""
