"""Every kernel of the family against the float64 reference, on the family's cases."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tokenspeed_kernel.case import Case
from tokenspeed_kernel.testing import check_case, family_cases

CASES = family_cases("moe")
SMALL = [case for case in CASES if not case.bench]
LARGE = [case for case in CASES if case.bench]
# The blocks of GGUF files are read by the plain kernels alone.
FOR_TRITON = [case for case in CASES if "gguf" not in case.label]
CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# One of each way to read a weight; the other formats differ from these in a scale's layout.
FORMATS = (
    *("fp8_e4m3@block", "fp8_e5m2@tensor", "mxfp4@block_32, 2 tokens", "nvfp4@block_16", "mxint4@block_32, 17 tokens"),
    *("int4@channel", "uint4@group_32"),
)


def _interpreted() -> list[Any]:
    return [
        case if "@" not in case.label or case.label.startswith(FORMATS) else pytest.param(case, marks=pytest.mark.slow)
        for case in FOR_TRITON
        if not case.bench
    ]


def _name(value: object) -> str:
    return str(value).removeprefix("torch.")


@pytest.mark.parametrize(
    ("case", "dtype"),
    [(case, dtype) for dtype in DTYPES for case in SMALL if "@" not in case.label or dtype is not torch.float16],
    ids=_name,
)
def test_cpu(case: Case, dtype: torch.dtype) -> None:
    check_case(case, solution="cpu", device=CPU, dtype=dtype)


@pytest.mark.parametrize("case", [case for case in LARGE if "4096" not in case.label], ids=_name)
def test_cpu_large(case: Case) -> None:
    check_case(case, solution="cpu", device=CPU, dtype=torch.float32)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for machines without a GPU")
@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
@pytest.mark.parametrize("case", _interpreted(), ids=_name)
def test_triton_interpreted(case: Case) -> None:
    """float32 only: products of bf16 are wrong in the interpreter."""
    pytest.importorskip("triton", reason="needs triton")
    check_case(case, solution="triton", device=CPU, dtype=torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=_name)
@pytest.mark.parametrize("case", FOR_TRITON, ids=_name)
def test_triton_on_gpu(case: Case, dtype: torch.dtype) -> None:
    check_case(case, solution="triton", device=torch.device("cuda"), dtype=dtype)
