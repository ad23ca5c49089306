"""Every op, new ones too, has what verify, bench and the docs need: cases of each option and format, random cases, costs, a page.

Nothing here lists ops; they come from the registry. What the public op must do is in `test_every_op`.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tokenspeed_kernel import dispatch
from tokenspeed_kernel.bench.measure import work_of
from tokenspeed_kernel.case import Case, Cost
from tokenspeed_kernel.probe import request_of
from tokenspeed_kernel.registry import collect_builtin
from tokenspeed_kernel.signature import Format
from tokenspeed_kernel.spec import Band
from tokenspeed_kernel.testing import public_op
from tokenspeed_kernel.testing.tensors import tensors_of
from tokenspeed_kernel.testing.verify import DTYPES, cases_of

CPU = torch.device("cpu")
REGISTRY = collect_builtin()
OPS = REGISTRY.ops()
NUM_RANDOM = 20
FP64 = Format.parse("fp64")
# Parameters that no case can have, and where they are tested instead.
WITHOUT_A_CASE = {
    ("kvcache.copy_pages", "scratch"): "undefined afterwards, so that a case cannot compare it: test_pages",
    ("kvcache.transfer_pages", "stream"): "a queue of a GPU: test_pages",
    ("kvcache.write_kv", "k_scale"): "with scales it is write_scaled_kv, which has cases of its own: test_scaled",
    ("kvcache.write_kv", "v_scale"): "as k_scale",
}
# Formats that cases leave out, and where they are tested instead. fp64 is the host's alone, for tests of other kernels.
WITHOUT_A_FORMAT = {
    "comm.all_reduce": "whole numbers: comm_worker",
    "comm.reduce_scatter": "whole numbers: comm_worker",
}


@pytest.fixture(autouse=True)
def _built_in_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TOKENSPEED_KERNEL_DISABLE_PLUGINS", "all")
    dispatch.reset()
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _table(op: str, module: str, name: str) -> dict[str, Any]:
    path = f"tokenspeed_kernel.ops.{op.partition('.')[0]}.{module}"
    return {} if importlib.util.find_spec(path) is None else dict(getattr(importlib.import_module(path), name))


def _random(op: str) -> list[Case]:
    make = _table(op, "random_cases", "RANDOM").get(op)
    assert make is not None, f"{op}: RANDOM in its family's random_cases.py makes no case of it"
    return [make(random.Random(number)) for number in range(NUM_RANDOM)]


def _inputs(case: Case, dtype: torch.dtype) -> dict[str, Any]:
    return case.build(torch.Generator().manual_seed(0), CPU, dtype)


def _shapes(case: Case) -> list[tuple[int, ...]]:
    return [tuple(tensor.shape) for _, tensor in tensors_of(_inputs(case, (case.dtypes or DTYPES)[0]))]


def _given(value: Any, default: Any) -> bool:
    return isinstance(value, torch.Tensor) or (value is not default and value != default)


@pytest.mark.parametrize("op", OPS)
def test_cases_reach_every_option_and_format(op: str) -> None:
    small = [case for case in cases_of(op) if not case.bench]
    assert small, f"{op} has no case: its family's cases.py lists none"
    outputs = {name for case in small for name in case.outputs} | {"out", "solution", "plan"}
    parameters = inspect.signature(public_op(op)).parameters
    options = {name: one.default for name, one in parameters.items() if one.default is not one.empty and name not in outputs}
    kernels = [spec for spec in REGISTRY.specs(op) if spec.band is not Band.REFERENCE]
    wanted = {(name, fmt) for spec in kernels for signature in spec.formats for name, fmt in signature}
    missing = {name for name in options if (op, name) not in WITHOUT_A_CASE}
    lacking = {pair for pair in wanted if pair[1] != FP64} if op not in WITHOUT_A_FORMAT else set()
    for case in (*small, *_random(op)):
        for dtype in case.dtypes or DTYPES:
            inputs = _inputs(case, dtype)
            missing -= {name for name in missing if name in inputs and _given(inputs[name], options[name])}
            request = request_of(public_op(op), inputs)
            lacking -= set(() if request is None or request.signature is None else request.signature)
        if not missing and not lacking:
            return
    assert not missing, f"{op}: no case gives {', '.join(sorted(missing))}"
    assert not lacking, f"{op}: no case has {', '.join(sorted(f'{name}={fmt}' for name, fmt in lacking))}"


@pytest.mark.parametrize("op", OPS)
def test_random_cases_differ_and_can_be_made_again(op: str) -> None:
    cases, again = _random(op), _random(op)
    assert [case.label for case in cases] == [case.label for case in again]
    assert len({case.label for case in cases}) > NUM_RANDOM // 2, f"{op}: its random cases are alike"
    assert len({str(_shapes(case)) for case in cases}) > 2, f"{op}: its random cases have the same shapes"
    assert [_shapes(case) for case in cases[:3]] == [_shapes(case) for case in again[:3]]


@pytest.mark.parametrize("op", OPS)
def test_least_work_is_known(op: str) -> None:
    cost = _table(op, "costs", "COSTS").get(op)
    assert isinstance(cost, Cost), f"{op}: COSTS in its family's costs.py has no entry; Cost() says that bandwidth is the limit"
    worked = 0
    for case in cases_of(op):
        if case.bench:
            continue
        inputs = _inputs(case, (case.dtypes or DTYPES)[0])
        result = public_op(op)(**inputs, solution="reference")
        moved, flops = work_of(case, inputs, result)
        assert moved >= 0
        assert (flops is None) == (cost.flops is None and case.flops is None)
        assert flops is None or flops >= 0
        worked += moved > 0 and (flops is None or flops > 0)
        if worked >= 2:
            return
    assert worked, f"{op}: no case has any work"


@pytest.mark.parametrize("op", OPS)
def test_has_a_page(op: str, repository: Path) -> None:
    family, _, name = op.partition(".")
    page = repository / "docs" / "contracts" / f"{family}.md"
    assert page.exists(), f"docs/contracts/{family}.md is missing"
    text = page.read_text(encoding="utf-8")
    assert f"`{op}`" in text or f"`{name}`" in text, f"docs/contracts/{family}.md does not name {name}"
    table = (repository / "docs" / "kernel.md").read_text(encoding="utf-8")
    assert f"`{name}`" in table, f"the table of ops in docs/kernel.md lacks {op}"


@pytest.mark.parametrize("op", OPS)
def test_has_a_reference_and_a_kernel(op: str) -> None:
    bands = [spec.band for spec in REGISTRY.specs(op)]
    assert bands.count(Band.REFERENCE) == 1
    assert len(bands) > 1, f"{op} has a reference alone"
    contract = REGISTRY.contract(op)
    assert contract.summary, f"{op}: the contract has no summary"
    assert all(trait.doc for trait in contract.traits)


def test_an_op_that_lacks_something_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """The checks above see it: an op of a family without these files, and one whose cases leave an option out."""
    with pytest.raises(AssertionError, match="makes no case of it"):
        _random("norm.unheard_of")
    with pytest.raises(AssertionError, match="has no entry"):
        test_least_work_is_known("norm.unheard_of")
    full = cases_of("norm.rms_norm")
    monkeypatch.setattr(f"{__name__}.cases_of", lambda op: full[:1])
    monkeypatch.setattr(f"{__name__}._random", lambda op: [])
    monkeypatch.setattr(f"{__name__}.DTYPES", (torch.float32,))
    with pytest.raises(AssertionError, match="no case has"):
        test_cases_reach_every_option_and_format("norm.rms_norm")
