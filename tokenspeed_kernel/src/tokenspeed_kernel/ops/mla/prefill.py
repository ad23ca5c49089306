"""Public op: attention of ragged queries to ragged keys that were expanded from their latents."""

from __future__ import annotations

from typing import Final, Literal, overload

import torch
from torch.compiler import is_compiling

from tokenspeed_kernel.dispatch import NEW_CALL, BoundOp
from tokenspeed_kernel.ops import library
from tokenspeed_kernel.ops.attention.check import check_int32
from tokenspeed_kernel.ops.mla.check import check_out, refuse
from tokenspeed_kernel.ops.mla.contract import MLA_PREFILL
from tokenspeed_kernel.ops.operands import OPERAND_ERRORS, refuse_kinds

__all__ = ["mla_prefill"]

_PREFILL: Final = BoundOp(MLA_PREFILL)


@overload
def mla_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    *,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float | None = None,
    causal: bool = True,
    return_lse: Literal[False] = False,
    out: torch.Tensor | None = None,
    solution: str | None = None,
) -> torch.Tensor: ...
@overload
def mla_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    *,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float | None = None,
    causal: bool = True,
    return_lse: Literal[True],
    out: torch.Tensor | None = None,
    solution: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]: ...
def mla_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    *,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float | None = None,
    causal: bool = True,
    return_lse: bool = False,
    out: torch.Tensor | None = None,
    solution: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attend ragged queries to ragged keys that were expanded from their latents, so that each head has keys of its own.

    Long prompts are cheaper in this form than over the latent rows. Queries are aligned with the tail of their request's keys: a
    prompt whose beginning is cached is attended in parts (its own keys with ``causal``, the cached ones without), and the parts
    merged by their LSEs with `attention.merge_states`.

    Args:
        q: [num_tokens, num_heads, head_dim] fp32, fp16, bf16 (fp64 on the CPU), last dimension contiguous; head_dim is 192 where
            128 elements are without and 64 with rope.
        k: [num_keys, num_kv_heads, head_dim] of q's dtype; num_kv_heads divides num_heads.
        v: [num_keys, num_kv_heads, v_head_dim] of q's dtype; v_head_dim may be another (128).
        cu_seqlens_q: [num_reqs + 1] int32, request r's queries are rows [cu[r], cu[r + 1]); from 0 to num_tokens.
        cu_seqlens_k: [num_reqs + 1] int32, the same for its keys; from 0 to num_keys.
        max_seqlen_q: int, at least every request's number of queries.
        max_seqlen_k: int, at least every request's number of keys.
        softmax_scale: float, dimensionless; head_dim ** -0.5 when None.
        causal: a query sees no key at a later position than its own.
        return_lse: also return the log of the denominator.
        out: optional [num_tokens, num_heads, v_head_dim] of q's dtype, last dimension contiguous, written in place; it must not
            overlap an input.
        solution: solution or kernel to use instead of the best that qualifies.
    Returns:
        out, or a new tensor of that shape; with return_lse also [num_tokens, num_heads] float32, base e.
    Raises:
        ShapeError: shapes, dtypes or strides disagree.  NoKernelError: nothing qualifies.
    Source: DeepSeek-V2, arXiv:2405.04434, section 2.1.
    """
    if is_compiling():
        inputs = (q, k, v, cu_seqlens_q, cu_seqlens_k)
        result, lse = _LIBRARY_OP(*inputs, max_seqlen_q, max_seqlen_k, softmax_scale, causal, return_lse, solution)
        result = result if out is None else out.copy_(result)
        return (result, lse) if return_lse else result
    try:
        operands: tuple[torch.Tensor, ...] = (q, k, v, cu_seqlens_q, cu_seqlens_k)
        if out is not None:
            operands += (out,)
        key = (q.shape, causal, return_lse, out is None, solution)
        looks_same, kernel = _PREFILL.seen.get(key, NEW_CALL)
        if not looks_same(*operands):
            shape, k_shape, v_shape = q.shape, k.shape, v.shape
            dtype, k_dtype, device = q.dtype, k.dtype, q.device
            if (
                len(shape) != 3
                or len(k_shape) != 3
                or len(v_shape) != 3
                or k_shape[:2] != v_shape[:2]
                or k_shape[2] != shape[2]
                or not k_shape[1]
                or shape[1] % k_shape[1]
                or v.dtype is not k_dtype
                or k.device != device
                or v.device != device
                or q.stride()[2] != 1
                or k.stride()[2] != 1
                or v.stride()[2] != 1
            ):
                _check(q, k, v)
            if out is not None:
                check_out(MLA_PREFILL.name, q, v_shape[2], out)
            num_reqs = max(cu_seqlens_q.numel() - 1, 0)
            check_int32(MLA_PREFILL.name, "cu_seqlens_q", cu_seqlens_q, num_reqs + 1, q)
            check_int32(MLA_PREFILL.name, "cu_seqlens_k", cu_seqlens_k, num_reqs + 1, q)
            traits = (shape[2], v_shape[2], causal, return_lse)
            kernel = _PREFILL.kernel(device, (dtype, k_dtype, k_dtype), traits, solution)
            _PREFILL.remember(key, kernel, *operands)
        attended: torch.Tensor | tuple[torch.Tensor, torch.Tensor] = kernel(
            q,
            k,
            v,
            cu_seqlens_q,
            cu_seqlens_k,
            max_seqlen_q,
            max_seqlen_k,
            softmax_scale,
            causal,
            return_lse,
            out,
        )
        return attended
    except OPERAND_ERRORS as error:
        refuse_kinds(mla_prefill, locals(), error)
        raise


def _check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Say which operand does not fit."""
    op = MLA_PREFILL.name
    if q.dim() != 3:
        refuse(op, "q [num_tokens, num_heads, head_dim]", q)
    num_heads, head_dim = q.shape[1:]
    if k.dim() != 3 or k.shape[2] != head_dim or k.shape[1] == 0 or num_heads % k.shape[1] or k.device != q.device:
        refuse(op, f"k [num_keys, num_kv_heads, {head_dim}] on {q.device}, with a number of heads that divides {num_heads}", k)
    if v.dim() != 3 or v.shape[:2] != k.shape[:2] or v.dtype != k.dtype or v.device != q.device:
        dtype = str(k.dtype).removeprefix("torch.")
        refuse(op, f"v [{k.shape[0]}, {k.shape[1]}, v_head_dim] {dtype} on {q.device}", v)
    for name, operand in (("q", q), ("k", k), ("v", v)):
        if operand.stride(2) != 1:
            fix = f"pass {name}.contiguous()"
            refuse(op, f"{name} with its last dimension contiguous", operand, fix=fix, strides=True)


_LIBRARY_OP: Final = library.register(
    "mla_prefill",
    "Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, int max_seqlen_q, int max_seqlen_k, "
    "float? softmax_scale=None, bool causal=True, bool return_lse=False, str? solution=None",
    mla_prefill,
    lambda given: (*given["q"].shape[:-1], given["v"].shape[-1]),
    num_positional=5,
)
