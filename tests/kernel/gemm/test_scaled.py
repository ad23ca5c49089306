"""`mm` and `pack_weight` with quantized operands: every kernel against the reference, precision, and what is refused."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from tokenspeed_kernel import Format, NoKernelError, QuantizedTensor, ShapeError
from tokenspeed_kernel.ops.gemm import bmm, grouped_mm_contiguous, grouped_mm_masked, mm, pack_weight
from tokenspeed_kernel.ops.gemm.cases_scaled import SCALED_CASES
from tokenspeed_kernel.ops.gemm.contract import WEIGHT_FORMATS
from tokenspeed_kernel.ops.quantization import dequantize
from tokenspeed_kernel.ops.quantization.cases import random_quantized
from tokenspeed_kernel.testing import check_case

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CUDA = torch.device("cuda")
SMALL = [case for case in SCALED_CASES if not case.bench]
BENCH = [case for case in SCALED_CASES if case.bench]
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for machines without a GPU")


def rows_of(case) -> int:  # type: ignore[no-untyped-def]
    return math.prod(case.build(torch.Generator().manual_seed(0), CPU, torch.float32)["x"].shape[:-1])


def weight_of(text: str, *shape: int, seed: int = 0) -> QuantizedTensor:
    return random_quantized(Format.parse(text), shape, torch.Generator().manual_seed(seed), CPU)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", SMALL, ids=str)
def test_cpu(case, dtype: torch.dtype) -> None:  # type: ignore[no-untyped-def]
    check_case(case, solution="cpu", device=CPU, dtype=dtype)


def _interpreted_runs():  # type: ignore[no-untyped-def]
    """Both kernels share the tile that decodes: of the one for few rows, formats of each kind will do unless time is no matter."""
    kinds = ("fp8_e4m3@block", "nvfp4", "gguf_q4_1", "gguf_q6_k", "uint4@group_64", "fp8_e4m3@token fp8_e4m3@channel")
    for case in SMALL:
        yield pytest.param(case, "triton_mm_scaled", id=f"{case.label}-scaled")
        if rows_of(case) <= 16:
            marks = () if case.label.startswith(kinds) else pytest.mark.slow
            yield pytest.param(case, "triton_mm_few_rows", id=f"{case.label}-few rows", marks=marks)


@interpreted
@pytest.mark.parametrize(("case", "solution"), _interpreted_runs())
def test_triton_interpreted(case, solution: str) -> None:  # type: ignore[no-untyped-def]
    """In float32 only: the interpreter multiplies bf16 operands as if they were integers."""
    pytest.importorskip("triton", reason="needs triton")
    check_case(case, solution=solution, device=CPU, dtype=torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("solution", ["triton_mm_scaled", "triton_mm_few_rows"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", SMALL, ids=str)
def test_triton_on_gpu(case, dtype: torch.dtype, solution: str) -> None:  # type: ignore[no-untyped-def]
    if solution == "triton_mm_few_rows" and rows_of(case) > 16:
        pytest.skip("it takes at most 16 rows")
    check_case(case, solution=solution, device=CUDA, dtype=dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("case", BENCH, ids=str)
def test_real_sizes_on_gpu(case) -> None:  # type: ignore[no-untyped-def]
    check_case(case, solution="triton", device=CUDA, dtype=torch.bfloat16)


def _takes_cublas(case, dtype: torch.dtype) -> bool:  # type: ignore[no-untyped-def]
    if not case.label.startswith(("fp8_e4m3@tensor fp8_e4m3@tensor", "fp8_e4m3@token fp8_e4m3@channel")):
        return False
    return "@tensor" in case.label or dtype is torch.bfloat16


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", SCALED_CASES, ids=str)
def test_cublas(case, dtype: torch.dtype) -> None:  # type: ignore[no-untyped-def]
    if not _takes_cublas(case, dtype):
        pytest.skip("cublas takes fp8 with a scale for a tensor, or for rows with a bf16 result")
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs a device that multiplies fp8")
    check_case(case, solution="cublas", device=CUDA, dtype=dtype)


@pytest.mark.parametrize("x", ["fp8_e4m3@tensor", "fp8_e4m3@token"])
@pytest.mark.parametrize("shape", [(5, 33, 40), (16, 32, 64), (0, 8, 16), (2, 3, 20, 32), (3, 5, 0)])
def test_calls_of_the_fp8_library_on_the_cpu(x: str, shape: tuple[int, ...]) -> None:
    """PyTorch has the same function for the CPU: sizes that are no multiple of 16, stacks, empty ones."""
    from tokenspeed_kernel.ops.gemm.vendor.cublas_fp8 import mm as library_mm

    *leading, features, depth = shape
    weight = weight_of("fp8_e4m3@tensor" if "tensor" in x else "fp8_e4m3@channel", features, depth)
    left = weight_of(x, *leading, depth)
    for bias in (None, torch.randn(features).bfloat16()):
        got = library_mm(left, weight, bias, out_dtype=torch.bfloat16)
        want = mm(left, weight, bias, out_dtype=torch.bfloat16, solution="reference")
        torch.testing.assert_close(got, want, rtol=1.6e-2, atol=1e-2)
        out = torch.empty_like(want)
        assert library_mm(left, weight, bias, out=out, out_dtype=torch.bfloat16) is out


@pytest.mark.parametrize("solution", ["plain", "reference", None])
@pytest.mark.parametrize("fmt", WEIGHT_FORMATS)
def test_packed_weight(fmt: str, solution: str | None) -> None:
    weight, x = weight_of(fmt, 24, 256), torch.randn(3, 256)
    packed = pack_weight(weight, solution=solution)
    assert (packed.out_features, packed.in_features) == (24, 256)
    expected = mm(x, weight, solution="reference")
    torch.testing.assert_close(packed(x), expected, rtol=1e-5, atol=1e-4)
    half = packed(x.bfloat16(), torch.ones(24))
    assert half.dtype is torch.bfloat16
    expected = mm(x.bfloat16(), weight, torch.ones(24), out_dtype=torch.float32, solution="reference")
    torch.testing.assert_close(half.float(), expected, rtol=1.6e-2, atol=0.1)
    out = torch.empty(3, 24)
    assert packed(x, out=out) is out
    with pytest.raises(ShapeError, match=r"expected x \[\.\.\., 256\] torch\.float32 or torch\.bfloat16 or torch\.float16"):
        packed(x.double())


def test_products_are_those_of_the_dequantized_weight() -> None:
    for fmt in WEIGHT_FORMATS:
        weight, x = weight_of(fmt, 24, 256), torch.randn(3, 256)
        torch.testing.assert_close(mm(x, weight), x @ dequantize(weight).t(), rtol=1e-5, atol=1e-4)


def test_dtypes_of_the_result() -> None:
    weight, x = weight_of("fp8_e4m3@channel", 24, 32), weight_of("fp8_e4m3@token", 3, 32)
    assert mm(x, weight).dtype is torch.bfloat16, "of a quantized x"
    assert mm(x, weight, out_dtype=torch.float16).dtype is torch.float16
    assert mm(x, weight, out=torch.empty(3, 24)).dtype is torch.float32
    assert mm(torch.zeros(3, 32).half(), weight).dtype is torch.float16
    assert bmm(weight_of("nvfp4@block_16", 2, 3, 32), weight_of("nvfp4@block_16", 2, 5, 32)).dtype is torch.bfloat16


def test_float32_stays_exact_where_reduced_precision_is_allowed() -> None:
    weight, x = weight_of("gguf_q4_1@inline", 256, 512), torch.randn(64, 512)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        got = mm(x, weight)
    finally:
        torch.set_float32_matmul_precision(before)
    torch.testing.assert_close(got, mm(x, weight, solution="reference"), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("name", ["mm", "bmm", "grouped_mm_contiguous", "grouped_mm_masked"])
def test_no_gradient_flows(name: str) -> None:
    x, weight = torch.randn(2, 3, 32, requires_grad=True), torch.randn(2, 5, 32, requires_grad=True)
    calls = {
        "mm": lambda: mm(x, weight[0], torch.zeros(5, requires_grad=True)),
        "bmm": lambda: bmm(x, weight),
        "grouped_mm_contiguous": lambda: grouped_mm_contiguous(x[0], weight, torch.tensor([0, 1, 3])),
        "grouped_mm_masked": lambda: grouped_mm_masked(x, weight, torch.tensor([1, 2])),
    }
    assert not calls[name]().requires_grad
    assert not mm(x, weight_of("int4@group_32", 5, 32)).requires_grad
    assert not pack_weight(weight[0])(x).requires_grad


def test_what_is_no_tensor_is_refused_by_name() -> None:
    x, weight = torch.zeros(2, 8), torch.zeros(4, 8)
    for call, message in (
        (lambda: mm(x, pack_weight(weight)), r"weight to be a tensor, got a PackedWeight\nFix: call the packed weight itself"),
        (lambda: mm([1.0], weight), r"x to be a tensor, got a list\nFix: make x a tensor"),
        (lambda: mm(np.zeros((2, 8), np.float32), weight), r"x to be a tensor, got a ndarray\nFix: pass torch\.from_numpy\(x\)"),
        (lambda: mm(x, np.zeros((4, 8), np.float32)), r"weight to be a tensor, got a ndarray"),
        (lambda: mm(x.to("meta"), weight.to("meta")), r"operands with data, got tensors on the meta device"),
        (lambda: mm(x.to("meta"), weight_of("fp8_e4m3@tensor", 4, 8).to("meta")), r"on the meta device"),
        (lambda: mm(None, weight_of("fp8_e4m3@tensor", 4, 8)), r"x to be a tensor, got None"),
        (lambda: bmm(x.tolist(), weight), r"x to be a tensor, got a list"),
        (lambda: pack_weight("w"), r"weight to be a tensor, got a str"),
        (lambda: pack_weight(weight)(x.tolist()), r"x to be a tensor, got a list"),
    ):
        with pytest.raises(ShapeError, match=message):
            call()  # type: ignore[no-untyped-call]


def test_shapes_devices_and_formats_are_checked() -> None:
    weight = weight_of("fp8_e4m3@channel", 4, 8)
    with pytest.raises(ShapeError, match=r"got x \[2, 7\] and weight \[4, 8\]"):
        mm(torch.zeros(2, 7), weight)
    with pytest.raises(ShapeError, match=r"expected bias \[4\], got bias \[8\]"):
        mm(torch.zeros(2, 8), weight, torch.zeros(8))
    with pytest.raises(ShapeError, match=r"expected out \[2, 4\] torch\.float32, got \[4, 2\]"):
        mm(torch.zeros(2, 8), weight, out=torch.zeros(4, 2))
    with pytest.raises(ShapeError, match=r"all operands on cpu, got weight on meta"):
        mm(torch.zeros(2, 8), weight.to("meta"))
    with pytest.raises(ShapeError, match=r"weight \[4, 2, 32\]"):
        mm(torch.zeros(2, 32), weight_of("nvfp4@block_16", 4, 2, 32))
    with pytest.raises(NoKernelError, match=r"x=fp64, weight=fp8_e4m3@channel"):
        mm(torch.zeros(2, 8).double(), weight)
    with pytest.raises(NoKernelError, match=r"x=int4@group_32, weight=int4@group_32"):
        mm(weight_of("int4@group_32", 4, 32), weight_of("int4@group_32", 4, 32))
