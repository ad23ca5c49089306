"""Every cache kernel but the plain write against the reference: exact, and nothing around what is written changes."""

from __future__ import annotations

import pytest
import torch

from tokenspeed_kernel.case import Case
from tokenspeed_kernel.ops.kvcache.cases import CASES
from tokenspeed_kernel.testing import check_case

OTHERS = [case for case in CASES if case.op != "kvcache.write_kv"]
SMALL = [case for case in OTHERS if not case.bench]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for machines without a GPU")


def test_every_op_has_cases() -> None:
    assert {case.op.partition(".")[2] for case in CASES} == {
        "write_kv", "write_scaled_kv", "quantize_kv", "rope_write_kv", "copy_pages", "transfer_pages",
    }  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", SMALL, ids=str)
def test_cpu(case: Case, dtype: torch.dtype) -> None:
    check_case(case, solution="cpu", device=torch.device("cpu"), dtype=dtype)


@interpreted
@pytest.mark.parametrize("dtype", [torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", SMALL, ids=str)
def test_triton_interpreted(case: Case, dtype: torch.dtype) -> None:
    pytest.importorskip("triton", reason="needs triton")
    check_case(case, solution="triton", device=torch.device("cpu"), dtype=dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", OTHERS, ids=str)
def test_triton_on_gpu(case: Case, dtype: torch.dtype) -> None:
    check_case(case, solution="triton", device=torch.device("cuda"), dtype=dtype)
