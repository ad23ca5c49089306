"""Merging of attention states: public report K1, and what the op promises beyond the cases."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tokenspeed_kernel import NoKernelError, ShapeError
from tokenspeed_kernel.ops.attention import merge_states, mha_prefill
from tokenspeed_kernel.ops.attention.merge_cases import MERGE_CASES
from tokenspeed_kernel.testing import check_case

SMALL = [case for case in MERGE_CASES if not case.bench]
CPU = torch.device("cpu")
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for machines without a GPU")


@pytest.fixture(params=["reference", "cpu", "triton"])
def solution(request: pytest.FixtureRequest) -> str:
    """Every solution that runs on this machine without a GPU."""
    if request.param == "triton":
        pytest.importorskip("triton", reason="needs triton")
        if torch.cuda.is_available():
            pytest.skip("the interpreter is for machines without a GPU")
    return str(request.param)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", SMALL, ids=str)
def test_cpu(case: Any, dtype: torch.dtype) -> None:
    check_case(case, solution="cpu", device=CPU, dtype=dtype)


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", SMALL, ids=str)
def test_interpreted(case: Any, dtype: torch.dtype) -> None:
    pytest.importorskip("triton", reason="needs triton")
    check_case(case, solution="triton", device=CPU, dtype=dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", MERGE_CASES, ids=str)
def test_on_gpu(case: Any, dtype: torch.dtype) -> None:
    check_case(case, solution="triton", device=torch.device("cuda"), dtype=dtype)


def test_empty_states(solution: str) -> None:
    # Report K1: exp(-inf - -inf) is NaN in the plain formula.
    generator = torch.Generator().manual_seed(0)
    value, log = torch.randn((3, 2, 16), generator=generator), torch.randn((3, 2), generator=generator)
    nothing, never = torch.zeros_like(value), torch.full_like(log, -math.inf)
    for outs, lses, want, want_lse in (
        ([nothing, nothing], [never, never], nothing, never),
        ([nothing] * 3, [never] * 3, nothing, never),
        ([value, nothing], [log, never], value, log),
        ([nothing, value], [never, log], value, log),
        ([nothing, value, nothing], [never, log, never], value, log),
        ([value, torch.full_like(value, math.nan)], [log, never], value, log),
    ):
        got, got_lse = merge_states(outs, lses, solution=solution)
        assert torch.equal(got, want)
        assert torch.equal(got_lse, want_lse)


def test_a_single_state_is_returned_bit_for_bit(solution: str) -> None:
    generator = torch.Generator().manual_seed(1)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        value, log = torch.randn((50, 4, 24), generator=generator).to(dtype), torch.randn((50, 4), generator=generator) * 100
        got, lse = merge_states([value, value], [log, torch.full_like(log, -math.inf)], solution=solution)
        assert torch.equal(got, value)
        assert torch.equal(lse, log)


def test_logits_of_minus_60000_count(solution: str) -> None:
    # Report K1: -6e4 is a logit like any other, not a sentinel.
    one, three = torch.full((1, 1, 16), 1.0), torch.full((1, 1, 16), 3.0)
    low = torch.full((1, 1), -6e4)
    out, lse = merge_states([one, three], [low, low], solution=solution)
    torch.testing.assert_close(out, torch.full_like(out, 2.0))
    assert float(lse) == pytest.approx(-6e4 + math.log(2), rel=1e-6)
    out, lse = merge_states([one, three], [low, torch.full((1, 1), -math.inf)], solution=solution)
    assert torch.equal(out, one) and torch.equal(lse, low)


def test_parts_of_the_keys_merge_into_the_whole(solution: str) -> None:
    generator = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn((rows, 2, 16), generator=generator) for rows in (4, 30, 30))

    def attend(first: int, last: int) -> tuple[torch.Tensor, torch.Tensor]:
        cu_q, cu_k = torch.tensor([0, 4], dtype=torch.int32), torch.tensor([0, last - first], dtype=torch.int32)
        sizes = {"max_seqlen_q": 4, "max_seqlen_k": last - first}
        keys = (k[first:last], v[first:last])
        return mha_prefill(q, *keys, cu_q, cu_k, **sizes, causal=False, return_lse=True, solution="reference")

    parts = [attend(*bounds) for bounds in ((0, 7), (7, 7), (7, 8), (8, 30))]
    merged = merge_states([out for out, _ in parts], [lse for _, lse in parts], solution=solution)
    for got, want in zip(merged, attend(0, 30), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_may_be_merged_in_place(solution: str) -> None:
    inputs = SMALL[3].build(torch.Generator().manual_seed(3), CPU, torch.float32)
    want = merge_states(**inputs, solution="reference")
    outs, lses = inputs["outs"], inputs["lses"]
    got = merge_states(outs, lses, out=outs[1], lse_out=lses[0], solution=solution)
    assert got[0] is outs[1] and got[1] is lses[0]
    for mine, truth in zip(got, want, strict=True):
        torch.testing.assert_close(mine, truth, rtol=1e-5, atol=1e-5)


def test_rows_beyond_2_31_elements(solution: str, tmp_path: Path) -> None:
    # Report K3: the second token's row lies 2**31 elements behind the first, in a sparse file.
    step = 2**31
    storage = torch.from_file(str(tmp_path / "states"), shared=True, size=step + 64, dtype=torch.float32)
    far = storage.as_strided((2, 1, 16), (step, 16, 1))
    far.copy_(torch.randn((2, 1, 16), generator=torch.Generator().manual_seed(4)))
    near, lse = far.clone(memory_format=torch.contiguous_format), torch.zeros((2, 1))
    want, _ = merge_states([near, -3 * near], [lse, lse], solution="reference")
    got, _ = merge_states([far, -3 * near], [lse, lse], solution=solution)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
    merge_states([near, -3 * near], [lse, lse], out=far, solution=solution)
    torch.testing.assert_close(far.clone(memory_format=torch.contiguous_format), want, rtol=1e-6, atol=1e-6)
    assert (tmp_path / "states").stat().st_blocks * 512 < 1 << 20


def test_what_is_refused() -> None:
    out, lse = torch.zeros((3, 2, 16)), torch.zeros((3, 2))
    for arguments, options, message in (
        (([], []), {}, "at least one state"),
        (([out], [lse, lse]), {}, "one LSE for each output, got 1 outputs and 2 LSEs"),
        (([out[0]], [lse]), {}, r"outs\[0\] \[num_tokens, num_heads, head_dim\], got \[2, 16\]"),
        (([out, out[:2]], [lse, lse]), {}, r"every output \[3, 2, 16\] float32"),
        (([out, out.half()], [lse, lse]), {}, "every output"),
        (([out, out.transpose(1, 2).contiguous().transpose(1, 2)], [lse, lse]), {}, "last dimension contiguous"),
        (([out, out], [lse, lse[:2]]), {}, r"every LSE \[3, 2\] float32"),
        (([out, out], [lse, lse.double()]), {}, "every LSE"),
        (([out], [lse]), {"out": out.half()}, "every output"),
        (([out], [lse]), {"lse_out": lse[:1]}, "every LSE"),
    ):
        with pytest.raises(ShapeError, match=message):
            merge_states(*arguments, **options)
    with pytest.raises(NoKernelError, match="outs in"):
        merge_states([out.long()], [lse])


def test_library_op_and_compiled_form() -> None:
    inputs = SMALL[3].build(torch.Generator().manual_seed(5), CPU, torch.float32)
    torch.library.opcheck(torch.ops.tokenspeed.merge_states.default, (inputs["outs"], inputs["lses"]))

    def merge(*tensors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return merge_states(tensors[:2], tensors[2:])

    tensors = (*inputs["outs"], *inputs["lses"])
    compiled = torch.compile(merge, fullgraph=True, backend="eager")
    for got, want in zip(compiled(*tensors), merge(*tensors), strict=True):
        assert torch.equal(got, want)
