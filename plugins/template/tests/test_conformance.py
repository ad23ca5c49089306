"""Each kernel meets the cases of its op: values, shapes, untouched inputs, outputs that are given."""

import pytest
import torch

from tokenspeed_kernel.testing import check_case, family_cases

CASES = [case for case in family_cases("norm") if case.op == "norm.rms_norm" and not case.bench]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_rms_norm(case, dtype):
    check_case(case, solution="acme_kernels", device=torch.device("cpu"), dtype=dtype)
