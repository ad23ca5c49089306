"""Every kernel of the family against the float64 reference, on the family's cases."""

from __future__ import annotations

import pytest
import torch

from tokenspeed_kernel.case import Case
from tokenspeed_kernel.testing import check_case, family_cases

CASES = family_cases("moe")
SMALL = [case for case in CASES if not case.bench]
LARGE = [case for case in CASES if case.bench]
CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _name(value: object) -> str:
    return str(value).removeprefix("torch.")


@pytest.mark.parametrize("dtype", DTYPES, ids=_name)
@pytest.mark.parametrize("case", SMALL, ids=_name)
def test_cpu(case: Case, dtype: torch.dtype) -> None:
    check_case(case, solution="cpu", device=CPU, dtype=dtype)


@pytest.mark.parametrize("case", [case for case in LARGE if "4096" not in case.label], ids=_name)
def test_cpu_large(case: Case) -> None:
    check_case(case, solution="cpu", device=CPU, dtype=torch.float32)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for machines without a GPU")
@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
@pytest.mark.parametrize("case", SMALL, ids=_name)
def test_triton_interpreted(case: Case) -> None:
    """float32 only: products of bf16 are wrong in the interpreter."""
    pytest.importorskip("triton", reason="needs triton")
    check_case(case, solution="triton", device=CPU, dtype=torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=_name)
@pytest.mark.parametrize("case", CASES, ids=_name)
def test_triton_on_gpu(case: Case, dtype: torch.dtype) -> None:
    check_case(case, solution="triton", device=torch.device("cuda"), dtype=dtype)
