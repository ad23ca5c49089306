"""Sparse attention on Hopper, on such a device: Gluon has no interpreter. `test_dsa_hopper_compiled` looks at it without one."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tokenspeed_kernel import NoKernelError
from tokenspeed_kernel.ops import dsa
from tokenspeed_kernel.ops.dsa.cases import SparseBatch, sparse_inputs


def _batch(name: str, num_reqs: int, q_len: int, num_slots: int, num_heads: int = 64, **more: Any) -> SparseBatch:
    sizes = {"latent_dim": 512, "rope_dim": 64, "num_pages": 40, "page_size": 64}
    return SparseBatch(name, num_reqs, q_len, num_slots, num_heads, **{**sizes, **more})


# Slots that nobody names hold NaN.
BATCHES = (
    *(_batch(f"slots_{slots}_h{heads}", 2, 2, slots, heads) for slots in (0, 1, 31, 32, 33, 700, 2048) for heads in (64, 128)),
    *(_batch(f"heads_{heads}", 2, 1, 300, heads) for heads in (1, 16, 32, 40, 65, 100, 192)),
    _batch("one_row", 1, 1, 2048, 128),
    _batch("many_rows", 300, 1, 200, 64),
    _batch("ignored", 3, 2, 500, 128, ignored=0.4),
    _batch("all_ignored", 2, 2, 500, 64, ignored=1.0),
    _batch("empty_rows", 5, 1, 500, 64, empty_rows=(1, 2)),
    _batch("no_request", 0, 1, 64, 64),
    _batch("no_page", 1, 1, 64, 64, num_pages=0, ignored=1.0),
    _batch("page_size_1", 2, 2, 400, 64, num_pages=900, page_size=1),
    _batch("page_size_5", 2, 2, 400, 64, num_pages=300, page_size=5),
    # One key outweighs all others: at the first place, the last, and at borders of tiles and parts.
    _batch("heavy", 10, 1, 2048, 64, heavy=(0, 31, 32, 63, 64, 1023, 1024, 1055, 2046, 2047)),
    _batch("heavy_whole", 140, 1, 300, 64, heavy=(0, 31, 32, 63, 64, 127, 128, 255, 256, 299)),
)


@pytest.fixture(autouse=True)
def _needs_hopper() -> None:
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a GPU of compute capability 9.0")


def _inputs(batch: SparseBatch, *, decode: bool = True) -> dict[str, Any]:
    return sparse_inputs(batch, torch.Generator().manual_seed(1), torch.device("cuda"), torch.bfloat16, decode=decode)


def _hold(inputs: dict[str, Any], *, decode: bool = True) -> None:
    function: Any = dsa.sparse_decode if decode else dsa.sparse_prefill
    want, want_lse = function(**inputs, return_lse=True, solution="reference")
    got, lse = function(**inputs, return_lse=True, solution="gluon")
    torch.testing.assert_close(lse, want_lse, atol=1e-3, rtol=0)
    torch.testing.assert_close(got, want, atol=1e-2, rtol=1.6e-2)
    assert torch.equal(got, function(**inputs, solution="gluon")), "the same each time, with the LSE and without"
    if bool(want.any()):
        assert float(torch.nn.functional.cosine_similarity(got.double().flatten(), want.double().flatten(), dim=0)) > 0.99999


@pytest.mark.gpu
@pytest.mark.parametrize("decode", [True, False], ids=["decode", "prefill"])
@pytest.mark.parametrize("batch", BATCHES, ids=str)
def test_on_gpu(batch: SparseBatch, decode: bool) -> None:
    _hold(_inputs(batch, decode=decode), decode=decode)


@pytest.mark.gpu
def test_a_pool_of_all_layers_and_rows_that_are_not_aligned() -> None:
    inputs = _inputs(_batch("pool", 2, 2, 400))
    cache = inputs["kv_cache"]
    # Pages lie further apart than they are long; the last has rows that are no multiple of 16 bytes apart: the portable kernel's.
    for shape in ((cache.shape[0], 3, 64, 576), (cache.shape[0], 64, 580)):
        pool = torch.full(shape, math.nan, dtype=torch.bfloat16, device="cuda")
        view = pool[:, 1] if pool.dim() == 4 else pool[..., :576]
        view.copy_(cache)
        _hold({**inputs, "kv_cache": view})


@pytest.mark.gpu
def test_operands_that_are_parts_of_larger_ones() -> None:
    inputs = _inputs(_batch("strided", 2, 2, 400, 64, strided=True))
    _hold(inputs)
    wide = torch.full((2, 2, 64, 520), math.nan, dtype=torch.bfloat16, device="cuda")
    out = dsa.sparse_decode(**inputs, out=wide[..., :512], solution="gluon")
    assert torch.equal(out, dsa.sparse_decode(**inputs, solution="gluon"))
    assert bool(wide[..., 512:].isnan().all())


@pytest.mark.gpu
@pytest.mark.parametrize("num_reqs", [1, 140])
def test_captured_graph_takes_other_slots(num_reqs: int) -> None:
    inputs = _inputs(_batch("graph", num_reqs, 1, 600))
    out = torch.full((num_reqs, 1, 64, 512), math.nan, dtype=torch.bfloat16, device="cuda")
    dsa.sparse_decode(**inputs, out=out, solution="gluon")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        dsa.sparse_decode(**inputs, out=out, solution="gluon")
    for _ in range(3):
        inputs["q"].copy_(torch.randn_like(inputs["q"]))
        inputs["slots"].copy_(inputs["slots"].flip(-1))
        inputs["slots"][0, 0, ::7] = -1
        out.fill_(math.nan)
        graph.replay()
        torch.testing.assert_close(out, dsa.sparse_decode(**inputs, solution="reference"), atol=1e-2, rtol=1.6e-2)


@pytest.mark.gpu
def test_pools_beyond_2_31_elements() -> None:
    if torch.cuda.mem_get_info()[0] < 8 << 30:
        pytest.skip("needs 8 GB of free device memory")
    num_pages = 60_000
    cache = torch.empty((num_pages, 64, 576), dtype=torch.bfloat16, device="cuda")
    assert cache.numel() > 2**31
    cache[-4:] = torch.randn((4, 64, 576), device="cuda").bfloat16()
    near = cache[-4:].clone()
    q = torch.randn((2, 64, 576), device="cuda").bfloat16()
    slots = torch.randint(256, (2, 128), device="cuda", dtype=torch.int32)
    want = dsa.sparse_prefill(q, near, slots, softmax_scale=576**-0.5, solution="reference")
    got = dsa.sparse_prefill(q, cache, slots + (num_pages - 4) * 64, softmax_scale=576**-0.5, solution="gluon")
    torch.testing.assert_close(got, want, atol=1e-2, rtol=1.6e-2)


@pytest.mark.gpu
def test_other_widths_are_refused_by_name() -> None:
    inputs = _inputs(_batch("other", 1, 1, 30, latent_dim=256))
    with pytest.raises(NoKernelError, match="latent_dim"):
        dsa.sparse_decode(**inputs, solution="gluon")
