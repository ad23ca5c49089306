"""Prefill over expanded keys on Hopper, on a device of that kind; what it compiles to is tested with attention."""

from __future__ import annotations

import math

import pytest
import torch

from tokenspeed_kernel.ops import mla
from tokenspeed_kernel.ops.mla import cases
from tokenspeed_kernel.ops.mla.cases import ExpandedBatch

# Blocks of 128 queries and tiles of 128 keys: lengths around them, requests without queries or keys, and more queries than keys.
_QUERIES = (1, 0, 17, 128, 129, 300, 64, 20, 130, 3)
_KEYS = (1, 5, 17, 128, 257, 300, 1000, 7, 0, 200)
_SIZES = {"head_dim": 192, "v_head_dim": 128}
BATCHES = (
    ExpandedBatch("causal", _QUERIES, _KEYS, 16, 16, **_SIZES),
    ExpandedBatch("not_causal", _QUERIES, _KEYS, 16, 16, **_SIZES, causal=False),
    ExpandedBatch("strided", _QUERIES, _KEYS, 16, 16, **_SIZES, strided=True),
    ExpandedBatch("grouped", _QUERIES, _KEYS, 16, 4, **_SIZES, softmax_scale=0.1),
    ExpandedBatch("heavy_keys", (200,) * 5, (300,) * 5, 16, 16, **_SIZES, heavy=(0, 99, 100, 127, 299)),
)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("batch", BATCHES, ids=str)
def test_on_gpu(batch: ExpandedBatch, dtype: torch.dtype) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a GPU of compute capability 9.0")
    generator = torch.Generator().manual_seed(0)
    inputs = cases.expanded_inputs(batch, generator, torch.device("cuda"), dtype)
    want, want_lse = mla.mla_prefill(**inputs, return_lse=True, solution="reference")
    out = torch.full_like(want, math.nan)
    got, lse = mla.mla_prefill(**inputs, return_lse=True, out=out, solution="gluon")
    torch.testing.assert_close(lse, want_lse, atol=1e-3, rtol=0)
    torch.testing.assert_close(got, want, atol=1e-2, rtol=1.6e-2)
    assert float(torch.nn.functional.cosine_similarity(got.double().flatten(), want.double().flatten(), dim=0)) > 0.99999


@pytest.mark.gpu
def test_captured_graph_takes_other_lengths() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a GPU of compute capability 9.0")
    batch = ExpandedBatch("graph", (300, 64, 0, 200), (900, 70, 40, 330), 16, 16, **_SIZES)
    inputs = cases.expanded_inputs(batch, torch.Generator().manual_seed(0), torch.device("cuda"), torch.bfloat16)
    inputs["max_seqlen_q"] = 564
    out = torch.full((564, 16, 128), math.nan, dtype=torch.bfloat16, device="cuda")
    mla.mla_prefill(**inputs, out=out, solution="gluon")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        mla.mla_prefill(**inputs, out=out, solution="gluon")
    for starts, key_starts in (([0, 1, 65, 65, 564], [0, 10, 100, 101, 1340]), ([0, 564, 564, 564, 564], [0, 700, 700, 701, 1340])):
        inputs["q"].copy_(torch.randn_like(inputs["q"]))
        inputs["cu_seqlens_q"].copy_(torch.tensor(starts))
        inputs["cu_seqlens_k"].copy_(torch.tensor(key_starts))
        out.fill_(math.nan)
        graph.replay()
        want = mla.mla_prefill(**inputs, solution="reference")
        torch.testing.assert_close(out, want, atol=1e-2, rtol=1.6e-2)
