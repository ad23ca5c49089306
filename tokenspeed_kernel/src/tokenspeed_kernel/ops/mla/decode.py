"""Public op: attention of each request's newest queries to its paged latent cache."""

from __future__ import annotations

from typing import Final, Literal, overload

import torch
from torch.compiler import is_compiling

from tokenspeed_kernel.dispatch import NEW_CALL, BoundOp
from tokenspeed_kernel.ops import library
from tokenspeed_kernel.ops.attention.plan import AttentionPlan
from tokenspeed_kernel.ops.mla.check import check_latent, check_out, check_table
from tokenspeed_kernel.ops.mla.contract import MLA_DECODE
from tokenspeed_kernel.ops.operands import OPERAND_ERRORS, refuse_kinds

__all__ = ["mla_decode"]

_DECODE: Final = BoundOp(MLA_DECODE)
_SEEN: Final = _DECODE.seen
_INT32: Final = torch.int32


@overload
def mla_decode(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    max_seqlen_k: int,
    softmax_scale: float,
    latent_dim: int = 512,
    causal: bool = True,
    return_lse: Literal[False] = False,
    out: torch.Tensor | None = None,
    plan: AttentionPlan | None = None,
    solution: str | None = None,
) -> torch.Tensor: ...
@overload
def mla_decode(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    max_seqlen_k: int,
    softmax_scale: float,
    latent_dim: int = 512,
    causal: bool = True,
    return_lse: Literal[True],
    out: torch.Tensor | None = None,
    plan: AttentionPlan | None = None,
    solution: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]: ...
