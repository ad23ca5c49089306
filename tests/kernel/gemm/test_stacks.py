"""Products of stacks: every kernel against the reference, and what is refused."""

from __future__ import annotations

import pytest
import torch

from tokenspeed_kernel import Format, QuantizedTensor, ShapeError
from tokenspeed_kernel.ops.embedding import embedding
from tokenspeed_kernel.ops.gemm import bmm, grouped_mm_contiguous, grouped_mm_masked, mm
from tokenspeed_kernel.ops.gemm.cases_stacks import STACK_CASES
from tokenspeed_kernel.ops.quantization import dequantize
from tokenspeed_kernel.ops.quantization.cases import random_quantized
from tokenspeed_kernel.testing import check_case

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SMALL = [case for case in STACK_CASES if not case.bench]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", SMALL, ids=str)
def test_cpu(case, dtype: torch.dtype) -> None:  # type: ignore[no-untyped-def]
    check_case(case, solution="cpu", device=CPU, dtype=dtype)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for machines without a GPU")
@pytest.mark.parametrize("case", SMALL, ids=str)
def test_triton_interpreted(case) -> None:  # type: ignore[no-untyped-def]
    """In float32 only: the interpreter multiplies bf16 operands as if they were integers."""
    pytest.importorskip("triton", reason="needs triton")
    check_case(case, solution="triton", device=CPU, dtype=torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", SMALL, ids=str)
def test_triton_on_gpu(case, dtype: torch.dtype) -> None:  # type: ignore[no-untyped-def]
    check_case(case, solution="triton", device=torch.device("cuda"), dtype=dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [case for case in STACK_CASES if case.bench], ids=str)
def test_real_sizes_on_gpu(case) -> None:  # type: ignore[no-untyped-def]
    check_case(case, solution="triton", device=torch.device("cuda"), dtype=torch.bfloat16)


PLAIN_BMM = [case for case in STACK_CASES if case.op == "gemm.bmm" and "@" not in case.label]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", PLAIN_BMM, ids=str)
def test_cublas(case, dtype: torch.dtype) -> None:  # type: ignore[no-untyped-def]
    check_case(case, solution="cublas", device=torch.device("cuda"), dtype=dtype)


@pytest.mark.parametrize("case", PLAIN_BMM, ids=str)
def test_calls_of_the_library_on_the_cpu(case) -> None:  # type: ignore[no-untyped-def]
    """PyTorch has the same function for the CPU; a wider output alone it has not."""
    from tokenspeed_kernel.ops.gemm.vendor.cublas_bmm import bmm as library_bmm

    inputs = case.build(torch.Generator().manual_seed(0), CPU, torch.float32)
    want = bmm(**inputs, solution="reference")
    tolerance = case.tolerance_of(torch.float32)
    torch.testing.assert_close(library_bmm(**inputs), want, rtol=tolerance.relative, atol=tolerance.absolute)
    out = torch.empty((*want.shape[:-1], 2 * want.shape[-1]))[..., ::2]
    assert library_bmm(**inputs, out=out) is out
    torch.testing.assert_close(out, want, rtol=tolerance.relative, atol=tolerance.absolute)


def test_experts_and_tables_beyond_two_to_the_31() -> None:
    """Bytes far apart in a storage of which only the touched pages exist: an offset of 32 bits would wrap."""
    fmt, rows, columns = Format.parse("gguf_q8_0@inline"), 3, 64
    near = random_quantized(fmt, (2, rows, columns), torch.Generator().manual_seed(0), CPU)
    far = torch.empty(2**31 + 4096, dtype=torch.uint8).as_strided((2, rows, near.data.shape[2]), (2**31, near.data.shape[2], 1))
    far.copy_(near.data)
    weight = QuantizedTensor(far, fmt, (2, rows, columns))
    x, offsets = torch.randn(5, columns), torch.tensor([0, 2, 5])
    table = QuantizedTensor(far[:, 0], fmt, (2, columns))
    solutions = ("cpu",) if torch.cuda.is_available() else ("cpu", "triton")
    for solution in solutions:
        want = grouped_mm_contiguous(x, near, offsets, solution="reference")
        torch.testing.assert_close(grouped_mm_contiguous(x, weight, offsets, solution=solution), want, rtol=1e-5, atol=1e-4)
        got = embedding(torch.tensor([1, 0]), table, solution=solution)
        assert torch.equal(got, dequantize(near)[[1, 0], 0])


def test_offsets_and_ids_say_the_same() -> None:
    x, weight = torch.randn(9, 16), torch.randn(4, 8, 16)
    by_offsets = grouped_mm_contiguous(x, weight, torch.tensor([0, 2, 2, 7, 8]))
    by_ids = grouped_mm_contiguous(x, weight, expert_ids=torch.tensor([0, 0, 2, 2, 2, 2, 2, 3, -1]))
    assert torch.equal(by_offsets, by_ids)
    assert by_offsets[8].tolist() == [0.0] * 8
    torch.testing.assert_close(by_offsets[2:7], mm(x[2:7], weight[2]))


@pytest.mark.parametrize("solution", ["cpu", "reference"])
def test_offsets_outside_of_the_rows_are_cut(solution: str) -> None:
    x, weight = torch.randn(4, 16), torch.randn(3, 8, 16)
    got = grouped_mm_contiguous(x, weight, torch.tensor([0, 2, 9, 9]), solution=solution)
    torch.testing.assert_close(got, torch.cat((mm(x[:2], weight[0]), mm(x[2:], weight[1]))))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x, w: bmm(x[0], w), r"x \[batch, rows, in_features\].* got x \[3, 16\] and weight \[2, 5, 16\]"),
        (lambda x, w: bmm(x, w.mT), r"weight \[2, 16, 5\]\nFix: transpose"),
        (lambda x, w: bmm(x, w, out=torch.zeros(2, 5, 3)), r"expected out \[2, 3, 5\] torch\.float32, got \[2, 5, 3\]"),
        (lambda x, w: grouped_mm_contiguous(x[0], w), r"one of offsets and expert_ids, got none"),
        (
            lambda x, w: grouped_mm_contiguous(x[0], w, torch.zeros(3).int(), torch.zeros(3).int()),
            r"one of offsets and expert_ids, got both",
        ),
        (lambda x, w: grouped_mm_contiguous(x[0], w, torch.zeros(2).int()), r"offsets \[3\] int32 or int64, got \[2\]"),
        (lambda x, w: grouped_mm_contiguous(x[0], w, expert_ids=torch.zeros(4).int()), r"expert_ids \[3\].* got \[4\]"),
        (lambda x, w: grouped_mm_contiguous(x, w, torch.zeros(3).int()), r"x \[num_rows, in_features\]"),
        (lambda x, w: grouped_mm_masked(x, w, torch.zeros(3).int()), r"masked_m \[2\] int32 or int64, got \[3\]"),
        (lambda x, w: grouped_mm_masked(x[:1], w, torch.zeros(1).int()), r"got x \[1, 3, 16\] and weight \[2, 5, 16\]"),
        (lambda x, w: grouped_mm_masked(x, w, torch.zeros(2).int().to("meta")), r"masked_m on meta"),
    ],
)
def test_what_does_not_fit_is_refused(call, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ShapeError, match=message):
        call(torch.zeros(2, 3, 16), torch.zeros(2, 5, 16))
