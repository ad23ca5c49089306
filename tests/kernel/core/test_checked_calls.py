"""A call is checked once for each look of its operands: afterwards nothing else may slip through. And what is no tensor is refused
by name. Swept over all ops, whose calls come from their cases."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from tokenspeed_kernel import dispatch
from tokenspeed_kernel.case import Case
from tokenspeed_kernel.dispatch import NEW_CALL, BoundOp
from tokenspeed_kernel.errors import ShapeError
from tokenspeed_kernel.guards import recognizer
from tokenspeed_kernel.ops.operands import refuse_kinds
from tokenspeed_kernel.registry import collect_builtin
from tokenspeed_kernel.spec import OpContract
from tokenspeed_kernel.testing import public_op
from tokenspeed_kernel.testing.tensors import tensors_of
from tokenspeed_kernel.testing.verify import DTYPES, cases_of

CPU = torch.device("cpu")
OPS = collect_builtin().ops()


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch, clean_settings: None) -> Iterator[None]:
    """Built-in kernels alone, on one thread."""
    monkeypatch.setenv("TOKENSPEED_KERNEL_DISABLE_PLUGINS", "all")
    dispatch.reset()
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _inputs(case: Case) -> dict[str, Any]:
    return case.build(torch.Generator().manual_seed(0), CPU, (case.dtypes or DTYPES)[0])


@functools.cache
def _call(op: str) -> Case:
    """The smallest case that computes something and gives most of the operands."""
    full = []
    for case in cases_of(op):
        sizes = [] if case.bench else [tensor.numel() for _, tensor in tensors_of(_inputs(case))]
        if sizes and min(sizes) > 0:
            full.append((-len(sizes), sum(sizes), len(full), case))
    return min(full)[-1]


def _variants(tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors that look like it but for one thing."""
    yield "another dtype", tensor.to(torch.float64 if tensor.dtype is not torch.float64 else torch.int16)
    yield "one more dimension", tensor.unsqueeze(0)
    yield "on another device", torch.empty_like(tensor, device="meta")
    if tensor.dim():
        yield "more rows", torch.cat([tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor] * 2).view(tensor.dtype)
        wide = tensor.new_empty((*tensor.shape, 2))
        wide[..., 0] = tensor
        yield "every second element", wide[..., 0]
        if tensor.shape[-1] > 1:
            yield "fewer columns", tensor[..., :-1]


def _outcome(function: Callable[..., Any], inputs: dict[str, Any]) -> str:
    """What a call ends in: the error's words, or nothing."""
    try:
        function(**inputs)
    except Exception as error:  # noqa: BLE001 - whatever it raises is compared
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize("op", OPS)
def test_a_call_after_a_good_one_is_checked_like_the_first(op: str) -> None:
    function, case = public_op(op), _call(op)
    names = [name for name, value in _inputs(case).items() if isinstance(value, torch.Tensor)]
    refused = 0
    for name in names:
        for what, bad in _variants(_inputs(case)[name]):
            dispatch.reset()
            first = _outcome(function, _inputs(case) | {name: bad})
            dispatch.reset()
            for _ in range(2):
                function(**_inputs(case))
            for _ in range(2):
                assert _outcome(function, _inputs(case) | {name: bad}) == first, f"{op}: {name} with {what} after a good call"
            refused += bool(first)
    assert refused or not names, f"{op}: nothing was refused, so that the test shows nothing"


@pytest.mark.parametrize("op", OPS)
def test_what_is_no_tensor_is_refused_by_name(op: str) -> None:
    function, case = public_op(op), _call(op)
    inputs = _inputs(case)
    function(**inputs)
    for name, value in inputs.items():
        if not isinstance(value, torch.Tensor):
            continue
        for wrong in ([1.0, 2.0], np.zeros((2, 2), np.float32), "tensor"):
            with pytest.raises(ShapeError, match=rf"{op}: expected {name} to be a tensor(.|\n)*got an? .*\nFix: ") as caught:
                function(**inputs | {name: wrong})
            assert type(wrong).__name__ in str(caught.value)


def test_a_missing_operand_is_refused_by_name() -> None:
    inputs = _inputs(_call("norm.rms_norm"))
    said = r"norm\.rms_norm: expected weight to be a tensor, got None\nFix: pass a tensor for weight"
    with pytest.raises(ShapeError, match=said):
        public_op("norm.rms_norm")(**inputs | {"weight": None})


def test_kinds_of_other_arguments() -> None:
    def op(x: torch.Tensor, sizes: list[int], eps: float = 1.0, name: str | None = None) -> None: ...

    op.__module__ = "tokenspeed_kernel.ops.toy.api"
    good = {"x": torch.ones(1), "sizes": [1, 2], "eps": 1, "name": None}
    refuse_kinds(op, good, ValueError())
    for name, wrong, words in (
        ("sizes", [1.5], r"sizes to be a sequence of ints, got a list of float"),
        ("eps", "small", r"eps to be a float, got a str"),
        ("name", 3, r"name to be a str or None, got an int"),
    ):
        with pytest.raises(ShapeError, match=words):
            refuse_kinds(op, good | {name: wrong}, ValueError())


@pytest.mark.parametrize("native", [True, False])
def test_a_recognizer_tells_every_difference(monkeypatch: pytest.MonkeyPatch, native: bool) -> None:
    if not native:
        monkeypatch.setattr("tokenspeed_kernel.guards._TensorGuards", None)
    x, ids = torch.randn(3, 4), torch.zeros(3, dtype=torch.int32)
    looks_same = recognizer(x, ids)
    assert looks_same(torch.randn(3, 4), ids)
    for _, other in _variants(x):
        assert not looks_same(other, ids)
    assert not looks_same([1.0], ids)
    assert not looks_same(x, None)
    assert recognizer(x, x)(x, x), "one tensor twice"


def test_what_was_seen_is_bounded_and_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_MAX_BOUND", 4)
    op = BoundOp(OpContract("toy.op", ("x",), ("x",)))
    for size in range(20):
        op.remember(size, print, torch.empty(size))
        assert len(op.seen) <= 4
    op.clear()
    assert op.seen.get(3, NEW_CALL) is NEW_CALL
