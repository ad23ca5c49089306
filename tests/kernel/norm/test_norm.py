"""The norm ops: every kernel against the reference, shapes, aliasing."""

from __future__ import annotations

import pytest
import torch

from tokenspeed_kernel.errors import ShapeError
from tokenspeed_kernel.ops.norm import fused_add_rms_norm, rms_norm
from tokenspeed_kernel.ops.norm.cases import CASES
from tokenspeed_kernel.testing import check_case

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SMALL = [case for case in CASES if not case.bench]
ON_CPU = [case for case in CASES if not case.bench or case.label == "16x576"]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", ON_CPU, ids=str)
def test_cpu(case, dtype: torch.dtype) -> None:  # type: ignore[no-untyped-def]
    check_case(case, solution="cpu", device=CPU, dtype=dtype)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for machines without a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", SMALL, ids=str)
def test_triton_interpreted(case, dtype: torch.dtype) -> None:  # type: ignore[no-untyped-def]
    pytest.importorskip("triton", reason="needs triton")
    check_case(case, solution="triton", device=CPU, dtype=dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_triton_on_gpu(case, dtype: torch.dtype) -> None:  # type: ignore[no-untyped-def]
    check_case(case, solution="triton", device=torch.device("cuda"), dtype=dtype)


def test_known_values() -> None:
    x = torch.tensor([[3.0, 4.0], [0.0, 0.0]])
    weight = torch.tensor([1.0, 2.0])
    rms = (12.5 + 1e-6) ** 0.5
    expected = torch.tensor([[3 / rms, 8 / rms], [0.0, 0.0]])
    torch.testing.assert_close(rms_norm(x, weight), expected)
    torch.testing.assert_close(rms_norm(x, weight, solution="reference"), expected)
    normed, total = fused_add_rms_norm(torch.ones(1, 2), torch.tensor([[2.0, 3.0]]), weight)
    assert total.tolist() == [[3.0, 4.0]]
    torch.testing.assert_close(normed, expected[:1])


@pytest.mark.parametrize("solution", ["cpu", "reference", "triton"])
def test_outputs_may_alias_inputs(solution: str) -> None:
    if solution == "triton":
        pytest.importorskip("triton", reason="needs triton")
        if torch.cuda.is_available():
            pytest.skip("the interpreter is for machines without a GPU")
    x, residual, weight = torch.randn(3, 24), torch.randn(3, 24), torch.randn(24)
    want, total = fused_add_rms_norm(x, residual, weight, solution="reference")
    out, residual_out = x.clone(), residual.clone()
    fused_add_rms_norm(out, residual_out, weight, out=out, residual_out=residual_out, solution=solution)
    torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(residual_out, total)
    alone = x.clone()
    rms_norm(alone, weight, out=alone, solution=solution)
    torch.testing.assert_close(alone, rms_norm(x, weight, solution="reference"), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("solution", ["cpu", "reference", "triton"])
@pytest.mark.parametrize("op", ["rms_norm", "fused_add_rms_norm"])
def test_a_transposed_input_is_read_by_its_strides(op: str, solution: str) -> None:
    """Case Z10: the rows of x.t(), whose last dimension has the large stride, give what their contiguous copy gives."""
    if solution == "triton":
        pytest.importorskip("triton", reason="needs triton")
        if torch.cuda.is_available():
            pytest.skip("the interpreter is for machines without a GPU")
    generator = torch.Generator().manual_seed(3)
    x, residual = (torch.randn(24, 5, generator=generator).t() for _ in range(2))
    weight = torch.randn(48, generator=generator)[::2]
    assert x.stride(-1) != 1
    if op == "rms_norm":
        got, want = rms_norm(x, weight, solution=solution), rms_norm(x.contiguous(), weight.contiguous(), solution=solution)
    else:
        got, total = fused_add_rms_norm(x, residual, weight, solution=solution)
        want, _ = fused_add_rms_norm(x.contiguous(), residual.contiguous(), weight.contiguous(), solution=solution)
        assert torch.equal(total, x + residual)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("solution", ["cpu", "triton"])
def test_output_with_strides_of_its_own(solution: str) -> None:
    if solution == "triton":
        pytest.importorskip("triton", reason="needs triton")
        if torch.cuda.is_available():
            pytest.skip("the interpreter is for machines without a GPU")
    x, weight = torch.randn(2, 3, 10), torch.randn(10)
    out = torch.full((2, 10, 3), float("nan")).transpose(1, 2)
    assert rms_norm(x, weight, out=out, solution=solution) is out
    torch.testing.assert_close(out, rms_norm(x, weight, solution="reference"), rtol=1e-5, atol=1e-6)


def test_half_precision_beside_a_float32_weight() -> None:
    x, weight = torch.randn(4, 32).bfloat16(), torch.randn(32)
    got = rms_norm(x, weight)
    assert got.dtype is torch.bfloat16
    torch.testing.assert_close(got, rms_norm(x, weight, solution="reference"), rtol=1.6e-2, atol=1e-2)


def test_fused_is_the_two_ops() -> None:
    x, residual, weight = torch.randn(4, 32).half(), torch.randn(4, 32).half(), torch.randn(32).half()
    normed, total = fused_add_rms_norm(x, residual, weight)
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, rms_norm(total, weight))


@pytest.mark.parametrize(
    ("x", "weight", "out", "message"),
    [
        ((2, 8), (7,), None, r"expected x \[\.\.\., hidden\] and weight \[hidden\], got x \[2, 8\] and weight \[7\]"),
        ((2, 8), (1, 8), None, r"weight \[1, 8\]"),
        ((), (1,), None, r"got x \[\]"),
        ((2, 8), (8,), (8, 2), r"expected out \[2, 8\] torch\.float32, got \[8, 2\]"),
        ((2, 8), (8,), (8,), r"expected out \[2, 8\]"),
    ],
)
def test_shape_errors(x: tuple[int, ...], weight: tuple[int, ...], out: tuple[int, ...] | None, message: str) -> None:
    with pytest.raises(ShapeError, match=rf"norm\.rms_norm: .*{message}(.|\n)*Fix: "):
        rms_norm(torch.zeros(x), torch.zeros(weight), out=None if out is None else torch.zeros(out))


def test_dtype_of_outputs_is_checked_each_time() -> None:
    x, weight = torch.zeros(2, 8), torch.zeros(8)
    rms_norm(x, weight, out=torch.empty(2, 8))
    for _ in range(2):
        with pytest.raises(ShapeError, match=r"expected out \[2, 8\] torch\.float32, got \[2, 8\] torch\.float16"):
            rms_norm(x, weight, out=torch.empty(2, 8, dtype=torch.float16))
        with pytest.raises(ShapeError, match="expected residual"):
            fused_add_rms_norm(x, x.half(), weight)
        with pytest.raises(ShapeError, match="expected residual_out"):
            fused_add_rms_norm(x, x, weight, residual_out=torch.empty(2, 8).half())
    with pytest.raises(ShapeError, match=r"expected residual \[2, 8\]"):
        fused_add_rms_norm(x, torch.zeros(8), weight)
    out = torch.empty(2, 8)
    with pytest.raises(ShapeError, match="one tensor for both"):
        fused_add_rms_norm(x, x, weight, out=out, residual_out=out)
