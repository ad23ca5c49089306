"""Latent decoding on Hopper, on such a device: Gluon has no interpreter. `test_hopper_compiled` looks at it without one."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tokenspeed_kernel import NoKernelError
from tokenspeed_kernel.ops import mla
from tokenspeed_kernel.ops.mla.cases import LatentBatch, decode_inputs

RAGGED = (4096, 0, 1, 17, 1000, 63, 64, 2049, 16000, 3, 65)


def _batch(
    name: str,
    q_len: int,
    lens: tuple[int, ...],
    num_heads: int = 16,
    missing: tuple[tuple[int, int], ...] = (),
    causal: bool = True,
) -> LatentBatch:
    return LatentBatch(
        name, (q_len,) * len(lens), lens, num_heads=num_heads, latent_dim=512, rope_dim=64, page_size=64, causal=causal,
        missing_pages=missing,
    )  # fmt: skip


# NaN lies wherever no key is: behind each request's last, and on pages that are nobody's.
BATCHES = (
    *(_batch(f"one_{length}_q{q_len}", q_len, (length,)) for q_len in (1, 4) for length in (1, 64, 100, 20000)),
    *(_batch(f"ragged_q{q_len}_h{heads}", q_len, RAGGED, heads) for q_len, heads in ((1, 16), (4, 16), (3, 7), (1, 128))),
    *(_batch(f"missing_q{q_len}", q_len, RAGGED, missing=((0, 0), (0, 63), (3, 0), (4, 3), (4, 4), (8, 100))) for q_len in (1, 4)),
    _batch("every_key", 4, RAGGED, causal=False),
    # One request is shared by nearly all programs, where the plan reckons with a third.
    *(_batch(f"one_long_q{q_len}", q_len, (40000, 0, 1)) for q_len in (1, 4)),
    *(_batch(f"many_q{q_len}", q_len, tuple(one * 37 % 300 for one in range(140))) for q_len in (1, 4)),
    _batch("no_key", 1, (0,) * 5),
)


@pytest.fixture(autouse=True)
def _needs_hopper() -> None:
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a GPU of compute capability 9.0")


def _decode(inputs: dict[str, Any], solution: str, **changes: Any) -> Any:
    return mla.mla_decode(**{**inputs, **changes}, solution=solution)


def _hold(inputs: dict[str, Any]) -> None:
    want, want_lse = _decode(inputs, "reference", return_lse=True)
    got, lse = _decode(inputs, "gluon", return_lse=True)
    torch.testing.assert_close(lse, want_lse, atol=1e-3, rtol=0)
    torch.testing.assert_close(got, want, atol=1e-2, rtol=1.6e-2)
    if bool(want.any()):
        assert float(torch.nn.functional.cosine_similarity(got.double().flatten(), want.double().flatten(), dim=0)) > 0.99999


@pytest.mark.gpu
@pytest.mark.parametrize("batch", BATCHES, ids=str)
def test_on_gpu(batch: LatentBatch) -> None:
    _hold(decode_inputs(batch, torch.Generator().manual_seed(1), torch.device("cuda"), torch.bfloat16))


@pytest.mark.gpu
@pytest.mark.parametrize("q_len", [1, 4])
@pytest.mark.parametrize("place", [0, 63, 64, 127, 128, 151, 152, 153, 10000, 19935, 19968, 19995])
def test_one_key_that_dominates(place: int, q_len: int) -> None:
    # At the first, the last, and at borders of pages and shares: a lost key would pass in a mean over many.
    inputs = decode_inputs(
        _batch("dominant", q_len, (20000,)), torch.Generator().manual_seed(1), torch.device("cuda"), torch.bfloat16
    )
    inputs["q"].fill_(1.0)
    page = int(inputs["page_table"][0, place // 64])
    inputs["kv_cache"][page, place % 64] = (2.0 + torch.arange(576, device="cuda") / 512).to(torch.bfloat16)
    _hold(inputs)


@pytest.mark.gpu
@pytest.mark.parametrize("q_len", [1, 4])
def test_captured_graph_takes_other_lengths(q_len: int) -> None:
    most = (9000, 70, 0, 33)
    inputs = decode_inputs(_batch("graph", q_len, most), torch.Generator().manual_seed(1), torch.device("cuda"), torch.bfloat16)
    made = mla.plan(inputs["page_table"], inputs["seq_lens"], page_size=64, max_seqlen_q=q_len, max_seqlen_k=9000)
    out = torch.full((*inputs["q"].shape[:3], 512), math.nan, dtype=torch.bfloat16, device="cuda")
    changes: dict[str, Any] = {"max_seqlen_k": 9000, "out": out, "plan": made}
    _decode(inputs, "gluon", **changes)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        before = torch.cuda.memory_stats()["allocation.all.allocated"]  # the graph itself allocates, too
        _decode(inputs, "gluon", **changes)
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before, "a captured call allocates nothing"
    for lengths in ((100, 70, 0, 33), (9000, 1, 0, 0), (0, 0, 0, 0), (8999, 70, 0, 33)):
        inputs["q"].copy_(torch.randn_like(inputs["q"]))
        inputs["seq_lens"].copy_(torch.tensor(lengths))
        out.fill_(math.nan)
        graph.replay()
        torch.testing.assert_close(out, _decode(inputs, "reference", max_seqlen_k=9000), atol=1e-2, rtol=1.6e-2)


@pytest.mark.gpu
def test_pages_of_a_pool_of_all_layers() -> None:
    # Pages lie further apart than they are long; where the copy engine cannot go, the portable kernel does it.
    inputs = decode_inputs(_batch("pool", 1, (300, 70)), torch.Generator().manual_seed(1), torch.device("cuda"), torch.bfloat16)
    pages = inputs["kv_cache"].shape[0]
    for pool in (torch.zeros(pages, 3, 64, 576), torch.zeros(pages, 64 * 576 + 8)):
        pool = pool.to("cuda", torch.bfloat16)
        cache = pool[:, 1] if pool.dim() == 4 else pool[:, : 64 * 576].unflatten(1, (64, 576))
        cache.copy_(inputs["kv_cache"])
        _hold({**inputs, "kv_cache": cache})


@pytest.mark.gpu
def test_other_widths_are_refused_by_name() -> None:
    batch = LatentBatch("other", (1,), (30,), num_heads=4, latent_dim=256, rope_dim=64, page_size=64)
    inputs = decode_inputs(batch, torch.Generator().manual_seed(1), torch.device("cuda"), torch.bfloat16)
    with pytest.raises(NoKernelError, match="latent_dim"):
        _decode(inputs, "gluon")
