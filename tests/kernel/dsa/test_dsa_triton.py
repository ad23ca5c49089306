"""The Triton kernels beyond the cases: whole rows, numbers of parts, graphs, large pools."""

from __future__ import annotations

import math

import pytest
import torch

from tokenspeed_kernel.ops import dsa
from tokenspeed_kernel.ops.dsa.cases import IndexerBatch, SparseBatch, indexer_inputs, sparse_inputs

CPU = torch.device("cpu")
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for machines without a GPU")


@pytest.fixture(autouse=True)
def _triton() -> None:
    pytest.importorskip("triton", reason="needs triton")


@interpreted
def test_whole_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    # float32 takes rows by slices; here it goes the way of half precision, whose products the interpreter gets wrong.
    sparse = pytest.importorskip("tokenspeed_kernel.ops.dsa.triton.sparse")
    tuning = pytest.importorskip("tokenspeed_kernel.ops.mla.triton.tuning")
    config = tuning.LatentConfig(16, 32, 32, 16, 32, 0, 4, 1)
    monkeypatch.setattr(sparse, "latent_config", lambda *_: config)
    batch = SparseBatch("whole", 2, 2, 70, 20, 20, 6, 60, ignored=0.2, heavy=(0, 31, 32, 69))
    inputs = sparse_inputs(batch, torch.Generator().manual_seed(0), CPU, torch.float32, decode=True)
    want = dsa.sparse_decode(**inputs, return_lse=True, solution="reference")
    for got, truth in zip(dsa.sparse_decode(**inputs, return_lse=True, solution="triton"), want, strict=True):
        torch.testing.assert_close(got, truth, rtol=1e-5, atol=1e-5)


