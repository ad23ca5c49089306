"""Element offsets beyond 2**31 (public report K3): rows of a sparse file that is mapped into memory."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from tokenspeed_kernel.ops.activation import silu_and_mul
from tokenspeed_kernel.ops.embedding import embedding
from tokenspeed_kernel.ops.gemm import mm
from tokenspeed_kernel.ops.norm import fused_add_rms_norm, rms_norm

ROW_STRIDE = 2**31 + 64
"""Elements: the second row starts where a 32-bit offset has wrapped to a negative number."""
WIDTH = 24


@pytest.fixture(params=["cpu", "triton"])
def solution(request: pytest.FixtureRequest) -> str:
    """Every solution that runs on this machine without a GPU."""
    if request.param == "triton":
        pytest.importorskip("triton", reason="needs triton")
        if torch.cuda.is_available():
            pytest.skip("the interpreter is for machines without a GPU")
    return str(request.param)


@pytest.fixture
def far_rows(tmp_path: Path) -> torch.Tensor:
    """[2, WIDTH] fp32 whose second row lies more than 2**31 elements behind the first, in a file with two written pages."""
    path = tmp_path / "sparse.bin"
    num_elements = ROW_STRIDE + WIDTH
    with path.open("wb") as file:
        file.truncate(num_elements * 4)
    if path.stat().st_blocks * 512 > 2**20:
        pytest.skip("needs a file system with sparse files")
    storage = torch.from_file(os.fspath(path), shared=True, size=num_elements, dtype=torch.float32)
    rows = storage.as_strided((2, WIDTH), (ROW_STRIDE, 1))
    rows.copy_(torch.randn(2, WIDTH))
    return rows


def _near(rows: torch.Tensor) -> torch.Tensor:
    return rows.clone(memory_format=torch.contiguous_format)


def test_embedding(far_rows: torch.Tensor, solution: str) -> None:
    token_ids = torch.tensor([1, 0, 1])
    assert torch.equal(embedding(token_ids, far_rows, solution=solution), _near(far_rows)[token_ids])


def test_rms_norm(far_rows: torch.Tensor, solution: str) -> None:
    weight = torch.randn(WIDTH)
    want = rms_norm(_near(far_rows), weight, solution="reference")
    torch.testing.assert_close(rms_norm(far_rows, weight, solution=solution), want, rtol=1e-5, atol=1e-6)
    rms_norm(far_rows, weight, out=far_rows, solution=solution)
    torch.testing.assert_close(_near(far_rows), want, rtol=1e-5, atol=1e-6)


def test_fused_add_rms_norm(far_rows: torch.Tensor, solution: str) -> None:
    weight, x = torch.randn(WIDTH), torch.randn(2, WIDTH)
    want = fused_add_rms_norm(x, _near(far_rows), weight, solution="reference")
    got = fused_add_rms_norm(x, far_rows, weight, residual_out=far_rows, solution=solution)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def test_silu_and_mul(far_rows: torch.Tensor, solution: str) -> None:
    want = silu_and_mul(_near(far_rows), solution="reference")
    torch.testing.assert_close(silu_and_mul(far_rows, solution=solution), want, rtol=1e-5, atol=1e-6)


def test_mm(far_rows: torch.Tensor, solution: str) -> None:
    other = torch.randn(5, WIDTH)
    for x, weight in ((far_rows, other), (other, far_rows), (far_rows[1:], far_rows)):
        want = mm(_near(x), _near(weight), solution="reference")
        torch.testing.assert_close(mm(x, weight, solution=solution), want, rtol=1e-5, atol=1e-5)
    far_rows.zero_()
    out = far_rows[:, :5]
    x = torch.randn(2, 7)
    mm(x, other[:, :7], out=out, solution=solution)
    torch.testing.assert_close(_near(out), mm(x, other[:, :7], solution="reference"), rtol=1e-5, atol=1e-5)
