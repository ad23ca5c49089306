"""Public report K3 for every op, new ones too: operands whose last row lies 2**31 elements behind the first are read or refused.

Ops come from the registry and their calls from their cases; the operands lie in sparse files that are mapped into memory.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tokenspeed_kernel import dispatch
from tokenspeed_kernel.case import Case
from tokenspeed_kernel.errors import TokenSpeedKernelError
from tokenspeed_kernel.registry import collect_builtin
from tokenspeed_kernel.testing import public_op
from tokenspeed_kernel.testing.compare import compare
from tokenspeed_kernel.testing.interpreter import device_numbers
from tokenspeed_kernel.testing.tensors import map_tensors, tensors_of
from tokenspeed_kernel.testing.verify import DTYPES, cases_of

CPU = torch.device("cpu")
FAR = 2**31 + 64
REGISTRY = collect_builtin()
PAIRS = [
    (op, solution)
    for op in REGISTRY.ops()
    for solution in ("cpu", "triton")
    if any(spec.solution == solution for spec in REGISTRY.specs(op))
]


@pytest.fixture(autouse=True)
def _built_in_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TOKENSPEED_KERNEL_DISABLE_PLUGINS", "all")
    dispatch.reset()
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with device_numbers():
        yield
    torch.set_num_threads(before)


def _inputs(case: Case) -> dict[str, Any]:
    return case.build(torch.Generator().manual_seed(0), CPU, (case.dtypes or DTYPES)[0])


def _fits(tensor: torch.Tensor) -> bool:
    return tensor.dim() >= 2 and 2 <= tensor.shape[0] <= 64 and tensor.numel() > tensor.shape[0]


@functools.cache
def _call(op: str) -> Case | None:
    """The smallest call with the most operands that can be laid out anew."""
    cases = [case for case in cases_of(op) if not case.bench and min((t.numel() for _, t in tensors_of(_inputs(case))), default=0)]
    found = []
    for place, case in enumerate(cases):
        tensors = [tensor for _, tensor in tensors_of(_inputs(case))]
        size = sum(tensor.numel() for tensor in tensors)
        # The interpreter is slow: a small one first, whatever its operands.
        found.append((size > 20_000, -sum(map(_fits, tensors)), size, place))
    _, count, _, place = min(found)
    return cases[place] if count else None


def _far(tensor: torch.Tensor, path: Path) -> torch.Tensor:
    """The same values, rows so far apart that the last one starts where an offset of 32 bits has wrapped."""
    stride = FAR // (tensor.shape[0] - 1) + tensor[0].numel()
    assert stride * (tensor.shape[0] - 1) > 2**31
    size = (stride * (tensor.shape[0] - 1) + tensor[0].numel()) * tensor.element_size()
    with path.open("wb") as file:
        file.truncate(size)
    if path.stat().st_blocks * 512 > 2**20:
        pytest.skip("needs a file system with sparse files")
    storage = torch.from_file(os.fspath(path), shared=True, size=size, dtype=torch.uint8).view(tensor.dtype)
    inner = torch.empty(tensor.shape[1:]).stride()
    return storage.as_strided(tensor.shape, (stride, *inner)).copy_(tensor)


def _swap(old: torch.Tensor, new: torch.Tensor, one: torch.Tensor) -> torch.Tensor:
    return new if one is old else one


def _visible(case: Case, result: Any, inputs: dict[str, Any]) -> Any:
    shown = result if case.comparable is None else case.comparable(result)
    written = {name: map_tensors(inputs[name], torch.clone) for name in case.mutated}
    return () if shown is None else shown if isinstance(shown, tuple) else (shown,), written


@pytest.mark.skipif(torch.cuda.is_available(), reason="for the host and the interpreter; GPUs have tests with pools of that size")
@pytest.mark.parametrize(("op", "solution"), PAIRS)
def test_rows_far_apart_are_read_rightly_or_refused(op: str, solution: str, tmp_path: Path) -> None:
    if solution == "triton":
        pytest.importorskip("triton", reason="needs triton")
    case = _call(op)
    if case is None:
        pytest.skip(f"{op} has no operand of several rows")
    function = public_op(op)
    want_inputs = _inputs(case)
    want = _visible(case, function(**want_inputs, solution="reference"), want_inputs)
    for place, name in enumerate(dict(tensors_of(_inputs(case)))):
        inputs = _inputs(case)
        operand = dict(tensors_of(inputs))[name]
        if not _fits(operand):
            continue
        path = tmp_path / str(place)
        try:
            inputs = map_tensors(inputs, functools.partial(_swap, operand, _far(operand, path)))
            result = function(**inputs, solution=solution)
        except TokenSpeedKernelError:
            continue  # refused, with the reason; `test_every_op` reads those
        finally:
            path.unlink(missing_ok=True)
        compare(case, f"{case} {solution} with rows of {name} far apart", _visible(case, result, inputs), want)
