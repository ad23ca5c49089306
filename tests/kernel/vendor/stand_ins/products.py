"""fp8 products: DeepGEMM, recorded from tokenspeed-deepgemm 2.5.0.post20260604, and an operator schema of TensorRT-LLM 1.0."""

from __future__ import annotations

from typing import Any

import torch

from .common import NAN

_ALIGNMENT = 128


def get_mk_alignment_for_contiguous_layout(*args: Any, **kwargs: Any) -> int:
    """Recorded: deep_gemm.get_mk_alignment_for_contiguous_layout."""
    return _ALIGNMENT


def _scaled(values: torch.Tensor, scale: torch.Tensor, rows: int) -> torch.Tensor:
    assert values.dtype is torch.float8_e4m3fn and values.is_contiguous() and scale.dtype is torch.float32
    assert values.shape[-1] % 128 == 0
    assert scale.shape[-2:] == (-(-values.shape[-2] // rows), values.shape[-1] // 128)
    wide = scale.double().repeat_interleave(rows, -2).repeat_interleave(128, -1)
    return values.double() * wide[..., : values.shape[-2], : values.shape[-1]]


def fp8_gemm_nt(
    a: tuple[torch.Tensor, torch.Tensor],
    b: tuple[torch.Tensor, torch.Tensor],
    d: torch.Tensor,
    c: torch.Tensor | None = None,
    recipe: Any = None,
    recipe_a: Any = None,
    recipe_b: Any = None,
    compiled_dims: str = "nk",
    disable_ue8m0_cast: bool = False,
) -> None:
    """Recorded: deep_gemm.fp8_gemm_nt."""
    assert d.dtype is torch.bfloat16 and d.is_contiguous() and d.shape == (a[0].shape[0], b[0].shape[0]) and b[0].shape[0] % 64 == 0
    d.copy_(_scaled(*a, 1) @ _scaled(*b, 128).T)


def m_grouped_fp8_gemm_nt_contiguous(
    a: tuple[torch.Tensor, torch.Tensor],
    b: tuple[torch.Tensor, torch.Tensor],
    d: torch.Tensor,
    grouped_layout: torch.Tensor,
    recipe: Any = None,
    recipe_a: Any = None,
    recipe_b: Any = None,
    compiled_dims: str = "nk",
    disable_ue8m0_cast: bool = False,
    use_psum_layout: bool = False,
    expected_m_for_psum_layout: int | None = None,
) -> None:
    """Recorded: deep_gemm.m_grouped_fp8_gemm_nt_contiguous. A tile's first index says whose all its rows are."""
    assert grouped_layout.dtype is torch.int32 and grouped_layout.is_contiguous() and len(grouped_layout) == len(d) == len(a[0])
    assert len(d) % _ALIGNMENT == 0
    rows, weights = _scaled(*a, 1), _scaled(*b, 128)
    d.fill_(NAN)
    for start in range(0, len(d), _ALIGNMENT):
        owners = grouped_layout[start : start + _ALIGNMENT]
        expert = int(owners[0])
        assert bool(((owners == expert) | (owners == -1)).all()), "an expert's rows do not start at a tile"
        if expert >= 0:
            d[start : start + _ALIGNMENT] = (rows[start : start + _ALIGNMENT] @ weights[expert].T).to(d.dtype)


def m_grouped_fp8_gemm_nt_masked(
    a: tuple[torch.Tensor, torch.Tensor],
    b: tuple[torch.Tensor, torch.Tensor],
    d: torch.Tensor,
    masked_m: torch.Tensor,
    expected_m: int,
    recipe: Any = None,
    recipe_a: Any = None,
    recipe_b: Any = None,
    compiled_dims: str = "nk",
    disable_ue8m0_cast: bool = False,
) -> None:
    """Recorded: deep_gemm.m_grouped_fp8_gemm_nt_masked."""
    assert masked_m.dtype is torch.int32 and masked_m.is_contiguous() and expected_m > 0
    assert bool(((masked_m >= 0) & (masked_m <= d.shape[1])).all())
    rows, weights = _scaled(*a, 1), _scaled(*b, 128)
    d.fill_(NAN)
    for expert, count in enumerate(masked_m.tolist()):
        d[expert, :count] = (rows[expert, :count] @ weights[expert].T).to(d.dtype)


TRTLLM_SCHEMA = "fp8_block_scaling_gemm(Tensor mat1, Tensor mat2, Tensor mat1Scale, Tensor mat2Scale) -> Tensor"


def fp8_block_scaling_gemm(
    mat1: torch.Tensor, mat2: torch.Tensor, mat1Scale: torch.Tensor, mat2Scale: torch.Tensor
) -> torch.Tensor:
    """Recorded: torch.ops.trtllm.fp8_block_scaling_gemm; mat1's scales lie block by block, rows filled up to a multiple of 4."""
    rows, width = mat1.shape
    assert mat2.shape[0] % 16 == 0 and width % 16 == 0 and mat1Scale.is_contiguous() and mat2Scale.is_contiguous()
    stride = -(-rows // 4) * 4
    scale = mat1Scale.reshape(-1)[: stride * -(-width // 128)].view(-1, stride)[:, :rows].T.contiguous()
    return (_scaled(mat1, scale, 1) @ _scaled(mat2, mat2Scale, 128).T).to(torch.bfloat16)
