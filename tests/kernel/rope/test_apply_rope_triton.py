"""The Triton rope kernel: in the interpreter here, on the device where there is one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tokenspeed_kernel.ops.rope import apply_rope, cases
from tokenspeed_kernel.testing import check_case

interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for machines without a GPU")


@pytest.fixture(autouse=True)
def _triton() -> None:
    pytest.importorskip("triton", reason="needs triton")


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", [case for case in cases.CASES if not case.bench], ids=str)
def test_interpreted(case: Any, dtype: torch.dtype) -> None:
    check_case(case, solution="triton", device=torch.device("cpu"), dtype=dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", cases.CASES, ids=str)
def test_on_gpu(case: Any, dtype: torch.dtype) -> None:
    check_case(case, solution="triton", device=torch.device("cuda"), dtype=dtype)


@interpreted
def test_outputs_may_be_the_inputs() -> None:
    inputs = cases.inputs(cases.Shape("in place", 5, 3, 2, 24, 12, fused=True))
    expected = apply_rope(**inputs, solution="reference")
    apply_rope(**inputs, q_out=inputs["q"], k_out=inputs["k"], solution="triton")
    for name, want in zip("qk", expected, strict=True):
        torch.testing.assert_close(inputs[name], want, atol=1e-6, rtol=1e-6)


@interpreted
@pytest.mark.parametrize("position", [-1, 500, 2**40, -(2**62)])
def test_position_outside_the_table_gives_nan(position: int) -> None:
    inputs = cases.inputs(cases.Shape("outside", 2, rotary_dim=6))
    inputs["positions"][1] = position
    q, k = apply_rope(**inputs, solution="triton")
    for rotated in (q, k):
        assert bool(rotated[0].isfinite().all())
        assert bool(rotated[1, :, :6].isnan().all())
        assert bool(rotated[1, :, 6:].isfinite().all())
