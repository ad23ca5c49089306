"""Formats that the kernels of the indexer take; the specs of several solutions share them."""

from __future__ import annotations

from typing import Final

from tokenspeed_kernel.signature import Signature

__all__ = ["FP8_KEYS", "FP8_QUERIES", "fp8_formats", "plain_formats"]

_PLAIN: Final = ("fp32", "bf16", "fp16")
FP8_KEYS: Final = "fp8_e4m3@token"
FP8_QUERIES: Final = "fp8_e4m3@none"


def plain_formats(keys: str) -> tuple[Signature, ...]:
    """Queries and keys of one dtype; ``keys`` is the operand's name."""
    return Signature.same(("q", keys), _PLAIN)


def fp8_formats(keys: str) -> tuple[Signature, ...]:
    """fp8 keys with a scale each, beside queries that are fp8 too (their scale is in the weights) or not."""
    return tuple(Signature.of(**{"q": queries, keys: FP8_KEYS}) for queries in (*_PLAIN, FP8_QUERIES))
