"""Holds one kernel against the reference on one case."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable
from typing import Any

import torch

from tokenspeed_kernel.case import Case
from tokenspeed_kernel.testing.compare import ConformanceError, Difference, compare
from tokenspeed_kernel.testing.tensors import Guarded, map_tensors, surroundings, tensors_of

__all__ = ["check_case", "family_cases", "public_op"]


def public_op(op: str) -> Callable[..., Any]:
    """Return the public function of `family.op`."""
    family, _, name = op.partition(".")
    function: Callable[..., Any] = getattr(importlib.import_module(f"tokenspeed_kernel.ops.{family}"), name)
    return function


def family_cases(family: str) -> tuple[Case, ...]:
    """Return the cases of a family, as its `cases.py` lists them."""
    cases: tuple[Case, ...] = importlib.import_module(f"tokenspeed_kernel.ops.{family}.cases").CASES
    return cases


def check_case(
    case: Case,
    *,
    solution: str,
    device: torch.device,
    dtype: torch.dtype,
    seed: int = 0,
    inputs: dict[str, Any] | None = None,
) -> Difference:
    """Run a case with `solution` and with the reference, and compare.

    Checked: values within the case's tolerance; shape, dtype and device; arguments left as they were, but for those that the
    case says are written, and the memory around these; given outputs (poisoned with NaN, so that an element that is not
    written shows, and guarded on both sides) are filled and returned, and nothing beside them is written.

    Args:
        case: what to run.
        solution: solution or kernel to hold against the reference.
        device: to run on.
        dtype: given to the case's `build`.
        seed: of the values.
        inputs: what the case's `build` gives for these, where the caller has it already; it may be written.
    Returns:
        How far the result is from the reference.
    Raises:
        ConformanceError: something differs; the message says what and where.
        NoKernelError: the solution does not take this case.
    """
    function = public_op(case.op)

    def build() -> dict[str, Any]:
        return case.build(torch.Generator().manual_seed(seed), device, dtype)

    truth = build() if inputs is None else inputs
    inputs = _copied(truth) or build()
    again = (_copied(truth) or build()) if case.outputs and case.mutated else inputs
    expected = function(**truth, solution="reference")
    label = f"{case} {solution} {dtype} on {device}"
    before = _Before(case, inputs)
    result = function(**inputs, solution=solution)
    difference = compare(case, label, _seen(case, result), _seen(case, expected))
    before.compare(label, inputs, truth)
    difference = difference.worst(compare(case, f"{label}: in place", _written(case, inputs), _written(case, truth)))
    if case.outputs:
        inputs = again
        given, guards = _given(case, expected)
        returned = function(**inputs, **given, solution=solution)
        compare(case, f"{label} with given outputs", _seen(case, returned), _seen(case, expected))
        for name, result in zip(case.outputs, _as_tuple(returned), strict=True):
            ours = [id(tensor) for _, tensor in tensors_of(given[name])]
            if [id(tensor) for _, tensor in tensors_of(result)] != ours:
                raise ConformanceError(f"{label}: {name} was given, but another tensor was returned")
        if not all(guard.intact for guard in guards):
            raise ConformanceError(f"{label} with given outputs: memory beside an output was written")
        before.compare(f"{label} with given outputs", inputs, truth)
        compare(case, f"{label} with given outputs: in place", _written(case, inputs), _written(case, truth))
    return difference


def _copied(inputs: dict[str, Any]) -> dict[str, Any] | None:
    """The same arguments in memory of their own, which costs far less than making them again; None where a copy would differ.

    Tensors that share memory share it in the copy as well, with the same strides and the same surroundings.
    """
    if any(tensor.is_pinned() for tensor in _tensors(inputs)):
        return None  # a copy would not be pinned
    try:
        return copy.deepcopy(inputs)
    except (TypeError, RuntimeError):  # a process group
        return None


class _Before:
    """What must not change in the arguments of a call."""

    def __init__(self, case: Case, inputs: dict[str, Any]) -> None:
        self._case = case
        self._around = surroundings(_tensors(_written(case, inputs)))
        # The reference ran on arguments of its own, and is trusted no more than the kernel.
        kept = {name: value for name, value in inputs.items() if name not in case.mutated}
        self._kept = {name: tensor.clone() for name, tensor in tensors_of(kept)}

    def compare(self, label: str, inputs: dict[str, Any], truth: dict[str, Any]) -> None:
        """Raise where something else was written than what the case says is."""
        now = {name: dict(tensors_of({name: value})) for name, value in inputs.items()}
        same = {name: dict(tensors_of({name: value})) for name, value in truth.items()}
        for kind, found in (("", now), ("by the reference", same)):
            for group, members in found.items():
                for name, value in members.items():
                    if group not in self._case.mutated and not _identical(value, self._kept[name]):
                        raise ConformanceError(f"{label}: input {name} was changed {kind}".rstrip())
        around = surroundings(_tensors(_written(self._case, inputs)))
        if not all(map(torch.equal, around, self._around)):
            raise ConformanceError(f"{label}: memory around {' or '.join(self._case.mutated)} was written")


def _tensors(value: Any) -> list[torch.Tensor]:
    return [tensor for _, tensor in tensors_of(value)]


def _identical(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Bit for bit, so that NaN equals NaN and dtypes without arithmetic will do."""
    return one.shape == other.shape and torch.equal(_bytes(one), _bytes(other))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    # A clone: `contiguous` keeps the strides of dimensions of size 1, which cannot be viewed as bytes.
    return tensor.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)


def _written(case: Case, inputs: dict[str, Any]) -> dict[str, Any]:
    return {name: inputs[name] for name in case.mutated}


def _seen(case: Case, result: Any) -> Any:
    """What is compared of a result, always nested in the same way."""
    return _as_tuple(result if case.comparable is None else case.comparable(result))


def _as_tuple(result: Any) -> tuple[Any, ...]:
    if result is None:
        return ()
    return result if isinstance(result, tuple) else (result,)


def _given(case: Case, expected: Any) -> tuple[dict[str, Any], list[Guarded]]:
    guards: list[Guarded] = []

    def poisoned(like: torch.Tensor) -> torch.Tensor:
        guards.append(Guarded(like))
        return guards[-1].tensor

    given = {
        name: map_tensors(want, poisoned) for name, want in zip(case.outputs, _as_tuple(expected), strict=True)
    }
    return given, guards
