"""Every kernel of the plugin meets the cases of its op, with each instruction set."""

from __future__ import annotations

import pytest
import torch

from tokenspeed_kernel import NoKernelError
from tokenspeed_kernel.case import Case
from tokenspeed_kernel.testing import check_case, family_cases

CPU = torch.device("cpu")
OPS = {
    "norm.rms_norm",
    "norm.fused_add_rms_norm",
    "activation.silu_and_mul",
    "rope.apply_rope",
    "sampling.argmax",
    "attention.mha_decode",
    "attention.mha_extend",
    "attention.mha_prefill",
}
CASES = [
    case
    for family in ("norm", "activation", "rope", "sampling", "attention")
    for case in family_cases(family)
    # The reference of rope and attention goes pair by pair, row by row: the sizes for timing take it minutes.
    if case.op in OPS
    and not (case.bench and family in ("rope", "attention"))
    # Caches in fp8 are left to the built-in kernels.
    and not case.label.startswith("fp8")
]


def test_every_op_has_cases() -> None:
    assert {case.op for case in CASES} == OPS


@pytest.mark.parametrize("case", CASES, ids=str)
def test_case(case: Case, instruction_set: str) -> None:
    check_case(case, solution="cpu_native", device=CPU, dtype=torch.float32)
    from tokenspeed_kernel_cpu import _kernels

    # The reference goes key by key: it is not run again for each instruction set, nor on the longest cases.
    is_best = instruction_set == _kernels.instruction_sets()[0]
    if case.op.startswith("attention.") and is_best and "several_tiles" not in case.label:
        check_case(case, solution="cpu_native", device=CPU, dtype=torch.bfloat16)


@pytest.mark.parametrize(("op", "least"), [("gemm.mm", 5), ("gemm.pack_weight", 24), ("embedding.embedding", 5)])
def test_cases_of_quantized_weights(op: str, least: int, instruction_set: str) -> None:
    taken = 0
    for case in family_cases(op.partition(".")[0]):
        if case.op != op or case.bench:
            continue
        for dtype in (torch.float32, torch.bfloat16):
            try:
                if case.takes(dtype):
                    check_case(case, solution="cpu_native", device=CPU, dtype=dtype)
                    taken += 1
            except NoKernelError:  # another format
                continue
    assert taken >= least
