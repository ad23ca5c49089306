"""The conformance check itself: it sees each kind of fault. Ops of an invented family stand for kernels with that fault."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

from tokenspeed_kernel.case import Case, Tolerance
from tokenspeed_kernel.ops.kvcache.cases import CASES as KVCACHE_CASES
from tokenspeed_kernel.testing import ConformanceError, check_case

CPU = torch.device("cpu")


def _inputs(generator: torch.Generator, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    return {"x": torch.randn(3, 5, generator=generator).to(device, dtype)}


@pytest.fixture
def toy_op(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Make `toy.double` of a reference and a kernel."""

    def make(kernel: Callable[..., Any], reference: Callable[..., Any]) -> None:
        module = ModuleType("tokenspeed_kernel.ops.toy")

        def double(solution: str | None = None, **arguments: Any) -> Any:
            return (reference if solution == "reference" else kernel)(**arguments)

        module.double = double  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, module.__name__, module)

    return make


def _double(x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    return torch.mul(x, 2, out=out)


def _spill(x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    result = _double(x, out)
    if out is not None:
        out.as_strided((1,), (1,), out.storage_offset() + out.numel()).fill_(1)
    return result


def _forget_last_row(x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    if out is None:
        return x * 2
    out[:-1] = x[:-1] * 2
    return out


def _off_at_one_place(x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    result = _double(x, out)
    result[1, 2] += 1
    return result


def _scale_input(x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    return _double(x.mul_(1.5), out) / 1.5 if out is None else _double(x, out)


@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        (_off_at_one_place, r"1 of 15 elements differ .*first at \[1, 2\]"),
        (_forget_last_row, r"with given outputs: output\[0\]: 5 of 15 elements differ"),
        (_spill, "memory beside an output was written"),
        (lambda x, out=None: _double(x), "out was given, but another tensor was returned"),
        (lambda x, out=None: _double(x).double(), "expected dtype torch.float32, got torch.float64"),
        (lambda x, out=None: _double(x)[:2], r"expected shape torch.Size\(\[3, 5\]\), got torch.Size\(\[2, 5\]\)"),
        (lambda x, out=None: (_double(x), x), r"expected output\[0\], got output\[0\], output\[1\]"),
        (lambda x, out=None: _double(x) * math.inf, "15 of 15 elements differ beyond"),
        (lambda x, out=None: _double(x) * math.nan, "15 of 15 elements differ beyond"),
        (_scale_input, "input x was changed"),
    ],
)
def test_a_fault_is_found(toy_op: Callable[..., None], kernel: Callable[..., Any], message: str) -> None:
    toy_op(kernel, _double)
    with pytest.raises(ConformanceError, match=message):
        check_case(Case("toy.double", "3x5", _inputs), solution="toy", device=CPU, dtype=torch.float32)


def test_a_right_kernel_passes_with_figures(toy_op: Callable[..., None]) -> None:
    toy_op(lambda x, out=None: _double(x, out).mul_(1 + 1e-6), _double)
    difference = check_case(Case("toy.double", "3x5", _inputs), solution="toy", device=CPU, dtype=torch.float32)
    assert 0 < difference.absolute < 1e-5
    assert difference.relative == pytest.approx(1e-6, rel=0.2)
    assert difference.cosine == pytest.approx(1)


def test_a_loose_tolerance_does_not_hide_another_direction(toy_op: Callable[..., None]) -> None:
    toy_op(lambda x, out=None: torch.mul(x, 1.9, out=out) * 0 + 2 * x.roll(1) if out is None else out, _double)
    case = Case("toy.double", "3x5", _inputs, outputs=(), tolerance={torch.float32: Tolerance(10.0, 0.1)})
    with pytest.raises(ConformanceError, match="cosine of at least"):
        check_case(case, solution="toy", device=CPU, dtype=torch.float32)


def _special(generator: torch.Generator, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    return {"x": torch.tensor([1.0, math.nan, math.inf, -math.inf], dtype=dtype)}


def test_nan_and_infinity_must_be_where_the_reference_has_them(toy_op: Callable[..., None]) -> None:
    case = Case("toy.double", "special", _special)
    toy_op(_double, _double)
    check_case(case, solution="toy", device=CPU, dtype=torch.float32)
    toy_op(lambda x, out=None: _double(x.abs(), out), _double)
    with pytest.raises(ConformanceError, match=r"1 of 4 .* not finite; first at \[3\]: expected -inf, got inf"):
        check_case(case, solution="toy", device=CPU, dtype=torch.float32)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_outputs_of_other_dtypes_agree_exactly_or_within_a_tolerance(toy_op: Callable[..., None], dtype: torch.dtype) -> None:
    def convert(x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        values = (x.abs() * 4).to(dtype)
        return values if out is None else out.copy_(values)

    def shift(x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        return convert(x + (0.26 if dtype is not torch.bool else -x), out)

    toy_op(convert, convert)
    check_case(Case("toy.double", "3x5", _inputs), solution="toy", device=CPU, dtype=torch.float32)
    toy_op(shift, convert)
    with pytest.raises(ConformanceError, match="elements differ"):
        check_case(Case("toy.double", "3x5", _inputs), solution="toy", device=CPU, dtype=torch.float32)
    loose = Case("toy.double", "3x5", _inputs, tolerance={dtype: Tolerance(0.25, 2.5)})
    check_case(loose, solution="toy", device=CPU, dtype=torch.float32)


def test_what_is_compared_can_be_chosen(toy_op: Callable[..., None]) -> None:
    toy_op(lambda x: x.flip(0), lambda x: x)
    free = Case("toy.double", "3x5", _inputs, outputs=(), comparable=lambda result: result.flatten().sort().values)
    check_case(free, solution="toy", device=CPU, dtype=torch.float32)
    with pytest.raises(ConformanceError, match="elements differ"):
        check_case(Case("toy.double", "3x5", _inputs, outputs=()), solution="toy", device=CPU, dtype=torch.float32)


def _pool(generator: torch.Generator, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    return {"x": torch.randn(4, 5, generator=generator).to(device, dtype)[1:3, :4]}


@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        (lambda x: x.mul_(2) * 0, r"output\[0\]: 8 of 8"),
        (lambda x: x[0].mul_(2) and None, r"expected output\[0\], got no tensor"),
        (lambda x: x.as_strided((3, 5), (5, 1), 5).mul_(2)[:2, :4], "memory around x was written"),
        (lambda x: x * 2, r"in place: output.x: 8 of 8 elements differ"),
    ],
)
def test_what_is_written_in_place_is_compared(toy_op: Callable[..., None], kernel: Callable[..., Any], message: str) -> None:
    case = Case("toy.double", "pool", _pool, outputs=(), mutated=("x",))
    toy_op(lambda x: x.mul_(2), lambda x: x.mul_(2))
    check_case(case, solution="toy", device=CPU, dtype=torch.float32)

    def faulty(x: torch.Tensor) -> Any:
        return None if "no tensor" in message else kernel(x)

    toy_op(faulty, lambda x: x.mul_(2))
    with pytest.raises(ConformanceError, match=message):
        check_case(case, solution="toy", device=CPU, dtype=torch.float32)


@pytest.mark.parametrize("case", [case for case in KVCACHE_CASES if not case.bench], ids=str)
def test_cache_write(case: Case) -> None:
    """What is copied is copied exactly; what is rotated on the way is held to the bounds of its cases."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        difference = check_case(case, solution="cpu", device=CPU, dtype=dtype)
        assert difference.absolute == 0 or case.op == "kvcache.rope_write_kv"
