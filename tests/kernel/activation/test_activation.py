"""The activation ops: every kernel against the reference, and shapes."""

from __future__ import annotations

import pytest
import torch

from tokenspeed_kernel.errors import ShapeError
from tokenspeed_kernel.ops.activation import silu_and_mul
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
