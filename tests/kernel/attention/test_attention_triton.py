"""The Triton kernels: in the interpreter here, on the device where there is one."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tokenspeed_kernel.ops import attention
from tokenspeed_kernel.ops.attention import cases
from tokenspeed_kernel.testing import check_case

CPU = torch.device("cpu")
SMALL = [case for case in cases.CASES if not case.bench]
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for machines without a GPU")


@pytest.fixture(autouse=True)
def _triton() -> None:
    pytest.importorskip("triton", reason="needs triton")
    torch.set_num_threads(1)


@interpreted
@pytest.mark.parametrize("case", SMALL, ids=str)
def test_interpreted(case: Any) -> None:
    # fp32 alone: a bf16 product is silently wrong in the interpreter.
    check_case(case, solution="triton", device=CPU, dtype=torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", cases.CASES, ids=str)
def test_on_gpu(case: Any, dtype: torch.dtype) -> None:
    check_case(case, solution="triton", device=torch.device("cuda"), dtype=dtype)


@interpreted
@pytest.mark.parametrize("op", ["mha_decode", "mha_extend"])
def test_page_beyond_2_31_elements(op: str, tmp_path: Path) -> None:
    # Report K3, in a sparse file: page 8 lies 2**31 elements behind page 0, and only the pages that are used take memory.
    page_elements, num_pages, page_size, head_dim = 2**28, 9, 4, 16
    caches = []
    for name in ("k", "v"):
        storage = torch.from_file(str(tmp_path / name), shared=True, size=(num_pages - 1) * page_elements + 64, dtype=torch.float32)
        caches.append(storage.as_strided((num_pages, page_size, 1, head_dim), (page_elements, head_dim, head_dim, 1)))
    generator = torch.Generator().manual_seed(0)
    for cache in caches:
        cache[8] = torch.randn((page_size, 1, head_dim), generator=generator)
        assert cache.stride(0) * 8 == 2**31
    q = torch.randn((1, 2, head_dim), generator=generator)
    table = torch.tensor([[8]], dtype=torch.int32)
    lens = torch.tensor([4], dtype=torch.int32)
    if op == "mha_decode":
        arguments: tuple[Any, ...] = (q, *caches, table, lens)
        sizes = {"max_seqlen_k": 4}
    else:
        arguments = (q, *caches, table, torch.tensor([0, 1], dtype=torch.int32), lens)
        sizes = {"max_seqlen_q": 1, "max_seqlen_k": 4}
    function = getattr(attention, op)
    expected = function(*arguments, **sizes, solution="reference")
    assert float(expected.abs().max()) > 0
    for solution in ("triton", "cpu"):
        torch.testing.assert_close(function(*arguments, **sizes, solution=solution), expected, atol=1e-6, rtol=1e-6)
    assert sum((tmp_path / name).stat().st_blocks * 512 for name in ("k", "v")) < 1 << 20


@interpreted
def test_query_row_beyond_2_31_elements(tmp_path: Path) -> None:
    # Report K3: row 131,072 of stride 16,384 is element 2**31.
    stride, row = 16384, 131072
    storage = torch.from_file(str(tmp_path / "q"), shared=True, size=stride * row + 64, dtype=torch.float32)
    q = storage.as_strided((2, 2, 16), (stride * row, 16, 1))
    q[1] = torch.randn((2, 16), generator=torch.Generator().manual_seed(1))
    batch = cases.Batch("far", (1, 1), (5, 7))
    inputs = {**cases.decode_inputs(batch), "q": q, "num_heads": 2}
    del inputs["num_heads"]
    expected = attention.mha_decode(**inputs, solution="reference")
    torch.testing.assert_close(attention.mha_decode(**inputs, solution="triton"), expected, atol=1e-6, rtol=1e-6)


@interpreted
@pytest.mark.parametrize("op", ["mha_decode", "mha_extend", "mha_prefill"])
def test_tables_and_lengths_with_gaps(op: str) -> None:
    # The kernels read rows of the table, lengths and offsets element after element: others are copied first.
    batch = cases.Batch("gaps", (1, 1, 1) if op == "mha_decode" else (3, 1, 4), (9, 30, 17))
    make = {"mha_decode": cases.decode_inputs, "mha_extend": cases.paged_inputs, "mha_prefill": cases.ragged_inputs}[op]
    inputs = make(batch)
    want = getattr(attention, op)(**inputs, solution="reference")
    for name in ("page_table", "seq_lens", "cu_seqlens_q", "cu_seqlens_k"):
        if name in inputs:
            wide = torch.stack((inputs[name], torch.full_like(inputs[name], 1)), dim=-1)
            inputs[name] = wide[..., 0]
            assert not inputs[name].is_contiguous()
    torch.testing.assert_close(getattr(attention, op)(**inputs, solution="triton"), want, atol=1e-5, rtol=1e-5)


@interpreted
@pytest.mark.parametrize("num_splits", [1, 2, 3, 8])
def test_every_number_of_splits(num_splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    decode = pytest.importorskip("tokenspeed_kernel.ops.attention.triton.decode")
    monkeypatch.setattr(decode, "num_splits", lambda *_: num_splits)
    batch = cases.Batch("split", (1,) * 4, (0, 3, 100, 33), sinks=True, sliding_window=70)
    for changes in ({}, {"sinks": None}, {"sliding_window": None}):
        inputs = {**cases.decode_inputs(batch), **changes}
        expected = attention.mha_decode(**inputs, return_lse=True, solution="reference")
        got = attention.mha_decode(**inputs, return_lse=True, solution="triton")
        for one, other in zip(got, expected, strict=True):
            torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


@interpreted
def test_partial_results_of_other_steps_do_not_leak() -> None:
    # The work space of a plan keeps what an earlier layer left: parts without keys must not be read.
    batch = cases.Batch("short", (1, 1), (300, 1))
    inputs = cases.decode_inputs(batch)
    made = attention.plan(inputs["page_table"], inputs["seq_lens"], page_size=4, max_seqlen_k=300)
    expected = attention.mha_decode(**inputs, solution="reference")
    attention.mha_decode(**inputs, solution="triton", plan=made)
    prepared = [tensor for pair in made._prepared.values() for tensor in pair]
    assert prepared, "the case must be split for this test to mean anything"
    prepared[0].fill_(math.nan)
    torch.testing.assert_close(attention.mha_decode(**inputs, solution="triton", plan=made), expected, atol=1e-5, rtol=1e-5)


@interpreted
def test_large_negative_logits_and_window() -> None:
    # Reports K1 (-6e4 counts) and Z13 (window of 4096 over 5000 keys: 904..4999).
    inputs = cases.decode_inputs(cases.Batch("low", (1,), (2,), 1, 1, 16, 4))
    inputs["q"].fill_(-6e4 / 16)
    page = int(inputs["page_table"][0, 0])
    inputs["k_cache"][page, :2] = 1.0
    inputs["v_cache"][page, 0], inputs["v_cache"][page, 1] = 1.0, 3.0
    inputs["softmax_scale"] = 1.0
    out, lse = attention.mha_decode(**inputs, return_lse=True, solution="triton")
    torch.testing.assert_close(out, torch.full_like(out, 2.0))
    assert float(lse[0, 0]) == pytest.approx(-6e4 + math.log(2), rel=1e-6)
    batch = cases.Batch("z13", (1,), (5000,), 1, 1, 16, 64, sliding_window=4096, consecutive=True)
    inputs = cases.decode_inputs(batch, poison=False)
    inputs["q"].zero_()
    inputs["v_cache"].zero_()
    values, first = inputs["v_cache"].flatten(0, 1), int(inputs["page_table"][0, 0]) * 64
    for position, weight in ((903, 1000.0), (904, 1.0), (4999, 10.0)):
        values[first + position] = weight
    out, lse = attention.mha_decode(**inputs, return_lse=True, solution="triton")
    assert float(out[0, 0, 0]) == pytest.approx(11 / 4096, rel=1e-4)
    assert float(lse[0, 0]) == pytest.approx(math.log(4096), rel=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("op", ["mha_decode", "mha_extend"])
def test_captured_in_a_cuda_graph(op: str) -> None:
    batch = cases.Batch("graph", (1, 1, 1) if op == "mha_decode" else (1, 40, 7), (900, 70, 33), 32, 8, 128, 16)
    make = cases.decode_inputs if op == "mha_decode" else cases.paged_inputs
    inputs = make(batch, dtype=torch.bfloat16, device="cuda")
    out = torch.full_like(inputs["q"], math.nan)
    function = getattr(attention, op)
    function(**inputs, out=out, solution="triton")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function(**inputs, out=out, solution="triton")
    inputs["q"].copy_(torch.randn_like(inputs["q"]))
    inputs["seq_lens"].copy_(torch.tensor([800, 60, 20], dtype=torch.int32))
    out.fill_(math.nan)
    graph.replay()
    expected = function(**inputs, solution="reference")
    torch.testing.assert_close(out, expected, atol=1e-2, rtol=1.6e-2)


@pytest.mark.gpu
def test_pools_beyond_2_31_elements() -> None:
    # Report K3: 4.3 GB of bf16 each for keys and values; the pages in use lie at the end.
    if torch.cuda.mem_get_info()[0] < 12 << 30:
        pytest.skip("needs 12 GB of free device memory")
    num_pages, page_size, heads, head_dim = 132_000, 16, 8, 128
    pools = [torch.empty((num_pages, page_size, heads, head_dim), dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    assert pools[0].numel() > 2**31
    near = [torch.randn((8, page_size, heads, head_dim), device="cuda").bfloat16() for _ in pools]
    for pool, pages in zip(pools, near, strict=True):
        pool[-8:] = pages
    q = torch.randn((2, 32, head_dim), device="cuda").bfloat16()
    table = torch.tensor([[3, 0, 7, 1], [2, 6, 5, 4]], dtype=torch.int32, device="cuda")
    lens, offsets = (torch.tensor(one, dtype=torch.int32, device="cuda") for one in ([64, 50], [0, 1, 2]))
    want = attention.mha_decode(q, *near, table, lens, max_seqlen_k=64, solution="reference")
    far = table + num_pages - 8
    got = attention.mha_decode(q, *pools, far, lens, max_seqlen_k=64, solution="triton")
    torch.testing.assert_close(got, want, atol=1e-2, rtol=1.6e-2)
    got = attention.mha_extend(q, *pools, far, offsets, lens, max_seqlen_q=1, max_seqlen_k=64, solution="triton")
    torch.testing.assert_close(got, want, atol=1e-2, rtol=1.6e-2)


@pytest.mark.gpu
def test_window_of_4096_over_5000_keys_on_gpu() -> None:
    # Report Z13: the keys seen are 904..4999.
    batch = cases.Batch("z13", (1,), (5000,), 1, 1, 16, 64, sliding_window=4096, consecutive=True)
    inputs = cases.decode_inputs(batch, device="cuda", poison=False)
    inputs["q"].zero_()
    inputs["v_cache"].zero_()
    values, first = inputs["v_cache"].flatten(0, 1), int(inputs["page_table"][0, 0]) * 64
    for position, weight in ((903, 1000.0), (904, 1.0), (4999, 10.0)):
        values[first + position] = weight
    out, lse = attention.mha_decode(**inputs, return_lse=True, solution="triton")
    assert float(out[0, 0, 0]) == pytest.approx(11 / 4096, rel=1e-4)
    assert float(lse[0, 0]) == pytest.approx(math.log(4096), rel=1e-6)
