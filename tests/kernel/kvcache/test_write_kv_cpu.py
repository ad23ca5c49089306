"""The CPU cache write against the reference: exact, and nothing but the named slots changes."""

from __future__ import annotations

import pytest
import torch

from tokenspeed_kernel import ShapeError
from tokenspeed_kernel.ops.kvcache import cases, write_kv


@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("case", cases.SHAPES, ids=str)
def test_matches_reference(case: cases.Shape, cache_dtype: torch.dtype) -> None:
    ours, reference = (cases.inputs(case, cache_dtype=cache_dtype) for _ in range(2))
    before = ours["k_cache"].clone()
    assert write_kv(**ours) is None
    write_kv(**reference, solution="reference")
    for cache in ("k_cache", "v_cache"):
        assert torch.equal(ours[cache], reference[cache])
    inside = {slot for slot in ours["slot_mapping"].tolist() if 0 <= slot < case.num_pages * case.page_size}
    kept = [slot for slot in range(case.num_pages * case.page_size) if slot not in inside]
    assert torch.equal(ours["k_cache"].flatten(0, 1)[kept], before.flatten(0, 1)[kept])


def test_interleaved_pool() -> None:
    # Keys and values of a page side by side in one pool: the pages of each are not evenly spaced.
    inputs = cases.inputs(cases.SHAPES[4])
    expected = cases.inputs(cases.SHAPES[4])
    write_kv(**expected, solution="reference")
    pool = torch.stack((inputs["k_cache"], inputs["v_cache"]), dim=1).contiguous()
    inputs["k_cache"], inputs["v_cache"] = pool[:, 0], pool[:, 1]
    write_kv(**inputs)
    assert torch.equal(pool[:, 0], expected["k_cache"])
    assert torch.equal(pool[:, 1], expected["v_cache"])


def test_bad_operands_are_refused() -> None:
    inputs = cases.inputs(cases.Shape("bad", 5))
    for change, message in (
        ({"k": inputs["k"][0]}, r"k \[num_tokens, num_kv_heads, head_dim\]"),
        ({"v": inputs["v"][:4]}, r"v like k, \[5, 2, 16\] float32"),
        ({"k_cache": inputs["k_cache"][..., :8]}, r"k_cache \[num_pages, page_size, 2, 16\]"),
        ({"v_cache": inputs["v_cache"].half()}, "v_cache like k_cache"),
        ({"slot_mapping": inputs["slot_mapping"].int()}, r"slot_mapping \[5\] int64, got \[5\] int32"),
    ):
        with pytest.raises(ShapeError, match=message):
            write_kv(**{**inputs, **change})


def test_library_op() -> None:
    inputs = cases.inputs(cases.SHAPES[3])
    arguments = tuple(inputs[name] for name in ("k", "v", "k_cache", "v_cache", "slot_mapping"))
    torch.library.opcheck(torch.ops.tokenspeed.write_kv.default, (*arguments, None))
