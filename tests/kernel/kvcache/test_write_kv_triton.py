"""The Triton cache write: in the interpreter here, on the device where there is one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tokenspeed_kernel.ops.kvcache import cases, write_kv

interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for machines without a GPU")


@pytest.fixture(autouse=True)
def _triton() -> None:
    pytest.importorskip("triton", reason="needs triton")


def check(shape: cases.Shape, dtype: torch.dtype, cache_dtype: torch.dtype, device: str) -> None:
    """Exact: the kernel moves and rounds as the reference does."""
    ours, reference = (cases.inputs(shape, dtype=dtype, cache_dtype=cache_dtype, device=device) for _ in range(2))
    write_kv(**ours, solution="triton")
    write_kv(**reference, solution="reference")
    for cache in ("k_cache", "v_cache"):
        assert torch.equal(ours[cache], reference[cache])


@interpreted
@pytest.mark.parametrize(
    ("dtype", "cache_dtype"),
    # The interpreter truncates fp32 to bf16 where devices round: that pair is left to them.
    [(torch.float32, torch.float32), (torch.float32, torch.float16), (torch.bfloat16, torch.bfloat16)],
    ids=str,
)
@pytest.mark.parametrize("shape", cases.SHAPES, ids=str)
def test_interpreted(shape: cases.Shape, dtype: torch.dtype, cache_dtype: torch.dtype) -> None:
    check(shape, dtype, cache_dtype, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [*cases.SHAPES, cases.Shape("large", 4096, 512, 16, 8, 128)], ids=str)
def test_on_gpu(shape: cases.Shape, dtype: torch.dtype) -> None:
    check(shape, dtype, dtype, "cuda")
    check(shape, torch.float32, dtype, "cuda")


@interpreted
def test_page_beyond_2_31_elements(tmp_path: Path) -> None:
    # Report K3, in a sparse file: page 8 lies 2**31 elements behind page 0.
    page_elements = 2**28
    caches = []
    for name in ("k", "v"):
        storage = torch.from_file(str(tmp_path / name), shared=True, size=8 * page_elements + 64, dtype=torch.float32)
        caches.append(storage.as_strided((9, 4, 1, 16), (page_elements, 16, 16, 1)))
    k, v = torch.randn((2, 1, 1, 16), generator=torch.Generator().manual_seed(0))
    write_kv(k, v, *caches, torch.tensor([8 * 4 + 3]), solution="triton")
    for cache, value in zip(caches, (k, v), strict=True):
        assert torch.equal(cache[8, 3], value[0])
        assert float(cache[8, :3].abs().sum()) == 0
        assert float(cache[0].abs().sum()) == 0
