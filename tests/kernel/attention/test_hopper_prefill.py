"""Prefill on Hopper: what its launcher takes and leaves here; results on the device where there is one of that kind."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tokenspeed_kernel.ops import attention
from tokenspeed_kernel.ops.attention import cases
from tokenspeed_kernel.ops.attention.cases import Batch

pytest.importorskip("triton.experimental.gluon", reason="needs a Triton with Gluon", exc_type=ImportError)
from tokenspeed_kernel.ops.attention.hopper import prefill

# Blocks of 128 queries and tiles of 128 keys: lengths around them, requests without queries, without keys, with more queries than
# keys, and one among many cached keys.
_QUERIES = (1, 0, 17, 128, 129, 300, 64, 20, 130, 3)
_KEYS = (1, 5, 17, 128, 257, 300, 1000, 7, 0, 200)
RAGGED = tuple(
    Batch(f"{heads}_{kv_heads}_d{dim}_{name}", _QUERIES, _KEYS, heads, kv_heads, dim, **options)
    for heads, kv_heads, dim in ((32, 8, 128), (64, 8, 64), (9, 3, 64))
    for name, options in (
        ("causal", {}),
        ("not_causal", {"causal": False}),
        ("window", {"sliding_window": 70}),
        ("sinks_cap", {"sinks": True, "logit_cap": 5.0}),
        ("scale", {"softmax_scale": 0.3}),
    )
)
PAGED = tuple(
    Batch(f"{heads}_{kv_heads}_d{dim}_page{page}_{name}", _QUERIES, _KEYS, heads, kv_heads, dim, page, **options)
    for heads, kv_heads, dim, page in ((32, 8, 128, 16), (32, 8, 128, 64), (64, 8, 64, 64), (9, 3, 64, 16), (8, 1, 128, 256))
    for name, options in (
        ("causal", {}),
        ("not_causal", {"causal": False}),
        ("missing", {"missing_pages": ((4, 0), (5, 1), (6, 3), (9, 0)) if page < 256 else ((6, 1), (9, 0))}),
        ("window_sinks", {"sliding_window": 128, "sinks": True}),
        ("cap", {"logit_cap": 5.0}),
    )
)


def _batch(pages: int = 3, head_dim: int = 64) -> tuple[torch.Tensor, ...]:
    q = torch.randn((5, 4, head_dim), dtype=torch.bfloat16)
    k, v = torch.randn((2, pages, 16, 2, head_dim), dtype=torch.bfloat16)
    return q, k, v


def test_tensors_that_the_copy_engine_takes() -> None:
    q, k, v = _batch()
    assert prefill.bulk_copies(q, k, v, None)
    assert prefill.bulk_copies(q, k[0], v[0], 0.3)
    # One pool of keys and values, and queries that are a part of a projection's result.
    both = torch.randn((3, 2, 16, 2, 64), dtype=torch.bfloat16)
    assert prefill.bulk_copies(q, both[:, 0], both[:, 1], None)
    wide = torch.randn((5, 8, 64), dtype=torch.bfloat16)
    assert prefill.bulk_copies(wide[:, :4], k, v, None)
    beside = torch.randn((40, 2, 128), dtype=torch.bfloat16)
    assert prefill.bulk_copies(q, beside[..., :64], beside[..., 64:], None)


def test_tensors_that_it_does_not_take() -> None:
    q, k, v = _batch()
    assert not prefill.bulk_copies(q, k[:0], v[:0], None), "no row to point at"
    assert not prefill.bulk_copies(q, k, v, -0.5), "the largest score would have the smallest weight"
    assert not prefill.bulk_copies(torch.randn((5, 4, 68), dtype=torch.bfloat16)[..., 1:65], k, v, None), "not at 16 bytes"
    assert not prefill.bulk_copies(q, torch.randn((3, 16, 2, 68), dtype=torch.bfloat16)[..., :64], v, None), "heads at 8 bytes"
    apart = torch.randn((3 * 2056,), dtype=torch.bfloat16).as_strided((3, 16, 2, 64), (2056, 128, 64, 1))
    assert not prefill.bulk_copies(q, apart, v, None), "pages no whole number of rows apart"
    heads_first = torch.randn((3, 2, 16, 64), dtype=torch.bfloat16).transpose(1, 2)
    assert not prefill.bulk_copies(q, heads_first, v, None), "heads further apart than tokens"
    same_row = torch.randn((1, 1, 2, 64), dtype=torch.bfloat16).expand(3, 16, 2, 64)
    assert not prefill.bulk_copies(q, same_row, v, None), "one row for all tokens"


def _needs_hopper() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a GPU of compute capability 9.0")


def _compare(op: Callable[..., Any], inputs: dict[str, Any]) -> None:
    want, want_lse = op(**inputs, return_lse=True, solution="reference")
    out = torch.full_like(inputs["q"], math.nan)
    got, lse = op(**inputs, return_lse=True, out=out, solution="gluon")
    torch.testing.assert_close(lse, want_lse, atol=1e-3, rtol=0)
    torch.testing.assert_close(got, want, atol=1e-2, rtol=1.6e-2)
    cosine = torch.nn.functional.cosine_similarity(got.double().flatten(), want.double().flatten(), dim=0)
    assert float(cosine) > 0.99999


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("batch", RAGGED, ids=str)
def test_ragged_on_gpu(batch: Batch, dtype: torch.dtype) -> None:
    _needs_hopper()
    _compare(attention.mha_prefill, cases.ragged_inputs(batch, dtype=dtype, device="cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("batch", PAGED, ids=str)
def test_paged_on_gpu(batch: Batch, dtype: torch.dtype) -> None:
    _needs_hopper()
    _compare(attention.mha_extend, cases.paged_inputs(batch, dtype=dtype, device="cuda"))


@pytest.mark.gpu
def test_what_lies_behind_ragged_keys_is_not_seen() -> None:
    _needs_hopper()
    inputs = cases.ragged_inputs(Batch("tail", (100, 70), (100, 170), 32, 8, 128), dtype=torch.bfloat16, device="cuda")
    for name in "kv":
        longer = torch.full((300, 8, 128), math.nan, dtype=torch.bfloat16, device="cuda")
        longer[:270] = inputs[name]
        inputs[name] = longer
    inputs["cu_seqlens_k"][-1] = 270
    _compare(attention.mha_prefill, inputs)


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", [16, 64])
def test_one_key_that_dominates(page_size: int) -> None:
    """At the first, the last, and at borders of pages and tiles: every query that sees it has its value."""
    _needs_hopper()
    batch = Batch("long", (256,), (8192,), 32, 8, 128, page_size)
    inputs = cases.paged_inputs(batch, dtype=torch.bfloat16, device="cuda")
    inputs["q"].fill_(1.0)
    for place in (0, page_size - 1, page_size, 127, 128, 4095, 4096, 7935, 7936, 8063, 8064, 8191):
        page = int(inputs["page_table"][0, place // page_size])
        key = inputs["k_cache"][page, place % page_size]
        before = key.clone()
        key.fill_(4.0)
        out, lse = attention.mha_extend(**inputs, return_lse=True, solution="gluon")
        key.copy_(before)
        seeing = slice(max(0, place - 7936), None)
        value = inputs["v_cache"][page, place % page_size].repeat_interleave(4, dim=0)
        torch.testing.assert_close(out[seeing], value.expand_as(out[seeing]), atol=1e-2, rtol=1.6e-2)
        torch.testing.assert_close(lse[seeing], torch.full_like(lse[seeing], 4.0 * 128**0.5), atol=1e-3, rtol=0)


@pytest.mark.gpu
def test_captured_graph_takes_other_lengths() -> None:
    _needs_hopper()
    batch = Batch("graph", (300, 64, 0, 200), (900, 70, 40, 330), 32, 8, 128, 64)
    inputs = cases.paged_inputs(batch, dtype=torch.bfloat16, device="cuda", poison=False)
    made = attention.plan(
        inputs["page_table"], inputs["seq_lens"], inputs["cu_seqlens_q"], page_size=64, max_seqlen_q=564, max_seqlen_k=900
    )
    inputs["max_seqlen_q"] = 564
    out = torch.full_like(inputs["q"], math.nan)
    attention.mha_extend(**inputs, out=out, plan=made, solution="gluon")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        before = torch.cuda.memory_stats()["allocation.all.allocated"]  # the graph itself allocates, too
        attention.mha_extend(**inputs, out=out, plan=made, solution="gluon")
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before, "a captured call allocates nothing"
    for starts, lengths in (([0, 1, 65, 65, 564], [900, 70, 40, 500]), ([0, 564, 564, 564, 564], [700, 0, 1, 2])):
        inputs["q"].copy_(torch.randn_like(inputs["q"]))
        lengths = [min(a, b) for a, b in zip(lengths, (900, 70, 40, 330), strict=True)]
        inputs["seq_lens"].copy_(torch.tensor(lengths))
        inputs["cu_seqlens_q"].copy_(torch.tensor(starts))
        out.fill_(math.nan)
        graph.replay()
        want = attention.mha_extend(**inputs, solution="reference")
        torch.testing.assert_close(out, want, atol=1e-2, rtol=1.6e-2)
