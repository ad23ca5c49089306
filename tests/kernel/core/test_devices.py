"""Operands on different devices are refused by name: a kernel that reads raw memory must never see them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tokenspeed_kernel.errors import ShapeError
from tokenspeed_kernel.ops import activation, embedding, gemm, kvcache, norm, rope


def _meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


X, W, IDS = torch.randn(3, 8), torch.randn(8), torch.zeros(3, dtype=torch.int64)
Q, CACHE = torch.randn(3, 2, 4), torch.zeros(2, 4, 2, 4)
CASES: dict[str, tuple[str, Callable[[], Any]]] = {
    "rms_norm weight": ("weight", lambda: norm.rms_norm(X, _meta(8))),
    "rms_norm out": ("out", lambda: norm.rms_norm(X, W, out=_meta(3, 8))),
    "fused residual": ("residual", lambda: norm.fused_add_rms_norm(X, _meta(3, 8), W)),
    "fused residual_out": ("residual_out", lambda: norm.fused_add_rms_norm(X, X, W, residual_out=_meta(3, 8))),
    "mm weight": ("weight", lambda: gemm.mm(X, _meta(5, 8))),
    "mm bias": ("bias", lambda: gemm.mm(X, torch.randn(5, 8), _meta(5))),
    "mm out": ("out", lambda: gemm.mm(X, torch.randn(5, 8), out=_meta(3, 5))),
    "embedding ids": ("token_ids", lambda: embedding.embedding(_meta(3, dtype=torch.int64), X)),
    "embedding out": ("out", lambda: embedding.embedding(IDS, X, out=_meta(3, 8))),
    "silu out": ("out", lambda: activation.silu_and_mul(X, out=_meta(3, 4))),
    "rope positions": ("positions", lambda: rope.apply_rope(Q, Q, _meta(3, dtype=torch.int64), torch.randn(4, 4))),
    "rope table": ("cos_sin_cache", lambda: rope.apply_rope(Q, Q, IDS, _meta(4, 4))),
    "write_kv v": ("v", lambda: kvcache.write_kv(Q, _meta(3, 2, 4), CACHE, CACHE.clone(), IDS)),
    "write_kv slots": ("slot_mapping", lambda: kvcache.write_kv(Q, Q, CACHE, CACHE.clone(), _meta(3, dtype=torch.int64))),
}


@pytest.mark.parametrize("case", CASES)
def test_a_foreign_operand_is_named(case: str) -> None:
    name, call = CASES[case]
    for _ in range(2):  # a refused combination is not remembered as a good one
        with pytest.raises(ShapeError, match=rf"{name} on meta"):
            call()
