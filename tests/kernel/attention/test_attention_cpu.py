"""The CPU kernels against the reference, over every case, with poisoned caches and outputs."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from tokenspeed_kernel.ops import attention
from tokenspeed_kernel.ops.attention import cases

OPS = {
    "mha_decode": (attention.mha_decode, cases.DECODE_BATCHES, cases.decode_inputs),
    "mha_extend": (attention.mha_extend, cases.EXTEND_BATCHES, cases.paged_inputs),
    "mha_prefill": (attention.mha_prefill, cases.PREFILL_BATCHES, cases.ragged_inputs),
}
ALL = [(name, case) for name, (_, group, _) in OPS.items() for case in group]
IDS = [f"{name}-{case}" for name, case in ALL]


def check(name: str, inputs: dict[str, Any], tolerance: float, **given: Any) -> None:
    """Compare output and LSE of the CPU kernel with the reference's."""
    op = OPS[name][0]
    expected, expected_lse = op(**inputs, return_lse=True, solution="reference")
    out, lse = op(**inputs, return_lse=True, solution="cpu", **given)
    assert out.shape == inputs["q"].shape
    assert out.dtype == inputs["q"].dtype
    assert lse.dtype == torch.float32
    torch.testing.assert_close(out.double(), expected.double(), atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(lse, expected_lse, atol=max(tolerance, 1e-5), rtol=1e-5)
    alone = op(**inputs, solution="cpu", **given)
    # Without the LSE another path may be taken.
    torch.testing.assert_close(alone.double(), expected.double(), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", list(cases.TOLERANCES), ids=str)
@pytest.mark.parametrize(("name", "case"), ALL, ids=IDS)
def test_matches_reference(name: str, case: cases.Batch, dtype: torch.dtype) -> None:
    check(name, OPS[name][2](case, dtype=dtype), cases.TOLERANCES[dtype])


@pytest.mark.parametrize(("name", "case"), [pair for pair in ALL if pair[0] != "mha_prefill"])
def test_with_a_plan_shared_by_layers(name: str, case: cases.Batch) -> None:
    first, second = (OPS[name][2](case, seed=seed) for seed in (0, 1))
    made = attention.plan(
        first["page_table"],
        first["seq_lens"],
        first.get("cu_seqlens_q"),
        page_size=case.page_size,
        max_seqlen_q=max([1, *case.query_lens]),
        max_seqlen_k=first["max_seqlen_k"],
    )
    check(name, first, 2e-5, plan=made)
    # Another layer: other keys and queries over the same pages.
    for operand in ("q", "k_cache", "v_cache"):
        first[operand] = (first[operand].float() * 0.5).to(first[operand].dtype)  # fp8 has no product of its own
    check(name, first, 2e-5, plan=made)
    if case.query_lens:
        with pytest.raises(attention_error(), match="plan of this batch"):
            check(name, second, 2e-5, plan=made)


def attention_error() -> type[Exception]:
    from tokenspeed_kernel import ShapeError

    return ShapeError


@pytest.mark.parametrize(("name", "case"), ALL, ids=IDS)
def test_writes_every_row_of_a_poisoned_output(name: str, case: cases.Batch) -> None:
    inputs = OPS[name][2](case)
    out = torch.full_like(inputs["q"], math.nan)
    check(name, inputs, 2e-5, out=out)
    assert OPS[name][0](**inputs, out=out).data_ptr() == out.data_ptr()
    half = torch.full_like(inputs["q"], math.nan).repeat(1, 1, 2)[..., : case.head_dim]
    check(name, inputs, 2e-5, out=half)


@pytest.mark.parametrize(("name", "case"), [pair for pair in ALL if pair[1].name in ("mixed", "unequal_lengths", "window")])
def test_strided_operands(name: str, case: cases.Batch) -> None:
    inputs = OPS[name][2](case)
    q = inputs["q"]
    wide = torch.full((q.shape[0], q.shape[1] + 3, q.shape[2]), math.nan)
    wide[:, 1:-2] = q
    inputs["q"] = wide[:, 1:-2]
    for operand in ("k_cache", "v_cache", "k", "v"):
        if operand in inputs:
            values = inputs[operand]
            pool = torch.full((values.shape[0], 2, *values.shape[1:]), math.nan)
            pool[:, 1] = values
            inputs[operand] = pool[:, 1]
    check(name, inputs, 2e-5)


def test_rows_do_not_depend_on_the_batch() -> None:
    case = cases.Batch("batch", (1,) * 24, tuple(range(3, 400, 17)), 9, 3, 64, 16)
    inputs = cases.decode_inputs(case)
    together = attention.mha_decode(**inputs)
    for row in range(24):
        one = dict(inputs, q=inputs["q"][row : row + 1])
        one["page_table"], one["seq_lens"] = inputs["page_table"][row : row + 1], inputs["seq_lens"][row : row + 1]
        torch.testing.assert_close(attention.mha_decode(**one)[0], together[row], atol=2e-6, rtol=2e-6)


def test_chunks_give_what_one_pass_gives() -> None:
    case = cases.Batch("whole", (200,), (200,), 9, 3, 64, 16)
    inputs = cases.paged_inputs(case)
    whole = attention.mha_extend(**inputs)
    for chunk in (7, 64, 199):
        for start in range(0, 200, chunk):
            stop = min(200, start + chunk)
            part = dict(inputs, q=inputs["q"][start:stop], max_seqlen_q=stop - start, max_seqlen_k=stop)
            part["cu_seqlens_q"] = torch.tensor([0, stop - start], dtype=torch.int32)
            part["seq_lens"] = torch.tensor([stop], dtype=torch.int32)
            torch.testing.assert_close(attention.mha_extend(**part), whole[start:stop], atol=5e-6, rtol=5e-6)


@pytest.mark.parametrize("name", list(OPS))
def test_scratch_memory_made_in_inference_mode_serves_later_calls(name: str) -> None:
    """An engine runs in inference mode; whoever calls the op next in the same thread may not."""

    def first_in_inference_mode_then_not() -> None:
        for case in OPS[name][1][:6]:
            inputs = OPS[name][2](case)
            with torch.inference_mode():
                check(name, inputs, 2e-5)
            check(name, inputs, 2e-5)

    with ThreadPoolExecutor(1) as pool:  # scratch memory is a thread's own: this one has none yet
        pool.submit(first_in_inference_mode_then_not).result()
