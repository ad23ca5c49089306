"""Cases of the embedding ops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tokenspeed_kernel.case import Case, Tolerance
from tokenspeed_kernel.ops.embedding.contract import EMBEDDING, SCALED_FORMATS
from tokenspeed_kernel.ops.quantization.cases import random_quantized
from tokenspeed_kernel.signature import Format

__all__ = ["CASES"]

_Build = Callable[[torch.Generator, torch.device, torch.dtype], dict[str, Any]]
# Rows are copied: every bit must be there.
_EXACT = dict.fromkeys((torch.float32, torch.float16, torch.bfloat16), Tolerance(0.0, 0.0))


def _inputs(
    num_tokens: int, vocab: int, hidden: int, ids: torch.dtype = torch.int64, layout: str = "contiguous"
) -> _Build:
    def build(generator: torch.Generator, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
        # A third of the range lies outside the table, on both sides.
        low, high = (-vocab // 4, vocab + vocab // 4) if layout != "inside" else (0, vocab)
        token_ids = torch.randint(low, max(high, low + 1), (num_tokens,), generator=generator, dtype=ids)
        weight = torch.randn(vocab, hidden, generator=generator).to(device, dtype)
        if layout == "strided":
            token_ids = token_ids.repeat_interleave(2)[::2]
            weight = weight.t().contiguous().t()
        return {"token_ids": token_ids.to(device), "weight": weight}

    return build


def _extreme(generator: torch.Generator, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    token_ids = torch.tensor([-(2**63), 2**63 - 1, -1, 7, 6, 0, 2**31])
    return {"token_ids": token_ids.to(device), "weight": torch.randn(7, 5, generator=generator).to(device, dtype)}


def _scaled(fmt: Format, num_tokens: int, vocab: int, hidden: int, ids: torch.dtype = torch.int64) -> _Build:
    def build(generator: torch.Generator, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
        token_ids = torch.randint(-vocab // 4, max(vocab + vocab // 4, 1), (num_tokens,), generator=generator, dtype=ids)
        weight = random_quantized(fmt, (vocab, hidden), generator, device)
        return {"token_ids": token_ids.to(device), "weight": weight, "out_dtype": dtype}

    return build


_SCALED = tuple(dict.fromkeys(fmt for fmt in (signature.get("weight") for signature in SCALED_FORMATS) if fmt is not None))
_GGUF = Format.parse("gguf_q8_0@inline")

CASES = tuple(
    Case(EMBEDDING.name, label, build, tolerance=_EXACT, bench=bench)
    for label, build, bench in (
        ("empty", _inputs(0, 8, 16), False),
        ("empty table", _inputs(3, 0, 16), False),
        ("odd", _inputs(5, 11, 37), False),
        ("int32", _inputs(7, 11, 8, torch.int32), False),
        ("strided", _inputs(5, 12, 20, torch.int32, "strided"), False),
        ("all inside", _inputs(4, 9, 16, layout="inside"), False),
        ("extreme ids", _extreme, False),
        ("wide rows", _inputs(2, 3, 2100), False),
        ("512 of 49152x576", _inputs(512, 49152, 576, layout="inside"), True),
        *((f"{fmt} odd 5 of 139x256", _scaled(fmt, 5, 139, 256), False) for fmt in _SCALED),
        ("gguf_q8_0@inline empty", _scaled(_GGUF, 0, 8, 64), False),
        ("gguf_q8_0@inline empty table", _scaled(_GGUF, 3, 0, 64), False),
        ("gguf_q8_0@inline int32", _scaled(_GGUF, 7, 11, 96, torch.int32), False),
        ("gguf_q8_0@inline wide rows", _scaled(_GGUF, 2, 3, 2112), False),
        ("gguf_q8_0@inline 512 of 49152x576", _scaled(_GGUF, 512, 49152, 576), True),
    )
)
"""Every kernel of the family meets these."""
