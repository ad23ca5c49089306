"""The activation ops: every kernel against the reference, and shapes."""

from __future__ import annotations

import pytest
import torch

from tokenspeed_kernel.errors import ShapeError
from tokenspeed_kernel.ops.activation import gelu_and_mul, silu_and_mul, swiglu_clamped
from tokenspeed_kernel.ops.activation.cases import CASES
from tokenspeed_kernel.testing import check_case

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_cpu(case, dtype: torch.dtype) -> None:  # type: ignore[no-untyped-def]
    check_case(case, solution="cpu", device=CPU, dtype=dtype)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for machines without a GPU")
@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", [case for case in CASES if not case.bench], ids=str)
def test_triton_interpreted(case, dtype: torch.dtype) -> None:  # type: ignore[no-untyped-def]
    pytest.importorskip("triton", reason="needs triton")
    check_case(case, solution="triton", device=CPU, dtype=dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_triton_on_gpu(case, dtype: torch.dtype) -> None:  # type: ignore[no-untyped-def]
    check_case(case, solution="triton", device=torch.device("cuda"), dtype=dtype)


@pytest.mark.parametrize("solution", [None, "reference"])
def test_gate_comes_first(solution: str | None) -> None:
    gate_up = torch.tensor([[0.0, 1.0, 5.0, 3.0]])
    expected = torch.tensor([[0.0, 3.0 / (1.0 + torch.tensor(-1.0).exp().item())]])
    torch.testing.assert_close(silu_and_mul(gate_up, solution=solution), expected)


@pytest.mark.parametrize(
    ("shape", "out", "message"),
    [
        ((2, 7), None, r"expected gate_up \[\.\.\., 2 \* inner\], got gate_up \[2, 7\]"),
        ((), None, r"got gate_up \[\]"),
        ((2, 8), (2, 8), r"expected out \[2, 4\] torch\.float32, got \[2, 8\]"),
        ((2, 3, 8), (2, 4), r"expected out \[2, 3, 4\]"),
    ],
)
def test_shape_errors(shape: tuple[int, ...], out: tuple[int, ...] | None, message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        silu_and_mul(torch.zeros(shape), out=None if out is None else torch.zeros(out))


def test_dtype_of_out_is_checked() -> None:
    with pytest.raises(ShapeError, match=r"got \[2, 4\] torch\.float16"):
        silu_and_mul(torch.zeros(2, 8), out=torch.zeros(2, 4).half())


@pytest.mark.parametrize("solution", [None, "reference"])
def test_clamps_apply_before_the_gate(solution: str | None) -> None:
    """Gate from above alone, up from both sides, then the offset."""
    gate_up = torch.tensor([[9.0, -9.0, 0.5, 2.0, -9.0, 0.25]])  # gates 9, -9, 0.5; ups 2, -9, 0.25
    got = swiglu_clamped(gate_up, 1.0, alpha=2.0, up_offset=1.0, solution=solution)
    gates, ups = torch.tensor([1.0, -9.0, 0.5]), torch.tensor([2.0, 0.0, 1.25])
    torch.testing.assert_close(got, (gates / (1 + torch.exp(-2 * gates)) * ups)[None])


def test_interleaved_is_the_halves_in_another_order() -> None:
    halves = torch.randn(3, 10)
    mixed = halves.view(3, 2, 5).transpose(1, 2).reshape(3, 10)
    torch.testing.assert_close(swiglu_clamped(mixed, 0.7, interleaved=True), swiglu_clamped(halves, 0.7))


def test_without_limits_the_clamped_gate_is_silu() -> None:
    gate_up = torch.randn(4, 16) * 10
    torch.testing.assert_close(swiglu_clamped(gate_up, float("inf")), silu_and_mul(gate_up))


def test_nan_stays_nan() -> None:
    gate_up = torch.tensor([[float("nan"), 1.0, 1.0, float("nan")]])
    for solution in ("cpu", "reference"):
        assert swiglu_clamped(gate_up, 7.0, solution=solution).isnan().all()
        assert gelu_and_mul(gate_up, solution=solution).isnan().all()


@pytest.mark.parametrize("limit", [0.0, -1.0, float("nan")])
def test_limit_is_checked(limit: float) -> None:
    with pytest.raises(ShapeError, match=r"activation\.swiglu_clamped: expected limit > 0, got limit="):
        swiglu_clamped(torch.zeros(2, 8), limit)


def test_approximate_is_checked() -> None:
    with pytest.raises(ShapeError, match="expected approximate"):
        gelu_and_mul(torch.zeros(2, 8), approximate="fast")


@pytest.mark.parametrize("op", [lambda x, out=None: swiglu_clamped(x, 1.0, out=out), gelu_and_mul], ids=["swiglu_clamped", "gelu"])
def test_shapes_of_the_other_gates_are_checked(op) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ShapeError, match=r"got gate_up \[2, 7\]"):
        op(torch.zeros(2, 7))
    with pytest.raises(ShapeError, match=r"expected out \[2, 4\] torch\.float32, got \[2, 8\]"):
        op(torch.zeros(2, 8), out=torch.zeros(2, 8))
    with pytest.raises(ShapeError, match=r"got \[2, 4\] torch\.float16"):
        op(torch.zeros(2, 8), out=torch.zeros(2, 4).half())


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("swiglu_clamped", (torch.randn(3, 8), 0.5)),
        ("swiglu_clamped", (torch.randn(8, 3).t(), 7.0, 1.702, 1.0, True)),
        ("gelu_and_mul", (torch.randn(2, 3, 8), "tanh")),
        ("gelu_and_mul", (torch.randn(0, 8),)),
    ],
)
def test_opcheck(name: str, arguments: tuple[object, ...]) -> None:
    torch.library.opcheck(getattr(torch.ops.tokenspeed, name).default, arguments)
