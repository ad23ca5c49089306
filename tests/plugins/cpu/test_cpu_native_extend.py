"""Chunks and whole prompts: pages, masks, numbers; the same bits however a prompt is cut and whoever is beside it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tokenspeed_kernel.errors import ShapeError
from tokenspeed_kernel.ops.attention import mha_decode, mha_extend, mha_prefill
from tokenspeed_kernel.ops.attention.cases import Batch, paged_inputs, ragged_inputs

pytestmark = pytest.mark.usefixtures("instruction_set")
ONE = {"cu_seqlens_q", "max_seqlen_q", "causal"}


def _extend(call: dict[str, Any], **more: Any) -> Any:
    return mha_extend(**{**call, **more}, solution="cpu_native")


def _part(call: dict[str, Any], request: int, first: int, last: int) -> dict[str, Any]:
    """Queries first..last-1 of one request, as if they came in a chunk of their own."""
    starts = call["cu_seqlens_q"].tolist()
    begin, end = starts[request], starts[request + 1]
    seq_len = int(call["seq_lens"][request]) - (end - begin) + last
    return {
        **call,
        "q": call["q"][begin + first : begin + last],
        "page_table": call["page_table"][request : request + 1],
        "cu_seqlens_q": torch.tensor([0, last - first], dtype=torch.int32),
        "seq_lens": torch.tensor([seq_len], dtype=torch.int32),
        "max_seqlen_q": last - first,
        "max_seqlen_k": seq_len,
    }


@pytest.mark.parametrize("window", [None, 1, 40])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(9, 3, 64), (6, 1, 80), (4, 4, 24), (70, 1, 16)])
def test_cutting_a_prompt_changes_nothing(num_heads: int, num_kv_heads: int, head_dim: int, window: int | None) -> None:
    batch = Batch("", (150, 1, 33), (150, 90, 133), num_heads, num_kv_heads, head_dim, 16, sliding_window=window)
    call = paged_inputs(batch)
    whole, lse = _extend(call, return_lse=True)
    torch.testing.assert_close(whole, mha_extend(**call, solution="cpu"), rtol=1e-5, atol=2e-5)  # the reference takes minutes here
    for request, first, last in ((0, 0, 150), (0, 0, 1), (0, 1, 32), (0, 32, 97), (0, 149, 150), (2, 5, 33), (1, 0, 1)):
        begin = int(call["cu_seqlens_q"][request]) + first
        part = _part(call, request, first, last)
        got, got_lse = _extend(part, return_lse=True)
        assert torch.equal(got, whole[begin : begin + last - first])
        assert torch.equal(got_lse, lse[begin : begin + last - first])
        if last - first == 1:
            alone = {name: value for name, value in part.items() if name not in ONE}
            assert torch.equal(mha_decode(**alone, solution="cpu_native"), got)


def test_threads_change_nothing() -> None:
    call = paged_inputs(Batch("", (400, 1, 1), (500, 600, 3), 9, 3, 64, 16))
    threads, results = torch.get_num_threads(), []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            results.append(_extend(call))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(one, results[0]) for one in results)


@pytest.mark.parametrize("cache", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("head_dim", [64, 20])
def test_queries_in_float32_over_a_narrower_cache(cache: torch.dtype, head_dim: int) -> None:
    call = paged_inputs(Batch("", (40, 1), (70, 90), 6, 2, head_dim, 16, missing_pages=((1, 2),)))
    call |= {name: call[name].to(cache) for name in ("k_cache", "v_cache")}
    got = _extend(call)
    assert got.dtype is torch.float32
    # Numbers of the cache are exact in float32, so that nothing more is lost than without it.
    torch.testing.assert_close(got, mha_extend(**call, solution="reference"), rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_a_later_key_that_is_no_number_stays_unseen(poison: float) -> None:
    call = paged_inputs(Batch("", (60,), (60,), 6, 2, 32, 16))
    want = _extend(call)
    page, offset = int(call["page_table"][0, 2]), 5  # position 37
    call["k_cache"][page, offset] = poison
    call["v_cache"][page, offset] = poison
    got = _extend(call)
    assert torch.equal(got[:37], want[:37])
    assert not got[37:].isfinite().all(dim=-1).any()


@pytest.mark.parametrize("sinks", [False, True])
def test_options_together(sinks: bool) -> None:
    options = {"logit_cap": 2.0, "sinks": sinks, "sliding_window": 33, "missing_pages": ((0, 4), (1, 0))}
    call = paged_inputs(Batch("", (70, 3, 5), (70, 40, 3), 6, 2, 48, 7, **options))
    for got, want in zip(_extend(call, return_lse=True), mha_extend(**call, return_lse=True, solution="reference"), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=2e-5)


def test_prefill_is_extend_without_pages() -> None:
    call = ragged_inputs(Batch("", (65, 0, 130, 2), (65, 0, 140, 1), 9, 3, 64))
    got = mha_prefill(**call, solution="cpu_native")
    torch.testing.assert_close(got, mha_prefill(**call, solution="cpu"), rtol=1e-5, atol=2e-5)  # the reference takes long here
    keys = call["k"][65:205], call["v"][65:205]
    pages = {
        "q": call["q"][65:195], "k_cache": keys[0].reshape(14, 10, 3, 64), "v_cache": keys[1].reshape(14, 10, 3, 64),
        "page_table": torch.arange(14, dtype=torch.int32)[None], "cu_seqlens_q": torch.tensor([0, 130], dtype=torch.int32),
        "seq_lens": torch.tensor([140], dtype=torch.int32), "max_seqlen_q": 130, "max_seqlen_k": 140,
    }  # fmt: skip
    assert torch.equal(_extend(pages), got[65:195])


def test_wrong_offsets_are_refused() -> None:
    call = paged_inputs(Batch("", (3, 4), (5, 9), page_size=4))
    out = torch.full_like(call["q"], math.nan)
    for offsets in ([0, 3, 6], [1, 3, 7], [0, 8, 7]):
        with pytest.raises(ShapeError, match="cu_seqlens_q rising from 0 to 7"):
            _extend({**call, "cu_seqlens_q": torch.tensor(offsets, dtype=torch.int32)}, out=out)
    longer = torch.tensor([5, 4 * call["page_table"].shape[1] + 1], dtype=torch.int32)
    with pytest.raises(ShapeError, match=r"seq_lens <= max_pages \* page_size"):
        _extend({**call, "seq_lens": longer}, out=out)
    ragged = ragged_inputs(Batch("", (3, 4), (5, 9)))
    ragged["cu_seqlens_k"] = torch.tensor([0, 5, 13], dtype=torch.int32)
    with pytest.raises(ShapeError, match="cu_seqlens_k rising from 0 to 14"):
        mha_prefill(**ragged, out=out, solution="cpu_native")
    assert out.isnan().all()
