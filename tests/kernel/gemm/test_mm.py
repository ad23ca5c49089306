"""The matrix product: every kernel against the reference, precision, and shapes."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch

from tokenspeed_kernel.errors import NoKernelError, ShapeError
from tokenspeed_kernel.ops.gemm import mm
from tokenspeed_kernel.ops.gemm.cases import DENSE_CASES
from tokenspeed_kernel.platform import platform_of
from tokenspeed_kernel.testing import check_case

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MM_CASES = list(DENSE_CASES)
SMALL = [case for case in MM_CASES if not case.bench]


def rows_of(case) -> int:  # type: ignore[no-untyped-def]
    x = case.build(torch.Generator().manual_seed(0), CPU, torch.float32)["x"]
    return math.prod(x.shape[:-1])


PLAIN = [case for case in MM_CASES if "fp32" not in case.label]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", MM_CASES, ids=str)
def test_cpu(case, dtype: torch.dtype) -> None:  # type: ignore[no-untyped-def]
    check_case(case, solution="cpu_mm", device=CPU, dtype=dtype)


@pytest.mark.skipif("bf16_dot" not in platform_of(CPU).features, reason="needs a processor with bf16 dot products")
@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_cpu_bf16(case) -> None:  # type: ignore[no-untyped-def]
    check_case(case, solution="cpu_mm_bf16", device=CPU, dtype=torch.bfloat16)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for machines without a GPU")
@pytest.mark.parametrize("solution", ["triton_mm", "triton_mm_few_rows"])
@pytest.mark.parametrize("case", SMALL, ids=str)
def test_triton_interpreted(case, solution: str) -> None:  # type: ignore[no-untyped-def]
    """In float32 only: the interpreter multiplies bf16 operands as if they were integers."""
    pytest.importorskip("triton", reason="needs triton")
    if solution == "triton_mm_few_rows" and rows_of(case) > 16:
        pytest.skip("it takes at most 16 rows")
    check_case(case, solution=solution, device=CPU, dtype=torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("solution", ["triton_mm", "triton_mm_few_rows"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", MM_CASES, ids=str)
def test_triton_on_gpu(case, dtype: torch.dtype, solution: str) -> None:  # type: ignore[no-untyped-def]
    if solution == "triton_mm_few_rows" and rows_of(case) > 16:
        pytest.skip("it takes at most 16 rows")
    check_case(case, solution=solution, device=torch.device("cuda"), dtype=dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", MM_CASES, ids=str)
def test_cublas(case, dtype: torch.dtype) -> None:  # type: ignore[no-untyped-def]
    if case.label.startswith("fp32 bias") and dtype is not torch.float32:
        pytest.skip("cublas takes a bias of the operands' dtype")
    check_case(case, solution="cublas", device=torch.device("cuda"), dtype=dtype)


@pytest.fixture
def reduced_precision_allowed() -> Iterator[None]:
    """Someone in the process has allowed tf32 and bf16 for float32 products."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.usefixtures("reduced_precision_allowed")
def test_float32_stays_exact_and_the_setting_is_put_back_on_cpu() -> None:
    _check_exact(CPU, "cpu")
    assert torch.backends.mkldnn.matmul.fp32_precision == "bf16"


@pytest.mark.gpu
@pytest.mark.usefixtures("reduced_precision_allowed")
@pytest.mark.parametrize("solution", ["cublas", "triton"])
def test_float32_stays_exact_and_the_setting_is_put_back_on_gpu(solution: str) -> None:
    _check_exact(torch.device("cuda"), solution)
    assert torch.backends.cuda.matmul.fp32_precision == "tf32"


def _check_exact(device: torch.device, solution: str) -> None:
    for case in MM_CASES:
        if case.label in ("1x1536x576", "16x576x1536", "100x3072x576"):
            check_case(case, solution=solution, device=device, dtype=torch.float32)


def test_integers_come_out_exactly() -> None:
    x, weight = torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([[1.0, 0.0, -1.0], [2.0, 2.0, 2.0]])
    for dtype in DTYPES:
        got = mm(x.to(dtype), weight.to(dtype), torch.tensor([10.0, 20.0]).to(dtype))
        assert got.tolist() == [[8.0, 32.0]]


def test_rows_do_not_depend_on_their_number() -> None:
    """One row is doubled inside, few rows go another way than many: the values are those of each row alone, to rounding."""
    x, weight = torch.randn(40, 64), torch.randn(48, 64)
    whole = mm(x, weight)
    for count in (1, 2, 4, 5, 8, 9, 33):
        torch.testing.assert_close(mm(x[:count], weight), whole[:count], rtol=1e-5, atol=1e-5)


def test_result_is_contiguous_whatever_way_it_was_computed() -> None:
    for rows in (1, 3, 40):
        assert mm(torch.randn(rows, 16), torch.randn(24, 16)).is_contiguous()


def test_output_dtype() -> None:
    x, weight = torch.randn(2, 16).bfloat16(), torch.randn(8, 16).bfloat16()
    exact = mm(x, weight, out_dtype=torch.float32, solution="reference")
    got = mm(x, weight, out_dtype=torch.float32)
    assert got.dtype is torch.float32
    torch.testing.assert_close(got, exact, rtol=1e-5, atol=1e-5)
    out = torch.empty(2, 8)
    assert mm(x, weight, out=out) is out, "the dtype of out is taken where out_dtype is not given"
    torch.testing.assert_close(out, exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("x", "weight", "bias", "out", "message"),
    [
        ((2, 8), (4, 7), None, None, r"got x \[2, 8\] and weight \[4, 7\]\nFix: .*stored as \[in, out\] needs \.t\(\)"),
        ((2, 8), (8,), None, None, r"weight \[8\]"),
        ((), (4, 1), None, None, r"got x \[\]"),
        ((2, 8), (4, 8), (8,), None, r"expected bias \[4\], got bias \[8\]"),
        ((2, 8), (4, 8), (1, 4), None, r"got bias \[1, 4\]"),
        ((2, 8), (4, 8), None, (4, 2), r"expected out \[2, 4\] torch\.float32, got \[4, 2\]"),
        ((2, 3, 8), (4, 8), None, (6, 4), r"expected out \[2, 3, 4\]"),
    ],
)
def test_shape_errors(x, weight, bias, out, message: str) -> None:  # type: ignore[no-untyped-def]
    tensors = [None if shape is None else torch.zeros(shape) for shape in (x, weight, bias, out)]
    with pytest.raises(ShapeError, match=message):
        mm(tensors[0], tensors[1], tensors[2], out=tensors[3])  # type: ignore[arg-type]


def test_dtypes_are_checked() -> None:
    x, weight = torch.zeros(2, 8), torch.zeros(4, 8)
    with pytest.raises(ShapeError, match=r"expected out .* torch\.float16, got .* torch\.float32"):
        mm(x, weight, out=torch.zeros(2, 4), out_dtype=torch.float16)
    with pytest.raises(NoKernelError, match=r"cpu_mm: formats in .*got x=fp32, weight=bf16"):
        mm(x, weight.bfloat16())
    with pytest.raises(NoKernelError, match=r"out=fp64(.|\n)*cpu_mm: out in \{bf16, fp16, fp32\}, got fp64"):
        mm(x, weight, out_dtype=torch.float64)
