"""What every op must do, new ones too: nothing here lists ops, they come from the registry and their calls from their cases.

The arguments of an op's `torch.library` form are taken from a trace of the public op by torch.compile without a graph break.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.fx import GraphModule, Interpreter

from tokenspeed_kernel import dispatch
from tokenspeed_kernel.case import Case
from tokenspeed_kernel.errors import TokenSpeedKernelError
from tokenspeed_kernel.registry import collect_builtin
from tokenspeed_kernel.testing import public_op
from tokenspeed_kernel.testing.compare import compare
from tokenspeed_kernel.testing.tensors import map_tensors, tensors_of
from tokenspeed_kernel.testing.verify import DTYPES, cases_of

CPU = torch.device("cpu")
OPS = collect_builtin().ops()
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu)
OPCHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
NOT_TRACED = {
    "gemm.pack_weight": "returns a packed weight that knows its kernel; it is called when weights are loaded, outside of a graph",
}


@pytest.fixture(autouse=True)
def _built_in_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever plugins are installed; their kernels have tests of their own."""
    monkeypatch.setenv("TOKENSPEED_KERNEL_DISABLE_PLUGINS", "all")
    dispatch.reset()


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
    torch._dynamo.reset()


def _inputs(case: Case, seed: int = 0) -> dict[str, Any]:
    dtype = (case.dtypes or DTYPES)[0]
    return case.build(torch.Generator().manual_seed(seed), CPU, dtype)


def _sizes(case: Case) -> list[int]:
    return [tensor.numel() for _, tensor in tensors_of(_inputs(case))]


@functools.cache
def _small(op: str) -> tuple[Case, ...]:
    return tuple(case for case in cases_of(op) if not case.bench)


@functools.cache
def _one_call(op: str) -> Case:
    """The first case that has something to compute and the fewest options; better one of finite values, and with several rows."""
    full = [case for case in _small(op) if min(_sizes(case), default=0) > 0]

    def rank(case: Case) -> tuple[bool, int, bool]:
        # PyTorch's checks take NaN to differ from NaN.
        result = public_op(op)(**_inputs(case), solution="reference")
        nan = any(tensor.is_floating_point() and bool(tensor.float().isnan().any()) for _, tensor in tensors_of(result))
        return nan, len(_inputs(case)), min(_sizes(case)) < 2

    return min(full, key=rank)


def _as_tuple(result: Any) -> tuple[Any, ...]:
    return () if result is None else result if isinstance(result, tuple) else (result,)


def _visible(case: Case, result: Any, inputs: dict[str, Any]) -> Any:
    """What a caller sees of a call: its result, and what was written."""
    shown = result if case.comparable is None else case.comparable(result)
    return _as_tuple(shown), {name: inputs[name] for name in case.mutated}


