"""Rows of quantized embedding tables: the same bits as the reference, whatever the ids."""

from __future__ import annotations

import math

import pytest
import torch
from quantized_weights import GGUF, gguf_weight

from tokenspeed_kernel.ops.embedding import embedding


@pytest.mark.parametrize("fmt", GGUF)
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64], ids=str)
def test_rows(fmt: str, out_dtype: torch.dtype, ids_dtype: torch.dtype) -> None:
    weight, values = gguf_weight(fmt, 13, 768)
    ids = torch.tensor([0, 12, 5, 5, 13, -1, 7, 2**31 - 1, -(2**31)], dtype=ids_dtype)
    got = embedding(ids, weight, out_dtype=out_dtype, solution="cpu_native")
    assert torch.equal(got, embedding(ids, weight, out_dtype=out_dtype, solution="reference"))
    known = (ids >= 0) & (ids < 13)
    assert torch.equal(got[known], values[ids[known].long()].float().to(out_dtype))
    assert got[~known].eq(0).all()
    wide = torch.full((9, 768), math.nan, dtype=out_dtype)
    assert embedding(ids.repeat_interleave(2)[::2], weight, out=wide, solution="cpu_native") is wide
    assert torch.equal(wide, got)
    apart = torch.full((768, 9), math.nan, dtype=out_dtype).t()
    assert torch.equal(embedding(ids, weight, out=apart, solution="cpu_native"), got)


def test_it_is_chosen() -> None:
    weight, _ = gguf_weight("gguf_q8_0", 4, 64)
    assert embedding(torch.arange(0), weight).shape == (0, 64)
    rows = weight.rows(1, 3)  # a shard, whose rows are a part of the table's
    assert torch.equal(embedding(torch.tensor([0, 1]), rows), embedding(torch.tensor([1, 2]), weight, solution="reference"))
