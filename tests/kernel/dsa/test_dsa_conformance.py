"""Every kernel of the family against the float64 reference, over every case."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tokenspeed_kernel.ops.dsa.cases import CASES
from tokenspeed_kernel.testing import check_case

CPU = torch.device("cpu")
SMALL = [case for case in CASES if not case.bench]
# The longest cases go without their second form, which differs by the LSE alone.
LONG = ("heavy", "several", "many", "latent")
QUICK = [case for case in SMALL if not (case.label.startswith(LONG) and case.label.endswith("lse"))]
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for machines without a GPU")


def _pairs(cases: list[Any], dtypes: tuple[torch.dtype, ...]) -> list[Any]:
    return [pytest.param(case, dtype, id=f"{case}-{dtype}") for case in cases for dtype in dtypes if case.takes(dtype)]


@pytest.mark.parametrize(("case", "dtype"), _pairs(SMALL, (torch.float32, torch.bfloat16, torch.float16)))
def test_cpu(case: Any, dtype: torch.dtype) -> None:
    check_case(case, solution="cpu", device=CPU, dtype=dtype)


@interpreted
@pytest.mark.parametrize("case", QUICK, ids=str)
def test_interpreted(case: Any) -> None:
    # fp32 alone: a bf16 product is silently wrong in the interpreter.
    pytest.importorskip("triton", reason="needs triton")
    check_case(case, solution="triton", device=CPU, dtype=torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize(("case", "dtype"), _pairs(list(CASES), (torch.float32, torch.bfloat16, torch.float16)))
def test_on_gpu(case: Any, dtype: torch.dtype) -> None:
    check_case(case, solution="triton", device=torch.device("cuda"), dtype=dtype)
