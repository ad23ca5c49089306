"""Public ops: attention to given slots of the latent cache."""

from __future__ import annotations

from typing import Final, Literal, overload

import torch
from torch.compiler import is_compiling

from tokenspeed_kernel.dispatch import NEW_CALL, BoundOp, check_devices
from tokenspeed_kernel.ops import library
from tokenspeed_kernel.ops.dsa.contract import SPARSE_DECODE, SPARSE_PREFILL
from tokenspeed_kernel.ops.mla.check import check_latent, check_out, refuse
from tokenspeed_kernel.ops.operands import OPERAND_ERRORS, refuse_kinds

__all__ = ["sparse_decode", "sparse_prefill"]

_DECODE: Final = BoundOp(SPARSE_DECODE)
_PREFILL: Final = BoundOp(SPARSE_PREFILL)
_INT32: Final = torch.int32

Attended = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


@overload
def sparse_decode(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    slots: torch.Tensor,
    *,
    softmax_scale: float,
    latent_dim: int = 512,
    return_lse: Literal[False] = False,
    out: torch.Tensor | None = None,
    solution: str | None = None,
) -> torch.Tensor: ...
@overload
def sparse_decode(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    slots: torch.Tensor,
    *,
    softmax_scale: float,
    latent_dim: int = 512,
    return_lse: Literal[True],
    out: torch.Tensor | None = None,
    solution: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]: ...
