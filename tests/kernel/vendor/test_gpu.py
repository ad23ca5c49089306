"""Vendor kernels on a device, where their library is installed."""

from __future__ import annotations

import importlib

import pytest
import torch

from tokenspeed_kernel.errors import NoKernelError
from tokenspeed_kernel.registry import collect_builtin
from tokenspeed_kernel.spec import KernelSpec
from tokenspeed_kernel.testing import check_case, family_cases

SOLUTIONS = ("flashinfer", "flash_mla", "deep_gemm", "trtllm", "cudnn")
SPECS = [spec for spec in collect_builtin() if spec.solution in SOLUTIONS]
# Each shape or option may be compiled at its first call: a few cases show that wrapper and library agree.
NUM_CASES = 4
# Attention and its options are compiled by FlashInfer for minutes.
SLOW = [spec for spec in SPECS if spec.solution == "flashinfer" and not spec.op.startswith("norm.")]


def _check(spec: KernelSpec) -> None:
    for library in spec.libraries:
        try:
            importlib.import_module(library.module)
        except Exception as error:  # noqa: BLE001 - a vendor's package may raise anything
            pytest.skip(f"needs {library.requirement}, which does not import: {type(error).__name__}")
    device, ran = torch.device("cuda"), 0
    for case in family_cases(spec.op.partition(".")[0]):
        if case.op != spec.op or case.bench or not case.takes(torch.bfloat16) or ran == NUM_CASES:
            continue
        try:
            check_case(case, solution=spec.name, device=device, dtype=torch.bfloat16)
        except NoKernelError as error:
            if "built for" in str(error):
                pytest.skip(f"{spec.name} is built for {', '.join(spec.capability.targets)}")
            continue
        ran += 1
    assert ran, f"no case of {spec.op} fits {spec.name}"


@pytest.mark.gpu
@pytest.mark.parametrize("spec", [spec for spec in SPECS if spec not in SLOW], ids=lambda spec: spec.name)
def test_cases_on_the_device(spec: KernelSpec) -> None:
    _check(spec)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("spec", SLOW, ids=lambda spec: spec.name)
def test_cases_on_the_device_compiled_at_length(spec: KernelSpec) -> None:
    _check(spec)
