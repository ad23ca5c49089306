"""Holds an op's fake implementation against what a kernel returns: torch.compile plans with the fake one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

import torch
from torch.fx import GraphModule, Interpreter

from tokenspeed_kernel.case import Case
from tokenspeed_kernel.errors import TokenSpeedKernelError
from tokenspeed_kernel.plugin_kit.report import Area, Report
from tokenspeed_kernel.spec import KernelSpec
from tokenspeed_kernel.testing import public_op
from tokenspeed_kernel.testing.tensors import tensors_of

__all__ = ["check_fakes"]

# Each is traced anew, which takes a second.
_CALLS: Final = 2
_NARROW: Final = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu)
_Call = tuple[Any, tuple[Any, ...], dict[str, Any]]


class _Calls(Interpreter):
    """Runs a graph, and keeps the arguments of each call of one of the ops' library forms."""

    def __init__(self, module: GraphModule) -> None:
        super().__init__(module)
        self.found: list[_Call] = []

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Keep copies: the op may write into its arguments."""
        if str(target).startswith("tokenspeed."):
            overload = target if isinstance(target, torch._ops.OpOverload) else target.default
            copies = torch.utils._pytree.tree_map_only(torch.Tensor, lambda one: one.detach().clone(), (args, kwargs))
            self.found.append((overload, *copies))
        return super().call_function(target, args, kwargs)


def check_fakes(
    spec: KernelSpec, device: torch.device, cases: Iterable[Case], dtypes: Iterable[torch.dtype], report: Report
) -> None:
    """Add whether shape, dtype and strides of the kernel's outputs are those that the op's fake implementation promises.

    Args:
        spec: the kernel.
        device: to run on.
        cases: of its op.
        dtypes: in which it takes some of them.
        report: to add to.
    """
    checked = 0
    dtypes = tuple(dtypes)
    for case in sorted((one for one in cases if not one.bench), key=lambda one: len(one.label)):
        for dtype in (one for one in dtypes if case.takes(one)):
            inputs = case.build(torch.Generator().manual_seed(0), device, dtype)
            if checked == _CALLS or any(tensor.numel() == 0 for _, tensor in tensors_of(inputs)):
                break
            try:
                calls = _library_calls(public_op(case.op), {**inputs, "solution": spec.name})
                for overload, args, kwargs in calls:
                    # PyTorch compares arguments with arithmetic that fp8 lacks.
                    narrow = any(tensor.dtype in _NARROW for _, tensor in tensors_of((args, kwargs)))
                    tests = ("test_faketensor",) if narrow else ("test_schema", "test_faketensor")
                    torch.library.opcheck(overload, args, kwargs, test_utils=tests)
            except torch._dynamo.exc.Unsupported as error:
                # The op gives what no graph can hold (an object that is made when weights are loaded): nothing is promised there.
                report.note(Area.FAKE, f"{spec.name}: {case} does not compile: {str(error).strip().partition(chr(10))[0]}")
                return
            except Exception as error:  # noqa: BLE001 - opcheck raises many kinds; the cause is shown
                if _refused(error):
                    continue  # the kernel does not take this call
                what = f"{spec.name}: {case} {dtype}: {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
                report.fail(Area.FAKE, what, "return new tensors of the shape, dtype and strides that the op promises")
                return
            checked += len(calls) > 0
    if checked:
        report.ok(Area.FAKE, f"{spec.name}: {checked} calls on {device} agree with the op's fake implementation")
    else:
        report.note(Area.FAKE, f"{spec.name}: no call could be traced, so the fake implementation was not compared")


def _refused(error: BaseException | None) -> bool:
    """Whether one of our errors is behind what the compiler raised."""
    while error is not None:
        if isinstance(error, TokenSpeedKernelError):
            return True
        error = error.__cause__ or error.__context__
    return False


def _library_calls(function: Callable[..., Any], inputs: dict[str, Any]) -> list[_Call]:
    """The calls of library ops in the graph that torch.compile makes of one call; it must be one graph."""
    calls: list[_Call] = []

    def backend(module: GraphModule, _: list[torch.Tensor]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            interpreter = _Calls(module)
            result = interpreter.run(*arguments)
            calls.extend(interpreter.found)
            return result

        return run

    torch._dynamo.reset()
    try:
        torch.compile(function, fullgraph=True, backend=backend)(**inputs)
    finally:
        torch._dynamo.reset()
    return calls
