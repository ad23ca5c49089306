"""What the public attention ops refuse, explain and promise, beyond the numbers of the cases."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tokenspeed_kernel import NoKernelError, ShapeError
from tokenspeed_kernel.ops import attention
from tokenspeed_kernel.ops.attention import cases

CASE = cases.Batch("api", (5, 1), (9, 8))


def test_bad_operands_are_refused() -> None:
    inputs = cases.paged_inputs(CASE)
    q, k_cache, table = inputs["q"], inputs["k_cache"], inputs["page_table"]
    changes: list[tuple[dict[str, Any], str]] = [
        ({"q": q[0]}, r"q \[num_tokens, num_heads, head_dim\], got \[4, 16\] float32"),
        ({"q": q[:, :3]}, "a number of heads that divides 3"),
        ({"q": q[..., :8]}, "keys with head_dim=8"),
        ({"q": q.transpose(1, 2).contiguous().transpose(1, 2)}, "pass q.contiguous"),
        ({"k_cache": k_cache[0], "v_cache": k_cache[0]}, r"k_cache \[num_pages, page_size"),
        ({"v_cache": inputs["v_cache"].half()}, "v like k"),
        ({"page_table": table.long()}, r"page_table \[num_reqs, max_pages\] int32"),
        ({"seq_lens": inputs["seq_lens"][:1]}, r"seq_lens \[2\] int32"),
        ({"cu_seqlens_q": inputs["cu_seqlens_q"].long()}, r"cu_seqlens_q \[3\] int32"),
        ({"max_seqlen_k": 1000}, "max_seqlen_k <= max_pages"),
        ({"sliding_window": 0}, "sliding_window >= 1"),
        ({"sliding_window": 4, "causal": False}, "with causal=True"),
        ({"logit_cap": 0.0}, "logit_cap > 0"),
        ({"logit_cap": math.nan}, "logit_cap > 0"),
        ({"sinks": torch.zeros(3)}, r"sinks \[4\]"),
        ({"out": torch.zeros(6, 4, 15)}, "out like q"),
        ({"cu_seqlens_q": torch.tensor([0, 5, 5], dtype=torch.int32)}, r"cu_seqlens_q rising from 0 to 6, got \[0, 5, 5\]"),
        ({"seq_lens": torch.tensor([9, 1000], dtype=torch.int32)}, "a column for every page"),
    ]
    for change, message in changes:
        with pytest.raises(ShapeError, match=message):
            attention.mha_extend(**{**inputs, **change})
    ragged = cases.ragged_inputs(CASE)
    for change, message in (
        ({"k": ragged["k"][:, 0], "v": ragged["v"][:, 0]}, r"k \[num_keys, num_kv_heads, head_dim\], got \[17, 16\]"),
        ({"cu_seqlens_k": torch.tensor([0, 9, 16], dtype=torch.int32)}, "cu_seqlens_k rising from 0 to 17"),
        ({"cu_seqlens_k": ragged["cu_seqlens_k"][:2]}, r"cu_seqlens_k \[3\] int32"),
    ):
        with pytest.raises(ShapeError, match=message):
            attention.mha_prefill(**{**ragged, **change})


def test_plan_refuses_what_the_op_would() -> None:
    table, lens = torch.zeros((2, 3), dtype=torch.int32), torch.ones(2, dtype=torch.int32)
    for arguments, options, message in (
        ((table.long(), lens), {"page_size": 4, "max_seqlen_k": 4}, "page_table"),
        ((table, lens[:1]), {"page_size": 4, "max_seqlen_k": 4}, r"seq_lens \[2\]"),
        ((table, lens, lens), {"page_size": 4, "max_seqlen_k": 4}, r"cu_seqlens_q \[3\]"),
        ((table, lens), {"page_size": 4, "max_seqlen_k": 13}, "max_pages \\* page_size = 12"),
    ):
        with pytest.raises(ShapeError, match=message):
            attention.plan(*arguments, **options)


def test_unsupported_dtype_is_explained() -> None:
    inputs = cases.decode_inputs(cases.DECODE_BATCHES[0])
    for name in ("q", "k_cache", "v_cache"):
        inputs[name] = inputs[name].to(torch.int8)
    with pytest.raises(NoKernelError, match="cpu_mha_decode"):
        attention.mha_decode(**inputs)


@pytest.mark.parametrize("solution", ["reference", "cpu"])
def test_window_of_4096_over_5000_keys(solution: str) -> None:
    # Report Z13: the keys seen are 904..4999. Key i has logit 0 and a value that is 1 only there: the mean tells which were seen.
    seq_len, window = 5000, 4096
    case = cases.Batch("z13", (1,), (seq_len,), 1, 1, 16, 64, sliding_window=window, consecutive=True)
    inputs = cases.decode_inputs(case, dtype=torch.float64, poison=False)
    inputs["q"].zero_()
    values = inputs["v_cache"].flatten(0, 1)
    values.zero_()
    first = int(inputs["page_table"][0, 0]) * 64
    for position, weight in ((903, 1000.0), (904, 1.0), (4999, 10.0)):
        values[first + position] = weight
    out, lse = attention.mha_decode(**inputs, return_lse=True, solution=solution)
    assert float(out[0, 0, 0]) == pytest.approx(11 / 4096, rel=1e-12)
    assert float(lse[0, 0]) == pytest.approx(math.log(4096), rel=1e-6)


@pytest.mark.parametrize("solution", ["reference", "cpu"])
def test_large_negative_logits_count(solution: str) -> None:
    # Report K1: -6e4 is a logit like any other, not a mask.
    inputs = cases.decode_inputs(cases.Batch("low", (1,), (2,), 1, 1, 16, 4), poison=True)
    inputs["q"].fill_(-6e4 / 16)
    keys = inputs["k_cache"][int(inputs["page_table"][0, 0])]
    keys[:2] = 1.0
    inputs["softmax_scale"] = 1.0
    values = inputs["v_cache"][int(inputs["page_table"][0, 0])]
    values[0], values[1] = 1.0, 3.0
    out, lse = attention.mha_decode(**inputs, return_lse=True, solution=solution)
    torch.testing.assert_close(out, torch.full_like(out, 2.0))
    assert float(lse[0, 0]) == pytest.approx(-6e4 + math.log(2), rel=1e-6)


@pytest.mark.parametrize("solution", ["reference", "cpu", "triton"])
def test_rows_without_keys_are_zero_and_minus_infinity(solution: str) -> None:
    # Report K1: more queries than keys under a causal mask, and a request without keys.
    if solution == "triton":
        pytest.importorskip("triton", reason="needs triton")
        if torch.cuda.is_available():
            pytest.skip("the interpreter is for machines without a GPU")
    empty = torch.tensor([True] * 4 + [False] * 2 + [True] * 3)
    batch = cases.Batch("k1", (6, 3), (2, 0))
    for op, inputs in (("mha_prefill", cases.ragged_inputs(batch)), ("mha_extend", cases.paged_inputs(batch))):
        out, lse = getattr(attention, op)(**inputs, return_lse=True, solution=solution)
        assert torch.equal(out[empty], torch.zeros_like(out[empty])), op
        assert bool((lse[empty] == -math.inf).all()), op
        assert bool(out[~empty].isfinite().all() & lse[~empty].isfinite().all()), op


@pytest.mark.parametrize("solution", ["reference", "cpu"])
def test_partial_states_merge_by_their_lse(solution: str) -> None:
    # The sink is given to one part only; parts without keys (K1) weigh nothing and bring no NaN.
    case = cases.Batch("merge", (1, 1), (24, 24), sinks=True)
    inputs = cases.decode_inputs(case, dtype=torch.float64)
    whole, whole_lse = attention.mha_decode(**inputs, return_lse=True, solution=solution)
    table = inputs["page_table"]
    parts = []
    for columns, length in (((0, 2), 8), ((2, 6), 16), ((0, 1), 0)):
        part = dict(inputs, page_table=table[:, slice(*columns)].contiguous(), max_seqlen_k=length)
        part["seq_lens"] = torch.full((2,), length, dtype=torch.int32)
        part["sinks"] = inputs["sinks"] if length == 8 else None
        parts.append(attention.mha_decode(**part, return_lse=True, solution=solution))
    assert torch.equal(parts[2][0], torch.zeros_like(whole))
    assert bool((parts[2][1] == -math.inf).all())
    lse = torch.logsumexp(torch.stack([lse for _, lse in parts]).double(), dim=0)
    merged = sum(out * (part_lse.double() - lse).exp()[..., None] for out, part_lse in parts)
    torch.testing.assert_close(merged, whole, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(lse, whole_lse.double(), atol=1e-5, rtol=1e-5)


def test_library_ops() -> None:
    options = (None, None, None, None)
    paged, decode, ragged = (
        cases.paged_inputs(CASE, poison=False),
        cases.decode_inputs(cases.DECODE_BATCHES[3], poison=False),
        cases.ragged_inputs(CASE),
    )
    calls = {
        "mha_extend": (*list(paged.values())[:8], None, True, *options[1:], True, None),
        "mha_decode": (*list(decode.values())[:6], *options, True, None),
        "mha_prefill": (*list(ragged.values())[:7], None, True, *options[1:], False, None),
    }
    for name, arguments in calls.items():
        torch.library.opcheck(getattr(torch.ops.tokenspeed, name).default, arguments)


def test_exported_op_gives_the_eager_result() -> None:
    inputs = cases.decode_inputs(cases.DECODE_BATCHES[3], poison=False)
    tensors = tuple(list(inputs.values())[:5])

    class Decode(torch.nn.Module):
        def forward(self, *operands: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return attention.mha_decode(*operands, max_seqlen_k=64, return_lse=True)

    exported = torch.export.export(Decode(), tensors).module()
    expected = attention.mha_decode(*tensors, max_seqlen_k=64, return_lse=True)
    for got, want in zip(exported(*tensors), expected, strict=True):
        assert torch.equal(got, want)


def test_a_plan_of_other_queries_is_refused() -> None:
    inputs = cases.paged_inputs(CASE)
    sizes = {"page_size": CASE.page_size, "max_seqlen_q": 5, "max_seqlen_k": 9}
    made = attention.plan(inputs["page_table"], inputs["seq_lens"], inputs["cu_seqlens_q"], **sizes)
    attention.mha_extend(**inputs, plan=made)
    other = torch.tensor([0, 4, 6], dtype=torch.int32)
    with pytest.raises(ShapeError, match="plan of this batch"):
        attention.mha_extend(**{**inputs, "cu_seqlens_q": other}, plan=made)
    of_six = attention.plan(inputs["page_table"], inputs["seq_lens"], inputs["cu_seqlens_q"], **sizes)
    attention.mha_extend(**inputs, plan=of_six, solution="cpu")
    with pytest.raises(ShapeError, match="6 rows, got q with 4 rows"):
        attention.mha_extend(**{**inputs, "q": inputs["q"][:4]}, plan=of_six, solution="cpu")
    without = attention.plan(inputs["page_table"], inputs["seq_lens"], **sizes)
    with pytest.raises(ShapeError, match="plan of this batch"):
        attention.mha_extend(**inputs, plan=without)