@interpreted
@pytest.mark.parametrize("num_splits", [1, 2, 3, 8])
def test_every_number_of_parts(num_splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sparse = pytest.importorskip("tokenspeed_kernel.ops.dsa.triton.sparse")
    monkeypatch.setattr(sparse, "num_splits", lambda *_: num_splits)
    batch = SparseBatch("split", 2, 2, 100, ignored=0.2, empty_rows=(2,), num_pages=60)
    for decode, function in ((True, dsa.sparse_decode), (False, dsa.sparse_prefill)):
        inputs = sparse_inputs(batch, torch.Generator().manual_seed(0), CPU, torch.float32, decode=decode)
        want = function(**inputs, return_lse=True, solution="reference")  # type: ignore[operator]
        for got, truth in zip(function(**inputs, return_lse=True, solution="triton"), want, strict=True):  # type: ignore[operator]
            torch.testing.assert_close(got, truth, rtol=1e-5, atol=1e-5)


@interpreted
def test_indexer_with_whole_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    # Half precision takes a head at once, float32 by pieces: the other way for it too.
    indexer = pytest.importorskip("tokenspeed_kernel.ops.dsa.triton.indexer")
    config = {"BLOCK_H": 16, "CHUNK": 32, "BLOCK_Q": 8, "GROUP": 2, "BLOCK_N": 32, "num_warps": 4, "num_stages": 1}
    monkeypatch.setattr(indexer, "indexer_config", lambda *_: config)
    for fp8 in ("", "both"):
        batch = IndexerBatch("whole", (9, 1, 3), (40, 33, 3), 5, 21, fp8=fp8)
        inputs = indexer_inputs(batch, torch.Generator().manual_seed(0), CPU, torch.float32, paged=True)
        want = dsa.indexer_scores(**inputs, solution="reference")
        torch.testing.assert_close(dsa.indexer_scores(**inputs, solution="triton"), want, rtol=1e-5, atol=1e-5)


@interpreted
@pytest.mark.parametrize("values", ["random", "one part has all", "ties", "few", "misled", "equal"])
def test_choice_by_nomination(values: str) -> None:
    # Rows of more than 64 entries are long ones here. Each way: a part with more than its share, more than there is room for, all.
    topk = pytest.importorskip("tokenspeed_kernel.ops.dsa.triton.topk")
    config = topk.choice_config(200, 6, interpreted=True)
    assert config.parts > 1
    scores = torch.randn((2, 200), generator=torch.Generator().manual_seed(2))
    if values == "one part has all":
        scores[:, 50:62] += 100.0
    elif values == "ties":
        scores = scores.round()
    elif values == "few":
        scores[:, 4:] = -math.inf
    elif values == "misled":  # every place that is sampled is far above the others
        scores[:, torch.arange(config.sample) * 200 // config.sample] += 100.0
    elif values == "equal":
        scores = torch.full_like(scores, -1.5)
    want = dsa.topk_slots(scores, 6, solution="reference")
    assert torch.equal(dsa.topk_slots(scores, 6, solution="triton"), want)


@interpreted
def test_rows_are_chosen_from_in_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    topk = pytest.importorskip("tokenspeed_kernel.ops.dsa.triton.topk")
    monkeypatch.setattr(topk, "_ROWS_AT_ONCE", 2)
    scores = torch.randn((5, 90), generator=torch.Generator().manual_seed(3))
    paging = {
        "page_table": torch.randperm(60, generator=torch.Generator().manual_seed(3)).view(2, 30).to(torch.int32),
        "cu_seqlens_q": torch.tensor([0, 3, 5], dtype=torch.int32),
        "page_size": 3,
    }
    want = dsa.topk_slots(scores, 7, **paging, solution="reference")
    assert torch.equal(dsa.topk_slots(scores, 7, **paging, solution="triton"), want)


def test_plan_of_a_choice() -> None:
    topk = pytest.importorskip("tokenspeed_kernel.ops.dsa.triton.topk")
    for num_keys in (1, 100, 8192, 8193, 65536, 131072, 1 << 20):
        for k in (1, 64, 2048, 5000, 100_000):
            config = topk.choice_config(num_keys, k)
            if num_keys <= 8192:
                assert (config.parts, config.capacity >= num_keys) == (0, True)
            elif config.capacity:
                assert config.parts * config.block >= num_keys
                assert config.rank * num_keys / config.sample >= k, "what is nominated is more than what is chosen"
                assert config.capacity >= k
    assert topk.choice_config(65536, 2048).capacity, "a choice of this size is made in registers"
    assert not topk.choice_config(65536, 30_000).capacity


@pytest.mark.gpu
def test_captured_in_a_cuda_graph() -> None:
    device = torch.device("cuda")
    batch = IndexerBatch("graph", (1, 1, 1), (900, 70, 33), 64, 128, 64)
    inputs = indexer_inputs(batch, torch.Generator().manual_seed(0), device, torch.bfloat16, paged=True)
    paging = {"page_table": inputs["page_table"], "cu_seqlens_q": inputs["cu_seqlens_q"], "page_size": 64}
    num_pages = inputs["k_cache"].shape[0]
    cache = torch.randn((num_pages, 64, 576), device=device).bfloat16()
    q = torch.randn((3, 1, 16, 576), device=device).bfloat16()
    scores = torch.full((3, 900), math.nan, device=device)
    slots = torch.zeros((3, 64), dtype=torch.int32, device=device)
    out = torch.full((3, 1, 16, 512), math.nan, device=device, dtype=torch.bfloat16)

    def step(solution: str) -> torch.Tensor:
        dsa.indexer_scores(**inputs, out=scores, solution=solution)
        dsa.topk_slots(scores, 64, **paging, out=slots, solution=solution)
        return dsa.sparse_decode(q, cache, slots[:, None], softmax_scale=0.05, out=out, solution=solution)

    step("triton")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step("triton")
    inputs["seq_lens"].copy_(torch.tensor([800, 60, 20], dtype=torch.int32))
    inputs["weights"].copy_(torch.rand_like(inputs["weights"]) + 0.5)
    q.copy_(torch.randn_like(q))
    for one in (scores, out):
        one.fill_(math.nan)
    slots.fill_(-7)
    graph.replay()
    got_scores, got_slots, got = scores.clone(), slots.clone(), out.clone()
    torch.testing.assert_close(got_scores, dsa.indexer_scores(**inputs, solution="reference"), rtol=1e-4, atol=1e-4)
    # The scores differ in their last bits, the choice from the same scores does not.
    assert torch.equal(got_slots, dsa.topk_slots(got_scores, 64, **paging, solution="reference"))
    want = dsa.sparse_decode(q, cache, got_slots[:, None], softmax_scale=0.05, solution="reference")
    torch.testing.assert_close(got, want, atol=1e-2, rtol=1.6e-2)


@pytest.mark.gpu
def test_pools_beyond_2_31_elements() -> None:
    # Report K3: 4.4 GB of bf16 each; the slots in use lie at the end.
    if torch.cuda.mem_get_info()[0] < 8 << 30:
        pytest.skip("needs 8 GB of free device memory")
    num_pages, page_size, width = 60_000, 64, 576
    cache = torch.empty((num_pages, page_size, width), dtype=torch.bfloat16, device="cuda")
    assert cache.numel() > 2**31
    first = (num_pages - 4) * page_size
    cache[-4:] = torch.randn((4, page_size, width), device="cuda").bfloat16()
    near = cache[-4:].clone()
    q = torch.randn((2, 16, width), device="cuda").bfloat16()
    slots = torch.randint(4 * page_size, (2, 128), device="cuda", dtype=torch.int32)
    want = dsa.sparse_prefill(q, near, slots, softmax_scale=width**-0.5, solution="reference")
    got = dsa.sparse_prefill(q, cache, slots + first, softmax_scale=width**-0.5, solution="triton")
    torch.testing.assert_close(got, want, atol=1e-2, rtol=1.6e-2)
    del cache
    keys = torch.empty((270_000, page_size, 128), dtype=torch.bfloat16, device="cuda")
    assert keys.numel() > 2**31
    keys[-4:] = torch.randn((4, page_size, 128), device="cuda").bfloat16()
    near = keys[-4:].clone()
    q = torch.randn((2, 64, 128), device="cuda").bfloat16()
    weights, table = torch.rand((2, 64), device="cuda"), torch.arange(4, dtype=torch.int32, device="cuda")[None]
    offsets, lens = (torch.tensor(one, dtype=torch.int32, device="cuda") for one in ([0, 2], [200]))
    sizes = {"max_seqlen_q": 2, "max_seqlen_k": 200}
    want = dsa.indexer_scores(q, weights, near, table, offsets, lens, **sizes, solution="reference")
    got = dsa.indexer_scores(q, weights, keys, table + keys.shape[0] - 4, offsets, lens, **sizes, solution="triton")
    torch.testing.assert_close(got, want, atol=1e-2, rtol=1e-4)
