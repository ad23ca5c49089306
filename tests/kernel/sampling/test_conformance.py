"""Every kernel of the family against the float64 reference, on the family's cases."""

from __future__ import annotations

import pytest
import torch

from tokenspeed_kernel.case import Case
from tokenspeed_kernel.testing import check_case, family_cases

CASES = family_cases("sampling")
SMALL = [case for case in CASES if not case.bench]
LARGE = [case for case in CASES if case.bench]
_FP32_ONLY = ("sampling.apply_penalties", "sampling.apply_logit_bias", "sampling.philox_uniform")


def _dtypes(case: Case) -> tuple[torch.dtype, ...]:
    return (torch.float32,) if case.op in _FP32_ONLY else (torch.float32, torch.bfloat16, torch.float16)


def _with_dtypes(cases: list[Case]) -> list[tuple[Case, torch.dtype]]:
    return [(case, dtype) for case in cases for dtype in _dtypes(case)]


def _name(value: object) -> str:
    return str(value).removeprefix("torch.")


@pytest.mark.parametrize(("case", "dtype"), _with_dtypes(SMALL), ids=_name)
def test_cpu(case: Case, dtype: torch.dtype) -> None:
    check_case(case, solution="cpu", device=torch.device("cpu"), dtype=dtype)


@pytest.mark.parametrize("case", [case for case in LARGE if "128256" not in case.label or "ties" in case.label], ids=_name)
def test_cpu_large(case: Case) -> None:
    check_case(case, solution="cpu", device=torch.device("cpu"), dtype=torch.float32)


@pytest.mark.skipif(torch.cuda.is_available(), reason="runs on the GPU instead")
@pytest.mark.parametrize("case", SMALL, ids=_name)
def test_triton_interpreted(case: Case) -> None:
    pytest.importorskip("triton", reason="needs triton")
    check_case(case, solution="triton", device=torch.device("cpu"), dtype=torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize(("case", "dtype"), _with_dtypes([*SMALL, *LARGE]), ids=_name)
def test_triton_on_gpu(case: Case, dtype: torch.dtype) -> None:
    check_case(case, solution="triton", device=torch.device("cuda"), dtype=dtype)