def mla_decode(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    max_seqlen_k: int,
    softmax_scale: float,
    latent_dim: int = 512,
    causal: bool = True,
    return_lse: bool = False,
    out: torch.Tensor | None = None,
    plan: AttentionPlan | None = None,
    solution: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attend each request's new queries to its paged latent cache, which already holds the new tokens' rows.

    Each request has the same number of queries, q_len: 1, or more when drafts are verified. They stand at its last positions, and
    with ``causal`` each sees the keys up to its own. All query heads read the same row: its first ``latent_dim`` elements are key
    and value, the rest are key alone.

    Args:
        q: [num_reqs, q_len, num_heads, latent_dim + rope_dim] fp32, fp16, bf16 (fp64 on the CPU), last dimension contiguous; the
            projection into the latent space is already applied.
        kv_cache: [num_pages, page_size, latent_dim + rope_dim] of q's dtype, last dimension contiguous; or packed rows of fp8,
            uint8 [num_pages, page_size, latent_dim + latent_dim / 32 + 2 * rope_dim], pages and tokens at multiples of 4 bytes
            (see docs/contracts/mla.md).
        page_table: [num_reqs, max_pages] int32, page indices; keys on pages outside 0..num_pages-1 (-1, say) are masked.
        seq_lens: [num_reqs] int32, tokens in the cache including the new ones.
        max_seqlen_k: int, at least every entry of seq_lens; at most max_pages * page_size.
        softmax_scale: float, dimensionless: (head_dim before the projection) ** -0.5, times whatever the rope scaling asks for.
        latent_dim: elements of a row that are the value.
        causal: a query sees no key at a later position than its own; otherwise every query sees all seq_lens keys.
        return_lse: also return the log of the denominator.
        out: optional [num_reqs, q_len, num_heads, latent_dim] of q's dtype, last dimension contiguous, written in place; it must
            not overlap an input.
        plan: what `plan` made of the same page table and lengths; saves every layer but the first the preparation. The compiled
            form of the op has no plan: it is left out while compiling.
        solution: solution or kernel to use instead of the best that qualifies.
    Returns:
        out, or a new tensor of that shape; with return_lse also [num_reqs, q_len, num_heads] float32, base e.
    Raises:
        ShapeError: shapes, dtypes or strides disagree.  NoKernelError: nothing qualifies.
    Source: DeepSeek-V2, arXiv:2405.04434, section 2.1; split keys arXiv:2311.01282.
    """
    if is_compiling():
        result, lse = _LIBRARY_OP(
            q, kv_cache, page_table, seq_lens, max_seqlen_k, softmax_scale, latent_dim, causal, return_lse, solution
        )
        result = result if out is None else out.copy_(result)
        return (result, lse) if return_lse else result
    try:
        planned: tuple[int, torch.device] | None = None
        operands: tuple[torch.Tensor, ...] = (q, kv_cache)
        if plan is None:
            operands += (page_table, seq_lens)
        else:
            planned = (plan.page_size, plan.device)
        if out is not None:
            operands += (out,)
        key = (q.shape, planned, latent_dim, causal, return_lse, out is None, solution)
        looks_same, kernel = _SEEN.get(key, NEW_CALL)
        if not looks_same(*operands) or (
            page_table.shape[1] * kv_cache.shape[1] < max_seqlen_k
            if plan is None
            else plan.page_table is not page_table
            or plan.seq_lens is not seq_lens
            or plan.num_reqs != q.shape[0]
            or plan.max_keys < max_seqlen_k
        ):
            dtype, cache_dtype, device = q.dtype, kv_cache.dtype, q.device
            try:
                num_reqs, q_len, num_heads, width = q.shape
                _, page_size, cache_width = kv_cache.shape
            except ValueError:
                check_latent(MLA_DECODE.name, q, kv_cache, latent_dim, "num_reqs, q_len")
                raise
            if (
                cache_width != width
                or not 0 < latent_dim < width
                or num_heads == 0
                or page_size == 0
                or q.stride()[3] != 1
                or kv_cache.stride()[2] != 1
            ):
                check_latent(MLA_DECODE.name, q, kv_cache, latent_dim, "num_reqs, q_len")
            if out is not None:
                check_out(MLA_DECODE.name, q, latent_dim, out)
            if (
                plan is None
                or page_table is not plan.page_table
                or seq_lens is not plan.seq_lens
                or page_size != plan.page_size
                or max_seqlen_k > plan.max_keys
                or plan.num_reqs != num_reqs
                or plan.device != device
            ):
                table_shape = page_table.shape
                if (
                    plan is not None
                    or len(table_shape) != 2
                    or table_shape[0] != num_reqs
                    or seq_lens.shape != (num_reqs,)
                    or table_shape[1] * page_size < max_seqlen_k
                    or page_table.dtype is not _INT32
                    or seq_lens.dtype is not _INT32
                    or page_table.device != device
                    or seq_lens.device != device
                ):
                    check_table(MLA_DECODE.name, q, page_size, page_table, seq_lens, num_reqs, max_seqlen_k, plan)
            check_latent(MLA_DECODE.name, q, kv_cache, latent_dim, "num_reqs, q_len")
            query_rows = q_len * num_heads
            single_block, few_rows = num_reqs == 1 and query_rows <= 64, query_rows <= 16
            traits = (latent_dim, width - latent_dim, page_size, causal, return_lse, single_block, few_rows)
            kernel = _DECODE.kernel(device, (dtype, cache_dtype), traits, solution)
            _DECODE.remember(key, kernel, *operands)
        attended: torch.Tensor | tuple[torch.Tensor, torch.Tensor] = kernel(
            q,
            kv_cache,
            page_table,
            seq_lens,
            max_seqlen_k,
            softmax_scale,
            latent_dim,
            causal,
            return_lse,
            out,
            plan,
        )
        return attended
    except OPERAND_ERRORS as error:
        refuse_kinds(mla_decode, locals(), error)
        raise


_LIBRARY_OP: Final = library.register(
    "mla_decode",
    "Tensor q, Tensor kv_cache, Tensor page_table, Tensor seq_lens, int max_seqlen_k, float softmax_scale, int latent_dim=512, "
    "bool causal=True, bool return_lse=False, str? solution=None",
    mla_decode,
    lambda given: (*given["q"].shape[:-1], given["latent_dim"]),
    num_positional=4,
)