class _Calls(Interpreter):
    """Runs a graph, and keeps the arguments of each call of one of our library ops."""

    def __init__(self, module: GraphModule) -> None:
        super().__init__(module)
        self.found: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Keep copies: the op may write into its arguments."""
        if isinstance(target, torch._ops.OpOverload | torch._ops.OpOverloadPacket) and str(target).startswith("tokenspeed."):
            copies = torch.utils._pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.detach().clone(), (args, kwargs))
            self.found.append((target, *copies))
        return super().call_function(target, args, kwargs)


def _trace(function: Callable[..., Any], inputs: dict[str, Any]) -> tuple[Any, list[tuple[Any, tuple[Any, ...], dict[str, Any]]]]:
    """Compile without a graph break and run; returns the result and the calls of library ops."""
    calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    def backend(module: GraphModule, _: list[torch.Tensor]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            interpreter = _Calls(module)
            result = interpreter.run(*arguments)
            calls.extend(interpreter.found)
            return result

        return run

    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend=backend)(**inputs), calls


@pytest.mark.parametrize("op", OPS)
def test_cases_have_an_empty_and_a_strided_call(op: str) -> None:
    if op in NOT_TRACED:
        pytest.skip(NOT_TRACED[op])
    cases = _small(op)
    assert cases, f"{op} has no cases"
    assert any(0 in _sizes(case) for case in cases), f"{op} has no case with nothing to compute (batch 0)"
    assert len({case.label for case in cases_of(op)}) == len(cases_of(op)), f"{op} has two cases of one label"


@pytest.mark.parametrize("op", OPS)
def test_compiles_into_one_library_op_that_passes_opcheck(op: str) -> None:
    if op in NOT_TRACED:
        pytest.skip(NOT_TRACED[op])
    function = public_op(op)
    case = _one_call(op)
    inputs, again = _inputs(case), _inputs(case)
    result, calls = _trace(function, inputs)
    compare(case, f"{case} compiled", _visible(case, result, inputs), _visible(case, function(**again), again))
    assert calls, f"{op} does not appear as torch.ops.tokenspeed.* in a compiled graph"
    for target, args, kwargs in calls:
        overload = target if isinstance(target, torch._ops.OpOverload) else target.default
        # PyTorch's own schema check compares arguments with arithmetic that fp8 lacks; what is written is checked by the cases.
        narrow = any(isinstance(one, torch.Tensor) and one.dtype in FP8 for one in args)
        torch.library.opcheck(overload, args, kwargs, test_utils=OPCHECKS[1:] if narrow else OPCHECKS)


@pytest.mark.parametrize("op", OPS)
def test_an_empty_call_compiles_too(op: str) -> None:
    if op in NOT_TRACED:
        pytest.skip(NOT_TRACED[op])
    function = public_op(op)
    case = next(case for case in _small(op) if 0 in _sizes(case))
    inputs, again = _inputs(case), _inputs(case)
    result, _ = _trace(function, inputs)
    compare(case, f"{case} compiled", _visible(case, result, inputs), _visible(case, function(**again), again))


def _strided(tensor: torch.Tensor, layout: str) -> torch.Tensor | None:
    """The same values with gaps between rows or elements, or with the dimensions in another order; None where that is no change."""
    if tensor.dim() == 0 or tensor.numel() < 2 or (layout == "transposed" and tensor.dim() < 2):
        return None
    if layout == "every second row":
        return tensor.new_empty((tensor.shape[0] * 2, *tensor.shape[1:]))[::2].copy_(tensor)
    if layout == "every second element":
        return tensor.new_empty((*tensor.shape[:-1], tensor.shape[-1] * 2))[..., ::2].copy_(tensor)
    return tensor.transpose(0, -1).contiguous().transpose(0, -1)


def _swap(old: torch.Tensor, new: torch.Tensor, one: torch.Tensor) -> torch.Tensor:
    return new if one is old else one


@pytest.mark.parametrize("op", OPS)
def test_strided_operands_are_right_or_refused(op: str) -> None:
    case = _one_call(op) if _small(op) else pytest.skip(f"{op} has no cases")
    function = public_op(op)
    want_inputs = _inputs(case)
    want = _visible(case, function(**want_inputs), want_inputs)
    taken, refusals = 0, []
    for name in dict(tensors_of(want_inputs)):
        for layout in ("every second row", "every second element", "transposed"):
            inputs = _inputs(case)
            operand = dict(tensors_of(inputs))[name]
            strided = _strided(operand, layout)
            if strided is None:
                continue
            try:
                inputs = map_tensors(inputs, functools.partial(_swap, operand, strided))
                result = function(**inputs)
            except TokenSpeedKernelError as error:
                refusals.append(str(error))
                continue
            compare(case, f"{op} with {name}, {layout}", _visible(case, result, inputs), want)
            taken += 1
    assert all("expected" in text for text in refusals), f"{op}: a refusal does not say what is expected: {refusals}"
    assert taken or refusals, f"{op}: no operand could be given other strides"


def test_the_trace_is_no_pretence() -> None:
    """A function that never reaches a library op has no calls; one that does has them with their arguments."""
    _, none = _trace(lambda x: x + 1, {"x": torch.ones(3)})
    assert none == []
    case = _one_call("norm.rms_norm")
    _, calls = _trace(public_op(case.op), _inputs(case))
    (target, args, _), = calls
    assert "rms_norm" in str(target)
    assert torch.equal(args[0], _inputs(case)["x"])
