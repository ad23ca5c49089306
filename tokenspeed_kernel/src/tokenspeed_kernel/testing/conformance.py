"""Holds one kernel against the reference on one case."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

from tokenspeed_kernel.case import Case
from tokenspeed_kernel.errors import TokenSpeedKernelError

__all__ = ["ConformanceError", "check_case", "family_cases", "public_op"]


class ConformanceError(TokenSpeedKernelError, AssertionError):
    """A kernel's result is not the reference's, or it broke the op's contract."""


def public_op(op: str) -> Callable[..., Any]:
    """Return the public function of `family.op`."""
    family, _, name = op.partition(".")
    function: Callable[..., Any] = getattr(importlib.import_module(f"tokenspeed_kernel.ops.{family}"), name)
    return function


def family_cases(family: str) -> tuple[Case, ...]:
    """Return the cases of a family, as its `cases.py` lists them."""
    cases: tuple[Case, ...] = importlib.import_module(f"tokenspeed_kernel.ops.{family}.cases").CASES
    return cases


def check_case(case: Case, *, solution: str, device: torch.device, dtype: torch.dtype, seed: int = 0) -> None:
    """Run a case with `solution` and with the reference, and compare.

    Checked: values within the case's tolerance; shape, dtype and device; inputs left as they were; given outputs
    (poisoned with NaN, so that an element that is not written shows) are filled and returned.

    Raises:
        ConformanceError: something differs; the message says what and where.
        NoKernelError: the solution does not take this case.
    """
    function = public_op(case.op)
    inputs = case.build(torch.Generator().manual_seed(seed), device, dtype)
    saved = {name: value.clone() for name, value in inputs.items() if isinstance(value, torch.Tensor)}
    expected = _as_tuple(function(**inputs, solution="reference"))
    label = f"{case} {solution} {dtype} on {device}"
    _compare(case, label, _as_tuple(function(**inputs, solution=solution)), expected)
    if case.outputs:
        given = {name: _poisoned(want) for name, want in zip(case.outputs, expected, strict=True)}
        returned = _as_tuple(function(**inputs, **given, solution=solution))
        for name, result in zip(case.outputs, returned, strict=True):
            if result is not given[name]:
                raise ConformanceError(f"{label}: {name} was given, but another tensor was returned")
        _compare(case, f"{label} with given outputs", returned, expected)
    for name, value in saved.items():
        if not torch.allclose(value, inputs[name], rtol=0, atol=0, equal_nan=True):
            raise ConformanceError(f"{label}: input {name} was changed")


def _as_tuple(result: Any) -> tuple[torch.Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def _poisoned(like: torch.Tensor) -> torch.Tensor:
    fill = float("nan") if like.is_floating_point() else torch.iinfo(like.dtype).max
    return torch.full(like.shape, fill, dtype=like.dtype, device=like.device)


def _compare(case: Case, label: str, got: tuple[torch.Tensor, ...], want: tuple[torch.Tensor, ...]) -> None:
    for index, (mine, truth) in enumerate(zip(got, want, strict=True)):
        facts = [(one.shape, one.dtype, one.device) for one in (mine, truth)]
        if facts[0] != facts[1]:
            raise ConformanceError(f"{label}: output {index}: expected {facts[1]}, got {facts[0]}")
        tolerance = case.tolerance_of(truth.dtype)
        try:
            torch.testing.assert_close(mine, truth, rtol=tolerance.relative, atol=tolerance.absolute, equal_nan=True)
        except AssertionError as error:
            raise ConformanceError(f"{label}: output {index}: {error}") from error
