"""What the sparse attention ops refuse and promise, beyond the numbers of the cases."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tokenspeed_kernel import NoKernelError, ShapeError
from tokenspeed_kernel.ops import dsa, mla
from tokenspeed_kernel.ops.dsa.cases import IndexerBatch, SparseBatch, indexer_inputs, sparse_inputs
from tokenspeed_kernel.ops.mla.cases import LatentBatch, decode_inputs, extend_inputs

CPU = torch.device("cpu")


def _generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _paged(batch: IndexerBatch) -> dict[str, Any]:
    return indexer_inputs(batch, _generator(), CPU, torch.float32, paged=True)


@pytest.fixture(params=["reference", "cpu", "triton"])
def solution(request: pytest.FixtureRequest) -> str:
    """Every solution that runs on this machine without a GPU."""
    if request.param == "triton":
        pytest.importorskip("triton", reason="needs triton")
        if torch.cuda.is_available():
            pytest.skip("the interpreter is for machines without a GPU")
    return str(request.param)


def test_bad_operands_of_the_indexer_are_refused() -> None:
    inputs = _paged(IndexerBatch("api", (3, 1), (9, 8)))
    q, weights, cache = inputs["q"], inputs["weights"], inputs["k_cache"]
    fp8 = cache.to(torch.float8_e4m3fn)
    changes: list[tuple[dict[str, Any], str]] = [
        ({"q": q[0]}, r"q \[num_tokens, num_index_heads >= 1"),
        ({"q": q.transpose(1, 2).contiguous().transpose(1, 2)}, "last dimension contiguous"),
        ({"weights": weights[:, :3]}, r"weights \[4, 4\] float32"),
        ({"weights": weights.half()}, r"weights \[4, 4\] float32"),
        ({"k_cache": cache[0]}, r"k_cache \[num_pages, page_size, 16\]"),
        ({"k_cache": fp8}, "k_scale with fp8_e4m3 keys, and with these alone, got float8_e4m3fn keys without k_scale"),
        ({"k_scale": torch.ones(cache.shape[:2])}, "got float32 keys with k_scale"),
        ({"k_cache": fp8, "k_scale": torch.ones(3)}, r"k_scale \[\d+, 4\] float32"),
        ({"page_table": inputs["page_table"].long()}, r"page_table \[num_reqs, max_pages\] int32"),
        ({"seq_lens": inputs["seq_lens"][:1]}, r"seq_lens \[2\] int32"),
        ({"cu_seqlens_q": inputs["cu_seqlens_q"][:2]}, r"seq_lens \[1\] int32"),
        ({"max_seqlen_k": 1000}, "max_seqlen_k <= max_pages"),
        ({"out": torch.zeros(4, 8)}, r"out \[4, 9\] float32"),
    ]
    for change, message in changes:
        with pytest.raises(ShapeError, match=message):
            dsa.indexer_scores(**{**inputs, **change})
    ragged = indexer_inputs(IndexerBatch("api", (3, 1), (9, 8)), _generator(), CPU, torch.float32, paged=False)
    for change, message in (
        ({"k": ragged["k"][:, :8]}, r"k \[num_keys, 16\]"),
        ({"cu_seqlens_k": ragged["cu_seqlens_k"].long()}, r"cu_seqlens_k \[3\] int32"),
        ({"cu_seqlens_k": torch.tensor([0, 9, 16], dtype=torch.int32)}, "cu_seqlens_k rising from 0 to 17"),
    ):
        with pytest.raises(ShapeError, match=message):
            dsa.indexer_scores_ragged(**{**ragged, **change})
    with pytest.raises(NoKernelError, match="k_cache in"):
        dsa.indexer_scores(**{**inputs, "k_cache": cache.half()})


def test_bad_operands_of_the_choice_are_refused() -> None:
    scores, table, offsets = torch.zeros(3, 10), torch.zeros((2, 3), dtype=torch.int32), torch.tensor([0, 1, 3], dtype=torch.int32)
    paging = {"page_table": table, "cu_seqlens_q": offsets, "page_size": 4}
    for arguments, options, message in (
        ((scores[0], 2), {}, r"scores \[num_tokens, num_keys\] float32"),
        ((scores.half(), 2), {}, r"scores \[num_tokens, num_keys\] float32"),
        ((scores.t().contiguous().t(), 2), {}, "last dimension contiguous"),
        ((scores, 0), {}, "k >= 1 and page_size >= 1, got k=0"),
        ((scores, 2), {"page_table": table}, "page_table and cu_seqlens_q together"),
        ((scores, 2), {"cu_seqlens_q": offsets}, "page_table and cu_seqlens_q together"),
        ((scores, 2), {**paging, "page_size": 0}, "page_size=0"),
        ((scores, 2), {**paging, "page_size": 3}, r"page_table \[num_reqs, at least 4\] int32"),
        ((scores, 2), {**paging, "page_table": table.long()}, "page_table"),
        ((scores, 2), {**paging, "cu_seqlens_q": offsets[:2]}, r"cu_seqlens_q \[3\] int32"),
        ((scores, 2), {"out": torch.zeros(3, 3, dtype=torch.int32)}, r"out \[3, 2\] int32"),
    ):
        with pytest.raises(ShapeError, match=message):
            dsa.topk_slots(*arguments, **options)


def test_bad_operands_of_sparse_attention_are_refused() -> None:
    inputs = sparse_inputs(SparseBatch("api"), _generator(), CPU, torch.float32, decode=True)
    slots = inputs["slots"]
    for change, message in (
        ({"q": inputs["q"][0]}, r"q \[num_reqs, q_len, num_heads >= 1"),
        ({"kv_cache": inputs["kv_cache"][..., :40]}, r"kv_cache \[num_pages, page_size >= 1, 48\]"),
        ({"slots": slots[:1]}, r"slots \[2, 2, num_slots\] int32"),
        ({"slots": slots.long()}, r"slots \[2, 2, num_slots\] int32"),
        ({"slots": torch.stack((slots, slots), -1)[..., 0]}, "last dimension contiguous"),
        ({"latent_dim": 48}, "latent_dim from 1 to 47"),
        ({"out": torch.zeros(2, 2, 4, 48)}, r"out \[2, 2, 4, 32\]"),
    ):
        with pytest.raises(ShapeError, match=message):
            dsa.sparse_decode(**{**inputs, **change})
    with pytest.raises(ShapeError, match=r"q \[num_tokens, num_heads >= 1"):
        dsa.sparse_prefill(**inputs)


def test_ties_go_to_the_lower_position_and_rows_are_in_order(solution: str) -> None:
    scores = torch.tensor(
        [
            [1.0, 5.0, 5.0, 0.0, 5.0, 9.0],
            [0.0, -0.0, 0.0, -0.0, 0.0, -0.0],
            [math.nan, -math.inf, -1.0, math.inf, math.nan, -math.inf],
            [-math.inf] * 6,
            [-1.0, -2.0, -2.0, -3.0, -1.0, -2.0],
        ]
    )
    want = [[1, 2, 5], [0, 1, 2], [2, 3, -1], [-1, -1, -1], [0, 1, 4]]
    assert dsa.topk_slots(scores, 3, solution=solution).tolist() == want
    table = torch.tensor([[7, 2, 4], [-1, 2**31 - 1, 0]], dtype=torch.int32)
    offsets = torch.tensor([0, 2, 5], dtype=torch.int32)
    paged = dsa.topk_slots(scores, 3, page_table=table, cu_seqlens_q=offsets, page_size=2, solution=solution)
    assert paged.tolist() == [[15, 4, 9], [14, 15, 4], [-1, -1, -1], [-1, -1, -1], [-1, -1, 0]]


def test_all_the_slots_of_a_request_are_plain_attention(solution: str) -> None:
    # Indexer, choice and sparse attention together: with k at least the number of keys, nothing is left out.
    batch = LatentBatch("whole", (2, 2), (11, 6))
    inputs = decode_inputs(batch, _generator(1), CPU)
    ragged = extend_inputs(batch, _generator(1), CPU)
    want = mla.mla_decode(**inputs, return_lse=True, solution="reference")
    num_pages = inputs["kv_cache"].shape[0]
    paging = {name: ragged[name] for name in ("page_table", "cu_seqlens_q", "seq_lens", "max_seqlen_q", "max_seqlen_k")}
    index_cache = torch.randn((num_pages, 4, 16), generator=_generator(2))
    q = torch.randn((4, 3, 16), generator=_generator(3))
    scores = dsa.indexer_scores(q, torch.ones(4, 3), index_cache, **paging, solution=solution)
    offsets = paging["cu_seqlens_q"]
    slots = dsa.topk_slots(scores, 16, page_table=paging["page_table"], cu_seqlens_q=offsets, page_size=4, solution=solution)
    options = {name: inputs[name] for name in ("softmax_scale", "latent_dim")}
    operands = (inputs["q"], inputs["kv_cache"], slots.view(2, 2, 16))
    for got, truth in zip(dsa.sparse_decode(*operands, **options, return_lse=True, solution=solution), want, strict=True):
        torch.testing.assert_close(got, truth, rtol=1e-5, atol=1e-5)
    flat = dsa.sparse_prefill(operands[0].flatten(0, 1), operands[1], slots, **options, solution=solution)
    torch.testing.assert_close(flat, want[0].flatten(0, 1), rtol=1e-5, atol=1e-5)


def test_the_dominant_key_is_found(solution: str) -> None:
    # One key of each request has by far the best score; at every border of pages and tiles it must be among the two chosen.
    places = (0, 3, 4, 15, 16, 31, 32, 63, 64, 69)
    batch = IndexerBatch("heavy", (1,) * len(places), (70,) * len(places))
    inputs = _paged(batch)
    inputs["weights"].fill_(1.0)
    table = inputs["page_table"]
    for request, place in enumerate(places):
        inputs["k_cache"][int(table[request, place // 4]), place % 4] = 50.0 * inputs["q"][request, 0]
    scores = dsa.indexer_scores(**inputs, solution=solution)
    assert scores.argmax(1).tolist() == list(places)
    chosen = dsa.topk_slots(scores, 2, solution=solution)
    assert all(place in row for place, row in zip(places, chosen.tolist(), strict=True))


def test_fp8_keys_are_their_dequantized_values(solution: str) -> None:
    inputs = _paged(IndexerBatch("fp8", (3, 1), (9, 20), fp8="both"))
    plain = {**inputs, "q": inputs["q"].float(), "k_scale": None}
    plain["k_cache"] = inputs["k_cache"].float() * inputs["k_scale"][..., None]
    want = dsa.indexer_scores(**plain, solution="reference")
    torch.testing.assert_close(dsa.indexer_scores(**inputs, solution=solution), want, rtol=1e-5, atol=1e-5)


def test_rows_without_slots_are_zero_and_minus_infinity(solution: str) -> None:
    inputs = sparse_inputs(SparseBatch("empty", empty_rows=(1, 2)), _generator(), CPU, torch.float32, decode=True)
    out, lse = dsa.sparse_decode(**inputs, return_lse=True, solution=solution)
    out, lse = out.flatten(0, 1), lse.flatten(0, 1)
    assert not out[1:3].any() and bool((lse[1:3] == -math.inf).all())
    assert bool(out[0].isfinite().all() & lse[0].isfinite().all() & out[3].isfinite().all())


def test_rows_beyond_2_31_elements(solution: str, tmp_path: Path) -> None:
    # Report K3, in a sparse file: page 8 lies 2**31 elements behind page 0.
    page_elements, num_pages, page_size, width = 2**28, 9, 4, 24
    path = tmp_path / "pool"
    storage = torch.from_file(str(path), shared=True, size=(num_pages - 1) * page_elements + page_size * width, dtype=torch.float32)
    cache = storage.as_strided((num_pages, page_size, width), (page_elements, width, 1))
    cache[8] = torch.randn((page_size, width), generator=_generator(5))
    near = cache[8:].clone()
    q = torch.randn((1, 2, width), generator=_generator(6))
    slots = torch.tensor([[32, 35, -1, 36]], dtype=torch.int32)
    options = {"softmax_scale": 0.3, "latent_dim": 16}
    want = dsa.sparse_prefill(q, near, torch.where(slots < 36, slots - 32, -1), **options, solution="reference")
    torch.testing.assert_close(dsa.sparse_prefill(q, cache, slots, **options, solution=solution), want, rtol=1e-5, atol=1e-5)
    table, offsets = torch.tensor([[8]], dtype=torch.int32), torch.tensor([0, 1], dtype=torch.int32)
    lens = torch.tensor([4], dtype=torch.int32)
    sizes = {"max_seqlen_q": 1, "max_seqlen_k": 4}
    want = dsa.indexer_scores(q, torch.ones(1, 2), near, table * 0, offsets, lens, **sizes, solution="reference")
    got = dsa.indexer_scores(q, torch.ones(1, 2), cache, table, offsets, lens, **sizes, solution=solution)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    # A row of scores as far behind the first.
    scores = storage.as_strided((2, 3), (2**31, 1))
    scores[0], scores[1] = torch.tensor([0.0, 1.0, 2.0]), torch.tensor([2.0, 1.0, 0.0])
    assert dsa.topk_slots(scores, 1, solution=solution).tolist() == [[2], [0]]
    assert path.stat().st_blocks * 512 < 1 << 20
