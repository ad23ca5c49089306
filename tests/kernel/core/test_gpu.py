"""On a CUDA device: what is chosen, and that kernels which say so can be captured into a graph."""

from __future__ import annotations

import pytest
import torch

from tokenspeed_kernel import dispatch
from tokenspeed_kernel.case import Case
from tokenspeed_kernel.platform import Vendor, current_platform, platform_of
from tokenspeed_kernel.registry import collect_builtin
from tokenspeed_kernel.selection import Request, select
from tokenspeed_kernel.signature import Signature
from tokenspeed_kernel.testing import check_case, family_cases, public_op

pytestmark = pytest.mark.gpu
FAMILIES = ("activation", "embedding", "gemm", "norm")
CASES = [case for family in FAMILIES for case in family_cases(family)]


def test_platform_is_the_device() -> None:
    platform = current_platform()
    assert platform.vendor in (Vendor.NVIDIA, Vendor.AMD)
    assert platform == platform_of(torch.device("cuda", torch.cuda.current_device()))
    if platform.vendor is Vendor.NVIDIA:
        assert platform.capability == torch.cuda.get_device_capability()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_default_choice_is_right(case: Case) -> None:
    """Without a solution the registry chooses; what it chooses meets the reference."""
    operands = collect_builtin().contract(case.op).operands
    if case.op == "gemm.mm":
        request = Request(case.op, current_platform(), Signature.same(operands, ("bf16",))[0])
        assert select(dispatch.default_registry(), request).solution in ("cublas", "triton")
    inputs = case.build(torch.Generator().manual_seed(1), torch.device("cuda"), torch.bfloat16)
    want = public_op(case.op)(**inputs, solution="reference")
    got = public_op(case.op)(**inputs)
    tolerance = case.tolerance_of(torch.bfloat16)
    torch.testing.assert_close(got, want, rtol=tolerance.relative, atol=tolerance.absolute)


@pytest.mark.parametrize("case", [case for case in CASES if case.bench], ids=str)
def test_graph_safe_kernels_are_captured_and_replayed(case: Case) -> None:
    function = public_op(case.op)
    for spec in collect_builtin().specs(case.op):
        if not spec.graph_safe or spec.capability.mismatch(current_platform()) is not None:
            continue
        check_case(case, solution=spec.name, device=torch.device("cuda"), dtype=torch.bfloat16)  # compiles it
        first, second = (case.build(torch.Generator().manual_seed(seed), torch.device("cuda"), torch.bfloat16) for seed in (1, 2))
        want = function(**second, solution="reference")
        want = want if isinstance(want, tuple) else (want,)
        outputs = {name: torch.full_like(one, float("nan")) for name, one in zip(case.outputs, want, strict=True)}
        function(**first, **outputs, solution=spec.name)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            function(**first, **outputs, solution=spec.name)
        for name, value in first.items():
            if isinstance(value, torch.Tensor):
                value.copy_(second[name])
        graph.replay()
        torch.cuda.synchronize()
        tolerance = case.tolerance_of(torch.bfloat16)
        for name, one in zip(case.outputs, want, strict=True):
            torch.testing.assert_close(outputs[name], one, rtol=tolerance.relative, atol=tolerance.absolute)
