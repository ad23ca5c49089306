"""Argument checks of the latent attention ops: reached only when the one cheap test on the way through fails."""

from __future__ import annotations

from typing import NoReturn

import torch

from tokenspeed_kernel.errors import ShapeError
from tokenspeed_kernel.ops.attention.check import check_int32, check_paged
from tokenspeed_kernel.ops.attention.plan import AttentionPlan
from tokenspeed_kernel.ops.mla.packed import packed_problem

__all__ = ["check_latent", "check_out", "check_packed", "check_table", "refuse", "shown"]


def check_latent(op: str, q: torch.Tensor, kv_cache: torch.Tensor, latent_dim: int, queries: str) -> None:
    """Check queries [*queries, num_heads, width] and a latent cache of that width, or of packed rows (uint8).

    Raises:
        ShapeError: with the operand, what was expected, and what came.
    """
    num_dims = queries.count(",") + 3
    if q.dim() != num_dims or q.shape[-2] == 0:
        refuse(op, f"q [{queries}, num_heads >= 1, latent_dim + rope_dim]", q)
    width = q.shape[-1]
    if not 0 < latent_dim < width:
        expected = f"latent_dim from 1 to {width - 1}, q having {width} elements a head"
        raise ShapeError(op, expected=expected, got=str(latent_dim), fix="pass latent_dim, the part of a row that is the value")
    packed = kv_cache.dtype is torch.uint8
    if kv_cache.dim() != 3 or kv_cache.shape[1] == 0 or (kv_cache.shape[2] != width and not packed):
        refuse(op, f"kv_cache [num_pages, page_size >= 1, {width}]", kv_cache)
    if kv_cache.device != q.device:
        refuse(op, f"kv_cache on {q.device}", kv_cache)
    if q.stride(-1) != 1:
        refuse(op, "q with its last dimension contiguous", q, fix="pass q.contiguous()", strides=True)
    if kv_cache.stride(2) != 1:
        fix = "lay the cache out with a row's elements innermost"
        refuse(op, "kv_cache with its last dimension contiguous", kv_cache, fix=fix, strides=True)
    if packed:
        check_packed(op, kv_cache, latent_dim, width - latent_dim)


def check_packed(op: str, kv_cache: torch.Tensor, latent_dim: int, rope_dim: int) -> None:
    """Check a cache of packed rows.

    Raises:
        ShapeError: its width or alignment is another.
    """
    problem = packed_problem(kv_cache, latent_dim, rope_dim)
    if problem is not None:
        expected, remedy = problem
        refuse(op, expected, kv_cache, fix=remedy, strides=True)


def check_table(
    op: str,
    q: torch.Tensor,
    page_size: int,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    num_reqs: int,
    max_seqlen_k: int,
    plan: AttentionPlan | None,
    cu_seqlens_q: torch.Tensor | None = None,
) -> None:
    """Check the page table, the lengths and the plan.

    Raises:
        ShapeError: with the operand, what was expected, and what came.
    """
    check_paged(op, q, page_size, page_table, seq_lens, max_seqlen_k, plan, cu_seqlens_q)
    check_int32(op, "seq_lens", seq_lens, num_reqs, q)
    if cu_seqlens_q is not None:
        check_int32(op, "cu_seqlens_q", cu_seqlens_q, num_reqs + 1, q)


def check_out(op: str, q: torch.Tensor, value_dim: int, out: torch.Tensor) -> None:
    """Check a given output: q's shape but for the last dimension.

    Raises:
        ShapeError: its shape, dtype, device or last stride is another.
    """
    shape = (*q.shape[:-1], value_dim)
    if out.shape != shape or out.dtype != q.dtype or out.device != q.device or out.stride(-1) != 1:
        dtype = str(q.dtype).removeprefix("torch.")
        refuse(op, f"out {list(shape)} {dtype} on {q.device}, last dimension contiguous", out, strides=True)


def refuse(op: str, expected: str, got: torch.Tensor, fix: str | None = None, strides: bool = False) -> NoReturn:
    """Raise the error.

    Raises:
        ShapeError: always.
    """
    raise ShapeError(op, expected=expected, got=shown(got) + (f" strides {got.stride()}" if strides else ""), fix=fix)


def shown(tensor: torch.Tensor) -> str:
    """Shape, dtype and device, for a message."""
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')} on {tensor.device}"
