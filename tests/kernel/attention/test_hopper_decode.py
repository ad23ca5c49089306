"""Paged decoding on Hopper: in the interpreter here, on the device where there is one of that kind."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from tokenspeed_kernel import NoKernelError
from tokenspeed_kernel.ops import attention
from tokenspeed_kernel.ops.attention import cases, reference
from tokenspeed_kernel.ops.attention.cases import Batch
from tokenspeed_kernel.ops.attention.hopper import planner

decode = pytest.importorskip("tokenspeed_kernel.ops.attention.hopper.decode", reason="needs triton", exc_type=ImportError)
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for machines without a GPU")

# Small heads: the interpreter is slow, and the kernel does not care.
BATCHES = (
    Batch("one_key", (1,), (1,), page_size=16),
    Batch("no_key", (1, 1, 1), (0, 3, 0), page_size=16),
    Batch("ragged", (1,) * 6, (0, 300, 7, 1, 16, 640), num_heads=8, num_kv_heads=2, page_size=16),
    Batch("many_heads", (1,) * 3, (0, 100, 17), num_heads=32, num_kv_heads=8, page_size=16),
    Batch("odd_heads", (1, 1), (90, 33), num_heads=9, num_kv_heads=3, page_size=32),
    Batch("group_16", (1, 1), (70, 33), num_heads=16, num_kv_heads=1, page_size=16),
    Batch("own_keys", (1, 1), (70, 33), num_heads=4, num_kv_heads=4, page_size=64),
    Batch("sinks", (1,) * 3, (200, 0, 65), page_size=16, sinks=True),
    Batch("window", (1,) * 3, (200, 3, 65), page_size=16, sliding_window=37),
    Batch("cap", (1, 1), (70, 33), page_size=16, logit_cap=3.0),
    Batch("everything", (1,) * 3, (200, 3, 65), page_size=16, sinks=True, sliding_window=37, logit_cap=3.0),
    Batch("missing_pages", (1,) * 3, (90, 33, 40), page_size=16, missing_pages=((0, 0), (0, 3), (1, 2), (2, 0), (2, 1), (2, 2))),
)
# As engines have them, with requests longer than one program's share.
DEVICE_BATCHES = (
    *(
        Batch(
            f"{heads}_{kv_heads}_d{dim}_page{page}{'_sinks_window' if window else ''}",
            (1,) * 9,
            (4096, 0, 1, 17, 1000, 63, 64, 2049, 16000),
            *(heads, kv_heads, dim, page),
            sinks=window is not None,
            sliding_window=window,
            missing_pages=((4, 3),),
        )
        for heads, kv_heads, dim, window in ((32, 8, 128, None), (64, 8, 64, 128), (64, 8, 64, None), (9, 3, 64, None))
        for page in (16, 64)
    ),
    Batch("cap", (1,) * 3, (3000, 0, 70), 32, 8, 128, 64, logit_cap=5.0),
)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def _compare(got: Any, want: Any, tolerance: float) -> None:
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, atol=tolerance, rtol=tolerance)


@interpreted
@pytest.mark.parametrize("batch", BATCHES, ids=str)
def test_interpreted(batch: Batch) -> None:
    inputs = cases.decode_inputs(batch)
    want = reference.mha_decode(**inputs, return_lse=True)
    _compare(decode.mha_decode(**inputs, return_lse=True), want, 1e-5)
    out = torch.full_like(inputs["q"], math.nan)
    assert decode.mha_decode(**inputs, out=out) is out
    torch.testing.assert_close(out, want[0], atol=1e-5, rtol=1e-5)


@interpreted
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_dtypes_of_the_device_interpreted(dtype: torch.dtype) -> None:
    from tokenspeed_kernel.testing.interpreter import device_numbers

    batch = Batch("d64", (1, 1), (90, 33), num_heads=8, num_kv_heads=2, head_dim=64, page_size=16)
    inputs = cases.decode_inputs(batch, dtype=dtype)
    with device_numbers():
        got = attention.mha_decode(**inputs, return_lse=True, solution="hopper")
    want = attention.mha_decode(**inputs, return_lse=True, solution="reference")
    _compare([one.float() for one in got], [one.float() for one in want], 2e-2)


@interpreted
@pytest.mark.parametrize("programs", [1, 2, 3, 7, 64])
@pytest.mark.parametrize(("heads", "min_tiles"), [(1, 1), (2, 1), (2, 3)])
def test_every_way_to_share(programs: int, heads: int, min_tiles: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def plan(num_reqs: int, num_heads: int, num_kv_heads: int, head_dim: int, device: torch.device) -> planner.StreamPlan:
        return planner.stream_plan(
            num_heads, num_kv_heads, head_dim, programs, heads=heads, num_warps=4, num_stages=3, min_tiles=min_tiles
        )

    monkeypatch.setattr(decode, "_planned", plan)
    inputs = cases.decode_inputs(Batch("share", (1,) * 4, (0, 3, 200, 97), page_size=16, sinks=True, sliding_window=150))
    for changes in ({}, {"sinks": None}, {"sliding_window": None}):
        changed = {**inputs, **changes}
        want = reference.mha_decode(**changed, return_lse=True)
        _compare(decode.mha_decode(**changed, return_lse=True), want, 1e-5)


@interpreted
def test_more_tiles_than_32_bits_multiply(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "_WIDE_FROM", 0)
    inputs = cases.decode_inputs(Batch("wide", (1,) * 3, (300, 0, 97), page_size=16))
    _compare(decode.mha_decode(**inputs, return_lse=True), reference.mha_decode(**inputs, return_lse=True), 1e-5)


@interpreted
def test_a_work_space_serves_one_layer_after_the_other() -> None:
    # Parts that another layer left must not be read, and each launch leaves the counters at zero.
    inputs = cases.decode_inputs(Batch("layers", (1,) * 3, (300, 0, 65), page_size=16))
    made = attention.plan(inputs["page_table"], inputs["seq_lens"], page_size=16, max_seqlen_k=300)
    want = reference.mha_decode(**inputs, return_lse=True)
    for _ in range(2):
        _compare(decode.mha_decode(**inputs, return_lse=True, plan=made), want, 1e-5)
        ((parts, stats, arrivals),) = made._prepared.values()
        assert not bool(arrivals.any())
        assert bool(torch.isfinite(parts).any())
        parts.fill_(math.nan)
        stats.fill_(math.nan)


@interpreted
@pytest.mark.parametrize("place", [0, 15, 16, 63, 64, 127, 128, 150, 299])
def test_one_key_that_dominates(place: int) -> None:
    # At the first, the last, and at borders of pages, tiles and shares: a lost key would pass in a mean over many.
    inputs = cases.decode_inputs(Batch("dominant", (1,), (300,), num_heads=4, num_kv_heads=1, page_size=16))
    page = int(inputs["page_table"][0, place // 16])
    inputs["k_cache"][page, place % 16] = 8.0
    inputs["q"].fill_(1.0)
    got, lse = decode.mha_decode(**inputs, return_lse=True)
    torch.testing.assert_close(got[0], inputs["v_cache"][page, place % 16].expand(4, -1), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(lse, torch.full_like(lse, 8.0 * 16 / 4), atol=1e-3, rtol=0)


@interpreted
def test_tables_and_lengths_with_gaps() -> None:
    inputs = cases.decode_inputs(Batch("gaps", (1, 1, 1), (9, 90, 17), page_size=16))
    want = reference.mha_decode(**inputs, return_lse=True)
    for name in ("page_table", "seq_lens"):
        inputs[name] = torch.stack((inputs[name], torch.ones_like(inputs[name])), dim=-1)[..., 0]
        assert not inputs[name].is_contiguous()
    _compare(decode.mha_decode(**inputs, return_lse=True), want, 1e-5)


def test_no_request() -> None:
    inputs = cases.decode_inputs(Batch("none", (), (), page_size=16))
    out, lse = decode.mha_decode(**inputs, return_lse=True)
    assert out.shape == inputs["q"].shape
    assert lse.shape == (0, 4)


@interpreted
def test_other_pages_and_heads_are_refused_by_name() -> None:
    for changes, reason in (({"page_size": 24}, "page_size"), ({"head_dim": 80}, "head_dim")):
        batch = replace(Batch("other", (1,), (30,), head_dim=64, page_size=16), **changes)
        with pytest.raises(NoKernelError, match=reason):
            attention.mha_decode(**cases.decode_inputs(batch, dtype=torch.bfloat16), solution="hopper")


def _needs_hopper() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a GPU of compute capability 9.0")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("batch", DEVICE_BATCHES, ids=str)
def test_on_gpu(batch: Batch, dtype: torch.dtype) -> None:
    _needs_hopper()
    inputs = cases.decode_inputs(batch, dtype=dtype, device="cuda")
    want, want_lse = attention.mha_decode(**inputs, return_lse=True, solution="reference")
    got, lse = attention.mha_decode(**inputs, return_lse=True, solution="hopper")
    torch.testing.assert_close(lse, want_lse, atol=1e-3, rtol=0)
    torch.testing.assert_close(got, want, atol=1e-2, rtol=1.6e-2)
    assert float(torch.nn.functional.cosine_similarity(got.double().flatten(), want.double().flatten(), dim=0)) > 0.99999


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", [16, 64])
def test_one_key_that_dominates_among_65536(page_size: int) -> None:
    """At the first, the last, and at borders of pages, tiles and shares: the result is its value."""
    _needs_hopper()
    inputs = cases.decode_inputs(Batch("long", (1,), (65536,), 32, 8, 128, page_size), dtype=torch.bfloat16, device="cuda")
    plan = planner.plan_stream(1, 32, 8, 128, torch.cuda.get_device_properties(0).multi_processor_count)
    borders = {one.first_tile * plan.tile for one in planner.shares(plan, [65536], max_keys=65536) if one.block == 0}
    inputs["q"].fill_(1.0)
    for place in sorted({0, 1, page_size - 1, page_size, 65535, *borders, *(border - 1 for border in borders if border)}):
        page = int(inputs["page_table"][0, place // page_size])
        key = inputs["k_cache"][page, place % page_size]
        before = key.clone()
        key.fill_(4.0)
        out, lse = attention.mha_decode(**inputs, return_lse=True, solution="hopper")
        key.copy_(before)
        value = inputs["v_cache"][page, place % page_size].repeat_interleave(4, dim=0)
        torch.testing.assert_close(out[0], value, atol=1e-2, rtol=1.6e-2, msg=lambda text, place=place: f"key {place}: {text}")
        torch.testing.assert_close(lse, torch.full_like(lse, 4.0 * 128**0.5), atol=1e-3, rtol=0)


@pytest.mark.gpu
def test_captured_graph_takes_other_lengths() -> None:
    _needs_hopper()
    batch = Batch("graph", (1,) * 4, (9000, 70, 0, 33), 32, 8, 128, 64)
    inputs = cases.decode_inputs(batch, dtype=torch.bfloat16, device="cuda")
    made = attention.plan(inputs["page_table"], inputs["seq_lens"], page_size=64, max_seqlen_k=9000)
    out = torch.full_like(inputs["q"], math.nan)
    attention.mha_decode(**inputs, out=out, plan=made, solution="hopper")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        before = torch.cuda.memory_stats()["allocation.all.allocated"]  # the graph itself allocates, too
        attention.mha_decode(**inputs, out=out, plan=made, solution="hopper")
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before, "a captured call allocates nothing"
    for lengths in ([100, 70, 0, 33], [9000, 1, 64, 0], [0, 0, 0, 0], [8999, 70, 64, 33]):
        inputs["q"].copy_(torch.randn_like(inputs["q"]))
        inputs["seq_lens"].copy_(torch.tensor([min(a, b) for a, b in zip(lengths, (9000, 70, 0, 33), strict=True)]))
        out.fill_(math.nan)
        graph.replay()
        want = attention.mha_decode(**inputs, solution="reference")
        torch.testing.assert_close(out, want, atol=1e-2, rtol=1.6e-2)
