"""What the latent attention ops refuse and promise, beyond the numbers of the cases."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tokenspeed_kernel import NoKernelError, ShapeError
from tokenspeed_kernel.ops import mla
from tokenspeed_kernel.ops.attention import merge_states
from tokenspeed_kernel.ops.mla.cases import ExpandedBatch, LatentBatch, decode_inputs, expanded_inputs, extend_inputs

CPU = torch.device("cpu")


def _generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture(params=["reference", "cpu", "triton"])
def solution(request: pytest.FixtureRequest) -> str:
    """Every solution that runs on this machine without a GPU."""
    if request.param == "triton":
        pytest.importorskip("triton", reason="needs triton")
        if torch.cuda.is_available():
            pytest.skip("the interpreter is for machines without a GPU")
    return str(request.param)


def test_bad_operands_are_refused() -> None:
    inputs = decode_inputs(LatentBatch("api", (2, 2), (9, 8)), _generator(), CPU)
    q, cache, table, lens = (inputs[name] for name in ("q", "kv_cache", "page_table", "seq_lens"))
    transposed = q.transpose(2, 3).contiguous().transpose(2, 3)
    changes: list[tuple[dict[str, Any], str]] = [
        ({"q": q[0]}, r"q \[num_reqs, q_len, num_heads >= 1, latent_dim \+ rope_dim\], got \[2, 4, 48\] float32"),
        ({"q": q[:, :, :0]}, "num_heads >= 1"),
        ({"q": transposed}, "pass q.contiguous"),
        ({"q": q[..., :40]}, r"kv_cache \[num_pages, page_size >= 1, 40\]"),
        ({"kv_cache": cache[0]}, r"kv_cache \[num_pages, page_size >= 1, 48\]"),
        ({"kv_cache": cache.transpose(1, 2).contiguous().transpose(1, 2)}, "innermost"),
        ({"latent_dim": 48}, "latent_dim from 1 to 47"),
        ({"latent_dim": 0}, "latent_dim from 1 to 47"),
        ({"page_table": table.long()}, r"page_table \[num_reqs, max_pages\] int32"),
        ({"page_table": table[:1]}, r"seq_lens \[1\] int32"),
        ({"seq_lens": lens[:1]}, r"seq_lens \[2\] int32"),
        ({"seq_lens": lens.long()}, r"seq_lens \[2\] int32"),
        ({"max_seqlen_k": 1000}, "max_seqlen_k <= max_pages"),
        ({"seq_lens": torch.tensor([9, 1000], dtype=torch.int32)}, "a column for every page"),
        ({"out": torch.zeros(2, 2, 4, 48)}, r"out \[2, 2, 4, 32\] float32"),
        ({"out": torch.zeros(2, 2, 4, 32).half()}, r"out \[2, 2, 4, 32\] float32"),
    ]
    for change, message in changes:
        with pytest.raises(ShapeError, match=message):
            mla.mla_decode(**{**inputs, **change})
    ragged = extend_inputs(LatentBatch("api", (5, 1), (9, 8)), _generator(), CPU)
    for change, message in (
        ({"q": q}, r"q \[num_tokens, num_heads >= 1"),
        ({"cu_seqlens_q": ragged["cu_seqlens_q"].long()}, r"cu_seqlens_q \[3\] int32"),
        ({"cu_seqlens_q": torch.tensor([0, 5, 5], dtype=torch.int32)}, "cu_seqlens_q rising from 0 to 6"),
        ({"max_seqlen_k": 1000}, "max_seqlen_k <= max_pages"),
        ({"out": torch.zeros(6, 4, 31)}, r"out \[6, 4, 32\]"),
    ):
        with pytest.raises(ShapeError, match=message):
            mla.mla_extend(**{**ragged, **change})
    expanded = expanded_inputs(ExpandedBatch("api", (5, 1), (9, 8), 4, 2), _generator(), CPU)
    k, v = expanded["k"], expanded["v"]
    for change, message in (
        ({"q": expanded["q"][0]}, r"q \[num_tokens, num_heads, head_dim\]"),
        ({"q": expanded["q"][:, :3]}, "a number of heads that divides 3"),
        ({"k": k[..., :20]}, r"k \[num_keys, num_kv_heads, 24\]"),
        ({"v": v[:-1]}, r"v \[17, 2, v_head_dim\] float32"),
        ({"v": v.half()}, r"v \[17, 2, v_head_dim\] float32"),
        ({"v": v.transpose(1, 2).contiguous().transpose(1, 2)}, "pass v.contiguous"),
        ({"cu_seqlens_k": expanded["cu_seqlens_k"][:2]}, r"cu_seqlens_k \[3\] int32"),
        ({"out": torch.zeros(6, 4, 24)}, r"out \[6, 4, 16\]"),
    ):
        with pytest.raises(ShapeError, match=message):
            mla.mla_prefill(**{**expanded, **change})
    latent, rope, slots = torch.zeros(3, 32), torch.zeros(3, 16), torch.zeros(3, dtype=torch.int64)
    for arguments, message in (
        ((latent[0], rope, cache, slots), r"latent \[num_tokens, latent_dim\]"),
        ((latent, rope[:2], cache, slots), r"rope \[3, rope_dim\] float32"),
        ((latent, rope.half(), cache, slots), r"rope \[3, rope_dim\] float32"),
        ((latent, rope[:, :4], cache, slots), r"kv_cache \[num_pages, page_size, 36\]"),
        ((latent, rope, cache, slots.int()), r"slot_mapping \[3\] int64"),
        ((latent, rope, cache, slots[:2]), r"slot_mapping \[3\] int64"),
    ):
        with pytest.raises(ShapeError, match=message):
            mla.write_mla_cache(*arguments)


def test_unsupported_dtype_is_explained() -> None:
    inputs = decode_inputs(LatentBatch("api", (1,), (9,)), _generator(), CPU)
    inputs["q"], inputs["kv_cache"] = inputs["q"].to(torch.int8), inputs["kv_cache"].to(torch.int8)
    with pytest.raises(NoKernelError, match="cpu_mla_decode: q in"):
        mla.mla_decode(**inputs)


def test_a_plan_serves_all_layers_and_no_other_batch(solution: str) -> None:
    batch = LatentBatch("plan", (2, 2), (40, 3))
    inputs = decode_inputs(batch, _generator(), CPU)
    sizes = {"page_size": 4, "max_seqlen_q": 2, "max_seqlen_k": 40}
    made = mla.plan(inputs["page_table"], inputs["seq_lens"], **sizes)
    for factor in (1.0, 0.5):  # another layer: other queries and rows on the same pages
        layer = {**inputs, "q": inputs["q"] * factor, "kv_cache": inputs["kv_cache"] * factor}
        want = mla.mla_decode(**layer, solution="reference")
        torch.testing.assert_close(mla.mla_decode(**layer, plan=made, solution=solution), want, rtol=1e-5, atol=1e-5)
    with pytest.raises(ShapeError, match="plan of this batch"):
        mla.mla_decode(**{**inputs, "seq_lens": inputs["seq_lens"].clone()}, plan=made, solution=solution)
    ragged = extend_inputs(batch, _generator(), CPU)
    with pytest.raises(ShapeError, match="plan of this batch"):
        mla.mla_extend(**ragged, plan=made, solution=solution)
    made = mla.plan(ragged["page_table"], ragged["seq_lens"], ragged["cu_seqlens_q"], **sizes)
    want = mla.mla_extend(**ragged, solution="reference")
    torch.testing.assert_close(mla.mla_extend(**ragged, plan=made, solution=solution), want, rtol=1e-5, atol=1e-5)


def test_logits_of_minus_60000_count(solution: str) -> None:
    # Report K1: -6e4 is a logit like any other, not a mask.
    cache = torch.full((1, 4, 17), math.nan)
    cache[0, :2] = 0.0
    cache[0, 0, 0], cache[0, 1, 0], cache[0, :2, 16] = 1.0, 3.0, 1.0
    q = torch.zeros((1, 1, 2, 17))
    q[..., 16] = -6e4
    table, lens = torch.zeros((1, 1), dtype=torch.int32), torch.tensor([2], dtype=torch.int32)
    sizes = {"max_seqlen_k": 2, "softmax_scale": 1.0, "latent_dim": 16}
    out, lse = mla.mla_decode(q, cache, table, lens, **sizes, return_lse=True, solution=solution)
    assert torch.equal(out[0, 0, :, 0], torch.full((2,), 2.0))
    torch.testing.assert_close(lse, torch.full_like(lse, -6e4 + math.log(2)), rtol=1e-6, atol=0)


def test_rows_without_keys_are_zero_and_minus_infinity(solution: str) -> None:
    # Report K1: more queries than keys under a causal mask, and a request without keys.
    empty = torch.tensor([True] * 4 + [False] * 2 + [True] * 3)
    latent = extend_inputs(LatentBatch("k1", (6, 3), (2, 0)), _generator(), CPU)
    expanded = expanded_inputs(ExpandedBatch("k1", (6, 3), (2, 0)), _generator(), CPU)
    for op, inputs in ((mla.mla_extend, latent), (mla.mla_prefill, expanded)):
        out, lse = op(**inputs, return_lse=True, solution=solution)  # type: ignore[operator]
        assert torch.equal(out[empty], torch.zeros_like(out[empty]))
        assert bool((lse[empty] == -math.inf).all())
        assert bool(out[~empty].isfinite().all() & lse[~empty].isfinite().all())
    missing = decode_inputs(LatentBatch("missing", (2,), (7,), missing_pages=((0, 0), (0, 1))), _generator(), CPU)
    out, lse = mla.mla_decode(**missing, return_lse=True, solution=solution)
    assert not out.any() and bool((lse == -math.inf).all())


def test_decode_is_extend_with_equal_queries(solution: str) -> None:
    batch = LatentBatch("both", (3, 3), (40, 11))
    ragged, uniform = extend_inputs(batch, _generator(), CPU), decode_inputs(batch, _generator(), CPU)
    out, lse = mla.mla_decode(**uniform, return_lse=True, solution=solution)
    want, want_lse = mla.mla_extend(**ragged, return_lse=True, solution="reference")
    torch.testing.assert_close(out.flatten(0, 1), want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse.flatten(0, 1), want_lse, rtol=1e-5, atol=1e-5)


def test_latent_rows_and_expanded_keys_give_the_same_attention(solution: str) -> None:
    # The reason for the two forms: a projection of the keys may as well be applied to the queries, one of the values to the output.
    generator, heads, latent_dim, rope_dim, nope_dim, v_dim, length, queries = _generator(3), 3, 32, 8, 16, 12, 21, 5
    latent, rope = (torch.randn((length, dim), generator=generator) for dim in (latent_dim, rope_dim))
    up_k, up_v = (torch.randn((heads, latent_dim, dim), generator=generator) / latent_dim**0.5 for dim in (nope_dim, v_dim))
    q_nope, q_rope = (torch.randn((queries, heads, dim), generator=generator) for dim in (nope_dim, rope_dim))
    scale = (nope_dim + rope_dim) ** -0.5
    cache = torch.full((7, 4, latent_dim + rope_dim), math.nan)
    table = torch.tensor([[5, 0, 3, 1, 6, 2]], dtype=torch.int32)
    positions = torch.arange(length)
    slots = table[0, positions // 4].long() * 4 + positions % 4
    mla.write_mla_cache(latent, rope, cache, slots, solution=solution)
    absorbed = torch.cat((torch.einsum("thn,hln->thl", q_nope, up_k), q_rope), dim=-1)
    attended = mla.mla_extend(
        absorbed,
        cache,
        table,
        torch.tensor([0, queries], dtype=torch.int32),
        torch.tensor([length], dtype=torch.int32),
        max_seqlen_q=queries,
        max_seqlen_k=length,
        softmax_scale=scale,
        latent_dim=latent_dim,
        solution=solution,
    )
    keys = torch.cat((torch.einsum("sl,hln->shn", latent, up_k), rope[:, None].expand(-1, heads, -1)), dim=-1)
    values = torch.einsum("sl,hlv->shv", latent, up_v)
    offsets = [torch.tensor([0, size], dtype=torch.int32) for size in (queries, length)]
    want = mla.mla_prefill(
        torch.cat((q_nope, q_rope), dim=-1),
        keys,
        values,
        *offsets,
        max_seqlen_q=queries,
        max_seqlen_k=length,
        softmax_scale=scale,
        solution=solution,
    )
    torch.testing.assert_close(torch.einsum("thl,hlv->thv", attended, up_v), want, rtol=1e-4, atol=1e-5)


def test_a_cached_prompt_is_attended_in_parts(solution: str) -> None:
    # Ragged keys of the whole prompt at once, and cached part, own part, merged.
    whole = expanded_inputs(ExpandedBatch("whole", (6, 3), (20, 3)), _generator(4), CPU)
    want = mla.mla_prefill(**whole, return_lse=True, solution="reference")
    k, v = whole["k"], whole["v"]
    cached = {**whole, "k": k[:14], "v": v[:14], "cu_seqlens_k": torch.tensor([0, 14, 14], dtype=torch.int32), "causal": False}
    own = {**whole, "k": k[14:], "v": v[14:], "cu_seqlens_k": torch.tensor([0, 6, 9], dtype=torch.int32)}
    parts = [mla.mla_prefill(**part, return_lse=True, solution=solution) for part in (cached, own)]
    merged = merge_states([out for out, _ in parts], [lse for _, lse in parts], solution=solution)
    for got, truth in zip(merged, want, strict=True):
        torch.testing.assert_close(got, truth, rtol=1e-5, atol=1e-5)


def test_rows_beyond_2_31_elements(solution: str, tmp_path: Path) -> None:
    # Report K3, in a sparse file: page 8 lies 2**31 elements behind page 0, and only the page that is used takes memory.
    page_elements, num_pages, page_size, width = 2**28, 9, 4, 24
    path = tmp_path / "pool"
    storage = torch.from_file(str(path), shared=True, size=(num_pages - 1) * page_elements + page_size * width, dtype=torch.float32)
    cache = storage.as_strided((num_pages, page_size, width), (page_elements, width, 1))
    assert cache.stride(0) * 8 == 2**31
    generator = _generator(5)
    rows = torch.randn((4, width), generator=generator)
    mla.write_mla_cache(rows[:, :16], rows[:, 16:], cache, torch.arange(32, 36), solution=solution)
    assert torch.equal(cache[8].clone(), rows)
    q = torch.randn((1, 1, 2, width), generator=generator)
    table, lens = torch.tensor([[8]], dtype=torch.int32), torch.tensor([4], dtype=torch.int32)
    options = {"max_seqlen_k": 4, "softmax_scale": 0.3, "latent_dim": 16}
    near = rows.view(1, 4, width)
    want = mla.mla_decode(q, near, torch.zeros_like(table), lens, **options, solution="reference")
    got = mla.mla_decode(q, cache, table, lens, **options, solution=solution)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    offsets = torch.tensor([0, 1], dtype=torch.int32)
    got = mla.mla_extend(q[0], cache, table, offsets, lens, max_seqlen_q=1, **options, solution=solution)
    torch.testing.assert_close(got, want[0], rtol=1e-5, atol=1e-5)
    # Expanded keys whose second row lies as far behind the first.
    far = storage.as_strided((2, 1, width), (2**31, width, 1))
    far[0] = rows[0]
    keys = torch.tensor([0, 2], dtype=torch.int32)
    sizes = {"max_seqlen_q": 1, "max_seqlen_k": 2}
    want = mla.mla_prefill(q[0], far.clone(memory_format=torch.contiguous_format), near[0, :2, None], offsets, keys, **sizes)
    got = mla.mla_prefill(q[0], far, near[0, :2, None], offsets, keys, **sizes, solution=solution)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert path.stat().st_blocks * 512 < 1 << 20
