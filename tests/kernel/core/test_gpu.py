"""On a CUDA device: what is chosen, and that kernels which say so can be captured into a graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tokenspeed_kernel import dispatch
from tokenspeed_kernel.case import Case
from tokenspeed_kernel.errors import NoKernelError
from tokenspeed_kernel.platform import Vendor, current_platform, platform_of
from tokenspeed_kernel.registry import collect_builtin
from tokenspeed_kernel.selection import Request, select
from tokenspeed_kernel.signature import Signature
from tokenspeed_kernel.spec import KernelSpec
from tokenspeed_kernel.testing import family_cases, public_op
from tokenspeed_kernel.testing.compare import compare
from tokenspeed_kernel.testing.tensors import tensors_of

pytestmark = pytest.mark.gpu
# Collectives need a group of processes.
FAMILIES = sorted({op.partition(".")[0] for op in collect_builtin().ops()} - {"comm"})
CASES = [case for family in FAMILIES for case in family_cases(family)]
CUDA = torch.device("cuda")


def test_platform_is_the_device() -> None:
    platform = current_platform()
    assert platform.vendor in (Vendor.NVIDIA, Vendor.AMD)
    assert platform == platform_of(torch.device("cuda", torch.cuda.current_device()))
    if platform.vendor is Vendor.NVIDIA:
        assert platform.capability == torch.cuda.get_device_capability()


def test_products_go_to_the_vendor_s_library_or_to_triton() -> None:
    operands = collect_builtin().contract("gemm.mm").operands
    request = Request("gemm.mm", current_platform(), Signature.same(operands, ("bf16",))[0])
    assert select(dispatch.default_registry(), request).solution in ("cublas", "triton")


def _build(case: Case, seed: int, dtype: torch.dtype) -> dict[str, Any]:
    return case.build(torch.Generator().manual_seed(seed), CUDA, dtype)


def _dtypes(case: Case) -> list[torch.dtype]:
    return [dtype for dtype in (torch.bfloat16, torch.float16, torch.float32) if case.takes(dtype)]


def _seen(case: Case, result: Any, inputs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """What is compared after a call: its result, and what it wrote in place."""
    return result if case.comparable is None else case.comparable(result), {name: inputs[name] for name in case.mutated}


@pytest.mark.parametrize("case", [case for case in CASES if not case.bench], ids=str)
def test_default_choice_is_right(case: Case) -> None:
    """Without a solution the registry chooses; what it chooses meets the reference."""
    refusals = []
    for dtype in _dtypes(case):
        truth, inputs = _build(case, 1, dtype), _build(case, 1, dtype)
        try:
            got = public_op(case.op)(**inputs)
        except NoKernelError as refusal:
            refusals.append(str(refusal))  # log-probabilities are taken of float32 logits, say
            continue
        want = public_op(case.op)(**truth, solution="reference")
        compare(case, f"{case} {dtype}", _seen(case, got, inputs), _seen(case, want, truth))
        return
    pytest.fail("\n".join(refusals))


def _graph_safe() -> list[tuple[KernelSpec, Case]]:
    """Each graph-safe kernel with the largest case that it may take; which one it does shows when it is run."""
    return [
        (spec, case)
        for spec in collect_builtin()
        if spec.graph_safe
        for case in CASES
        if case.op == spec.op and case.bench
    ]


@pytest.mark.parametrize(("spec", "case"), _graph_safe(), ids=lambda one: one.name if isinstance(one, KernelSpec) else one.label)
def test_graph_safe_kernels_are_captured_and_replayed(spec: KernelSpec, case: Case) -> None:
    """A graph captured with other values gives, for these values, what the reference gives."""
    if (reason := spec.capability.mismatch(current_platform())) is not None:
        pytest.skip(reason)
    function = public_op(case.op)
    for dtype in _dtypes(case):
        inputs = _build(case, 1, dtype)
        try:
            function(**inputs, solution=spec.name)  # compiles it
            break
        except NoKernelError as refusal:
            reason = f"takes other calls: {refusal}"
    else:
        pytest.skip(reason or "takes none of the dtypes")
    values, truth = _build(case, 2, dtype), _build(case, 2, dtype)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = function(**inputs, solution=spec.name)
    pairs = [(mine, theirs) for (_, mine), (_, theirs) in zip(tensors_of(inputs), tensors_of(values), strict=True)]
    if all(mine.shape == theirs.shape for mine, theirs in pairs):
        for mine, theirs in pairs:
            mine.copy_(theirs)
    else:  # lists as long as their values make them: the captured ones are replayed, over a result that is wrong by now
        truth = _build(case, 1, dtype)
        for _, one in tensors_of(got):
            one.zero_()
    graph.replay()
    torch.cuda.synchronize()
    want = function(**truth, solution="reference")
    compare(case, f"{case} {spec.name}", _seen(case, got, inputs), _seen(case, want, truth))
