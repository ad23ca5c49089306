"""Packed weights multiply as `mm` does."""

from __future__ import annotations

import pytest
import torch

from tokenspeed_kernel.errors import ShapeError
from tokenspeed_kernel.ops.gemm import mm, pack_weight
from tokenspeed_kernel.ops.gemm.cases import DENSE_CASES
from tokenspeed_kernel.platform import platform_of

CPU = torch.device("cpu")
MM_CASES = [case for case in DENSE_CASES if not case.label.startswith("fp32 out")]
SOLUTIONS = ["plain", "reference", None, *(["onednn"] if "avx2" in platform_of(CPU).features else [])]


@pytest.mark.parametrize("solution", SOLUTIONS)
@pytest.mark.parametrize("case", MM_CASES, ids=str)
def test_product(case, solution: str | None) -> None:  # type: ignore[no-untyped-def]
    inputs = case.build(torch.Generator().manual_seed(0), CPU, torch.float32)
    expected = mm(**inputs, solution="reference")
    packed = pack_weight(inputs["weight"], solution=solution)
    tolerance = case.tolerance_of(torch.float32)
    close = {"rtol": tolerance.relative, "atol": tolerance.absolute}
    torch.testing.assert_close(packed(inputs["x"], inputs["bias"]), expected, **close)
    out = torch.full_like(expected, float("nan"), memory_format=torch.contiguous_format)
    assert packed(inputs["x"], inputs["bias"], out=out) is out
    torch.testing.assert_close(out, expected, **close)


def test_half_precision_weight() -> None:
    weight, x = torch.randn(24, 32).bfloat16(), torch.randn(3, 32).bfloat16()
    got = pack_weight(weight)(x)
    torch.testing.assert_close(got, mm(x, weight, solution="reference"), rtol=1.6e-2, atol=3e-2)


def test_original_may_be_freed() -> None:
    weight, x = torch.randn(24, 32), torch.randn(3, 32)
    expected = mm(x, weight)
    packed = pack_weight(weight)
    if packed.solution == "plain":
        pytest.skip("the plain solution shares the weight's memory, as it says")
    weight.fill_(float("nan"))
    torch.testing.assert_close(packed(x), expected, rtol=1e-5, atol=1e-5)


def test_float32_stays_exact_where_reduced_precision_is_allowed() -> None:
    weight, x = torch.randn(256, 512), torch.randn(64, 512)
    packed = pack_weight(weight)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        got = packed(x)
    finally:
        torch.set_float32_matmul_precision(before)
    torch.testing.assert_close(got, mm(x, weight, solution="reference"), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("solution", SOLUTIONS)
def test_errors(solution: str | None) -> None:
    packed = pack_weight(torch.zeros(4, 8), solution=solution)
    with pytest.raises(ShapeError, match=r"expected x \[\.\.\., 8\] torch\.float32, got \[2, 7\]"):
        packed(torch.zeros(2, 7))
    with pytest.raises(ShapeError, match=r"torch\.float16"):
        packed(torch.zeros(2, 8).half())
    with pytest.raises(ShapeError, match=r"expected bias \[4\]"):
        packed(torch.zeros(2, 8), torch.zeros(8))
    with pytest.raises(ShapeError, match=r"expected out \[2, 4\]"):
        packed(torch.zeros(2, 8), out=torch.zeros(4, 2))
    with pytest.raises(ShapeError, match=r"expected weight \[out_features, in_features\]"):
        pack_weight(torch.zeros(4), solution=solution)
