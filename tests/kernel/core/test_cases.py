"""The cases are what their labels say."""

from __future__ import annotations

import pytest
import torch

from tokenspeed_kernel.registry import collect_builtin
from tokenspeed_kernel.testing import family_cases

FAMILIES = ("activation", "embedding", "gemm", "norm")


@pytest.mark.parametrize("family", FAMILIES)
def test_labels_are_unique_and_kinds_of_case_are_there(family: str) -> None:
    cases = family_cases(family)
    assert len({str(case) for case in cases}) == len(cases)
    for op in {case.op for case in cases}:
        labels = " ".join(case.label for case in cases if case.op == op)
        for kind in ("odd", "strided" if family == "embedding" else "transposed"):
            assert kind in labels, f"{op} lacks a case: {kind}"
        assert any(case.bench for case in cases if case.op == op)
        assert op in collect_builtin().ops()


@pytest.mark.parametrize("case", [case for family in FAMILIES for case in family_cases(family) if not case.bench], ids=str)
def test_layouts(case) -> None:  # type: ignore[no-untyped-def]
    inputs = case.build(torch.Generator().manual_seed(0), torch.device("cpu"), torch.float32)
    tensors = [value for value in inputs.values() if isinstance(value, torch.Tensor)]
    if any(word in case.label for word in ("transposed", "sliced", "strided")):
        assert any(not tensor.is_contiguous() for tensor in tensors)
    if case.label.startswith(("empty", "no rows", "no features")):
        assert any(tensor.numel() == 0 for tensor in tensors)
    again = case.build(torch.Generator().manual_seed(0), torch.device("cpu"), torch.float32)
    for name, value in inputs.items():
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(value, again[name], rtol=0, atol=0, equal_nan=True)