def sparse_decode(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    slots: torch.Tensor,
    *,
    softmax_scale: float,
    latent_dim: int = 512,
    return_lse: bool = False,
    out: torch.Tensor | None = None,
    solution: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attend each request's newest queries to given slots of the latent cache.

    Which keys a query sees is in its slots alone: causality, lengths and pages were seen to when they were chosen. A slot that
    occurs twice counts twice. Entries outside the cache (-1) are ignored; a row without any other has output 0 and LSE -inf.

    Args:
        q: [num_reqs, q_len, num_heads, latent_dim + rope_dim] fp32, fp16, bf16 (fp64 on the CPU), last dimension contiguous.
        kv_cache: [num_pages, page_size, latent_dim + rope_dim] of q's dtype, last dimension contiguous.
        slots: [num_reqs, q_len, num_slots] int32, page * page_size + offset, last dimension contiguous.
        softmax_scale: float, dimensionless.
        latent_dim: elements of a row that are the value; all of it is the key.
        return_lse: also return the log of the denominator.
        out: optional [num_reqs, q_len, num_heads, latent_dim] of q's dtype, last dimension contiguous, written in place; it must
            not overlap an input.
        solution: solution or kernel to use instead of the best that qualifies.
    Returns:
        out, or a new tensor of that shape; with return_lse also [num_reqs, q_len, num_heads] float32, base e.
    Raises:
        ShapeError: shapes, dtypes or strides disagree.  NoKernelError: nothing qualifies.
    Source: DeepSeek-V3.2-Exp technical report, section 1, equation 2; DeepSeek-V2, arXiv:2405.04434, section 2.1.
    """
    if is_compiling():
        result, lse = _DECODE_LIBRARY(q, kv_cache, slots, softmax_scale, latent_dim, return_lse, solution)
        result = result if out is None else out.copy_(result)
        return (result, lse) if return_lse else result
    try:
        return _attend(_DECODE, "num_reqs, q_len", q, kv_cache, slots, softmax_scale, latent_dim, return_lse, out, solution)
    except OPERAND_ERRORS as error:
        refuse_kinds(sparse_decode, locals(), error)
        raise


@overload
def sparse_prefill(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    slots: torch.Tensor,
    *,
    softmax_scale: float,
    latent_dim: int = 512,
    return_lse: Literal[False] = False,
    out: torch.Tensor | None = None,
    solution: str | None = None,
) -> torch.Tensor: ...
@overload
def sparse_prefill(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    slots: torch.Tensor,
    *,
    softmax_scale: float,
    latent_dim: int = 512,
    return_lse: Literal[True],
    out: torch.Tensor | None = None,
    solution: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]: ...
def sparse_prefill(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    slots: torch.Tensor,
    *,
    softmax_scale: float,
    latent_dim: int = 512,
    return_lse: bool = False,
    out: torch.Tensor | None = None,
    solution: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attend many queries to given slots of the latent cache, as `sparse_decode` does.

    Args:
        q: [num_tokens, num_heads, latent_dim + rope_dim] fp32, fp16, bf16 (fp64 on the CPU), last dimension contiguous.
        kv_cache: [num_pages, page_size, latent_dim + rope_dim] of q's dtype, last dimension contiguous. Rows without pages,
            [num_keys, latent_dim + rope_dim], are passed as ``rows.unsqueeze(1)``: pages of one token, whose slots are the rows.
        slots: [num_tokens, num_slots] int32, page * page_size + offset, last dimension contiguous; -1 is ignored.
        softmax_scale: float, dimensionless.
        latent_dim: elements of a row that are the value; all of it is the key.
        return_lse: also return the log of the denominator.
        out: optional [num_tokens, num_heads, latent_dim] of q's dtype, last dimension contiguous, written in place; it must not
            overlap an input.
        solution: solution or kernel to use instead of the best that qualifies.
    Returns:
        out, or a new tensor of that shape; with return_lse also [num_tokens, num_heads] float32, base e.
    Raises:
        ShapeError: shapes, dtypes or strides disagree.  NoKernelError: nothing qualifies.
    Source: DeepSeek-V3.2-Exp technical report, section 1, equation 2; DeepSeek-V2, arXiv:2405.04434, section 2.1.
    """
    if is_compiling():
        result, lse = _PREFILL_LIBRARY(q, kv_cache, slots, softmax_scale, latent_dim, return_lse, solution)
        result = result if out is None else out.copy_(result)
        return (result, lse) if return_lse else result
    try:
        return _attend(_PREFILL, "num_tokens", q, kv_cache, slots, softmax_scale, latent_dim, return_lse, out, solution)
    except OPERAND_ERRORS as error:
        refuse_kinds(sparse_prefill, locals(), error)
        raise


def _attend(
    op: BoundOp,
    queries: str,
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    slots: torch.Tensor,
    softmax_scale: float,
    latent_dim: int,
    return_lse: bool,
    out: torch.Tensor | None,
    solution: str | None,
) -> Attended:
    """Check and run either op; they differ in the dimensions before the heads."""
    operands: tuple[torch.Tensor, ...] = (q, kv_cache, slots)
    if out is not None:
        operands += (out,)
    key = (q.shape, latent_dim, return_lse, out is None, solution)
    looks_same, kernel = op.seen.get(key, NEW_CALL)
    if not looks_same(*operands):
        name = op.contract.name
        shape, cache_shape, dtype, cache_dtype = q.shape, kv_cache.shape, q.dtype, kv_cache.dtype
        if (
            len(shape) != queries.count(",") + 3
            or len(cache_shape) != 3
            or cache_shape[2] != shape[-1]
            or not 0 < latent_dim < shape[-1]
            or shape[-2] == 0
            or cache_shape[1] == 0
            or q.stride()[-1] != 1
            or kv_cache.stride()[2] != 1
        ):
            check_latent(name, q, kv_cache, latent_dim, queries)
        if slots.shape[:-1] != shape[:-2] or slots.dtype is not _INT32 or slots.stride()[-1] != 1:
            refuse(
                name, f"slots [{', '.join(map(str, shape[:-2]))}, num_slots] int32, last dimension contiguous", slots, strides=True
            )
        if out is not None:
            check_out(name, q, latent_dim, out)
        device = q.device
        check_devices(name, device, kv_cache=kv_cache, slots=slots)
        kernel = op.kernel(device, (dtype, cache_dtype), (latent_dim, shape[-1] - latent_dim, return_lse), solution)
        op.remember(key, kernel, *operands)
    attended: Attended = kernel(q, kv_cache, slots, softmax_scale, latent_dim, return_lse, out)
    return attended


_ARGUMENTS: Final = (
    "Tensor q, Tensor kv_cache, Tensor slots, float softmax_scale, int latent_dim=512, bool return_lse=False, str? solution=None"
)
_DECODE_LIBRARY: Final = library.register(
    "sparse_decode", _ARGUMENTS, sparse_decode, lambda given: (*given["q"].shape[:-1], given["latent_dim"]), num_positional=3
)
_PREFILL_LIBRARY: Final = library.register(
    "sparse_prefill", _ARGUMENTS, sparse_prefill, lambda given: (*given["q"].shape[:-1], given["latent_dim"]), num_positional=3
)
