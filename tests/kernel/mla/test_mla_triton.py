"""The Triton kernels beyond the cases: whole rows, every number of parts, work space, graphs, large pools."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tokenspeed_kernel.ops import mla
from tokenspeed_kernel.ops.mla.cases import LatentBatch, decode_inputs, extend_inputs

CPU = torch.device("cpu")
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for machines without a GPU")


@pytest.fixture(autouse=True)
def _triton() -> None:
    pytest.importorskip("triton", reason="needs triton")


def _inputs(make: Any, batch: LatentBatch, device: str = "cpu", dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    return make(batch, torch.Generator().manual_seed(0), torch.device(device), dtype)


@interpreted
@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("dims", [(32, 16), (20, 6)])
def test_whole_rows(ragged: bool, dims: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    # float32 takes rows by slices; here it goes the way of half precision, whose products the interpreter gets wrong.
    paged = pytest.importorskip("tokenspeed_kernel.ops.mla.triton.paged")
    tuning = pytest.importorskip("tokenspeed_kernel.ops.mla.triton.tuning")
    for block_m, block_n in ((16, 16), (32, 32)):
        config = tuning.LatentConfig(block_m, block_n, 32, 16, 32, 0, 4, 1)
        monkeypatch.setattr(paged, "latent_config", lambda *_, config=config: config)
        batch = LatentBatch("whole", (3, 3, 3), (40, 0, 75), 5, *dims, missing_pages=((0, 2),), heavy=(39, -1, 31))
        inputs = _inputs(extend_inputs if ragged else decode_inputs, batch)
        function = mla.mla_extend if ragged else mla.mla_decode
        want = function(**inputs, return_lse=True, solution="reference")
        for got, truth in zip(function(**inputs, return_lse=True, solution="triton"), want, strict=True):
            torch.testing.assert_close(got, truth, rtol=1e-5, atol=1e-5)


@interpreted
@pytest.mark.parametrize("num_splits", [1, 2, 3, 8, 20])
def test_every_number_of_parts(num_splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    paged = pytest.importorskip("tokenspeed_kernel.ops.mla.triton.paged")
    monkeypatch.setattr(paged, "num_splits", lambda *_: num_splits)
    batch = LatentBatch("split", (2,) * 4, (0, 3, 100, 33), heavy=(-1, 2, 48, 16))
    for make, function in ((decode_inputs, mla.mla_decode), (extend_inputs, mla.mla_extend)):
        inputs = _inputs(make, batch)
        want = function(**inputs, return_lse=True, solution="reference")
        for got, truth in zip(function(**inputs, return_lse=True, solution="triton"), want, strict=True):
            torch.testing.assert_close(got, truth, rtol=1e-5, atol=1e-5)
        # The output's rows lie apart, those of the parts do not.
        wide = torch.full((*want[0].shape[:-1], 40), math.nan)
        given = wide[..., 4:36]
        assert function(**inputs, out=given, solution="triton") is given
        torch.testing.assert_close(given, want[0], rtol=1e-5, atol=1e-5)
        assert bool(wide[..., :4].isnan().all() & wide[..., 36:].isnan().all())


@interpreted
def test_parts_of_other_steps_do_not_leak() -> None:
    # The work space of a plan keeps what an earlier layer left: parts without keys must not be read.
    inputs = _inputs(decode_inputs, LatentBatch("short", (1, 1), (300, 1)))
    made = mla.plan(inputs["page_table"], inputs["seq_lens"], page_size=4, max_seqlen_k=300)
    want = mla.mla_decode(**inputs, solution="reference")
    mla.mla_decode(**inputs, solution="triton", plan=made)
    prepared = [tensor for pair in made._prepared.values() for tensor in pair]
    assert prepared, "the case must be split for this test to mean anything"
    prepared[0].fill_(math.nan)
    torch.testing.assert_close(mla.mla_decode(**inputs, solution="triton", plan=made), want, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("planned", [False, True])
def test_captured_in_a_cuda_graph(planned: bool) -> None:
    batch = LatentBatch("graph", (2, 2, 2), (900, 70, 33), 16, 512, 64, 64)
    for make, function in ((decode_inputs, mla.mla_decode), (extend_inputs, mla.mla_extend)):
        inputs = _inputs(make, batch, "cuda", torch.bfloat16)
        out = inputs["q"].new_full((*inputs["q"].shape[:-1], 512), math.nan)
        lengths = (inputs["page_table"], inputs["seq_lens"], inputs.get("cu_seqlens_q"))
        options = {"plan": mla.plan(*lengths, page_size=64, max_seqlen_q=2, max_seqlen_k=900)} if planned else {}
        function(**inputs, **options, out=out, solution="triton")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            function(**inputs, **options, out=out, solution="triton")
        inputs["q"].copy_(torch.randn_like(inputs["q"]))
        inputs["seq_lens"].copy_(torch.tensor([800, 60, 20], dtype=torch.int32))
        out.fill_(math.nan)
        graph.replay()
        want = function(**inputs, solution="reference")
        torch.testing.assert_close(out, want, atol=1e-2, rtol=1.6e-2)


@pytest.mark.gpu
def test_pool_beyond_2_31_elements() -> None:
    # Report K3: 4.4 GB of bf16; the pages in use lie at its end.
    num_pages, page_size, width = 60_000, 64, 576
    if torch.cuda.mem_get_info()[0] < 8 << 30:
        pytest.skip("needs 8 GB of free device memory")
    cache = torch.empty((num_pages, page_size, width), dtype=torch.bfloat16, device="cuda")
    assert cache.numel() > 2**31
    length = 200
    rows = torch.randn((length, width), device="cuda").bfloat16()
    table = torch.tensor([[num_pages - 1, num_pages - 3, num_pages - 2, num_pages - 4]], dtype=torch.int32, device="cuda")
    positions = torch.arange(length, device="cuda")
    slots = table[0, positions // page_size].long() * page_size + positions % page_size
    mla.write_mla_cache(rows[:, :512], rows[:, 512:], cache, slots, solution="triton")
    assert torch.equal(cache.view(-1, width)[slots], rows)
    q = torch.randn((1, 2, 16, width), device="cuda").bfloat16()
    lens = torch.tensor([length], dtype=torch.int32, device="cuda")
    offsets = torch.tensor([0, 2], dtype=torch.int32, device="cuda")
    near = torch.zeros((4, page_size, width), dtype=torch.bfloat16, device="cuda")
    near.view(-1, width)[:length] = rows
    options = {"max_seqlen_k": length, "softmax_scale": width**-0.5}
    near_table = torch.arange(4, dtype=torch.int32, device="cuda")[None]
    want = mla.mla_decode(q, near, near_table, lens, **options, solution="reference")
    got = mla.mla_decode(q, cache, table, lens, **options, solution="triton")
    torch.testing.assert_close(got, want, atol=1e-2, rtol=1.6e-2)
    got = mla.mla_extend(q[0], cache, table, offsets, lens, max_seqlen_q=2, **options, solution="triton")
    torch.testing.assert_close(got, want[0], atol=1e-2, rtol=1.6e-2)
