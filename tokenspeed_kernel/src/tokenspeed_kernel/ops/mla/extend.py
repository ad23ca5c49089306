"""Public op: attention of ragged new queries to their requests' paged latent cache."""

from __future__ import annotations

from typing import Final, Literal, overload

import torch
from torch.compiler import is_compiling

from tokenspeed_kernel.dispatch import BoundOp
from tokenspeed_kernel.ops import library
from tokenspeed_kernel.ops.attention.plan import AttentionPlan
from tokenspeed_kernel.ops.mla.check import check_latent, check_out, check_table
from tokenspeed_kernel.ops.mla.contract import MLA_EXTEND

__all__ = ["mla_extend"]

_EXTEND: Final = BoundOp(MLA_EXTEND)
_TABLE: Final = _EXTEND.table


@overload
def mla_extend(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    page_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    max_seqlen_q: int,
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
def mla_extend(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    page_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float,
    latent_dim: int = 512,
    causal: bool = True,
    return_lse: Literal[True],
    out: torch.Tensor | None = None,
    plan: AttentionPlan | None = None,
    solution: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]: ...
def mla_extend(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    page_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    max_seqlen_q: int,
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

    Requests may have any number of queries, decode rows and prefill chunks mixed. All query heads read the same row: its first
    ``latent_dim`` elements are key and value, the rest are key alone.

    Args:
        q: [num_tokens, num_heads, latent_dim + rope_dim] fp32, fp16, bf16 (fp64 on the CPU), last dimension contiguous; the
            projection into the latent space is already applied.
        kv_cache: [num_pages, page_size, latent_dim + rope_dim] of q's dtype, last dimension contiguous.
        page_table: [num_reqs, max_pages] int32, page indices; keys on pages outside 0..num_pages-1 (-1, say) are masked.
        cu_seqlens_q: [num_reqs + 1] int32, request r's queries are rows [cu[r], cu[r + 1]); from 0 to num_tokens.
        seq_lens: [num_reqs] int32, tokens in the cache including the new ones.
        max_seqlen_q: int, at least every request's number of queries.
        max_seqlen_k: int, at least every entry of seq_lens; at most max_pages * page_size.
        softmax_scale: float, dimensionless: (head_dim before the projection) ** -0.5, times whatever the rope scaling asks for.
        latent_dim: elements of a row that are the value.
        causal: a query sees no key at a later position than its own.
        return_lse: also return the log of the denominator.
        out: optional [num_tokens, num_heads, latent_dim] of q's dtype, last dimension contiguous, written in place; it must not
            overlap an input.
        plan: what `plan` made of the same tensors; saves every layer but the first the preparation. The compiled form of the
            op has no plan: it is left out while compiling.
        solution: solution or kernel to use instead of the best that qualifies.
    Returns:
        out, or a new tensor of that shape; with return_lse also [num_tokens, num_heads] float32, base e.
    Raises:
        ShapeError: shapes, dtypes or strides disagree.  NoKernelError: nothing qualifies.
    Source: DeepSeek-V2, arXiv:2405.04434, section 2.1; paging arXiv:2309.06180.
    """
    if is_compiling():
        operands = (q, kv_cache, page_table, cu_seqlens_q, seq_lens)
        result, lse = _LIBRARY_OP(
            *operands, max_seqlen_q, max_seqlen_k, softmax_scale, latent_dim, causal, return_lse, solution
        )
        result = result if out is None else out.copy_(result)
        return (result, lse) if return_lse else result
    dtype, cache_dtype, device, cache_device = q.dtype, kv_cache.dtype, q.device, kv_cache.device
    shape, cache_shape = q.shape, kv_cache.shape
    if (
        len(shape) != 3
        or len(cache_shape) != 3
        or cache_shape[2] != shape[2]
        or not 0 < latent_dim < shape[2]
        or shape[1] == 0
        or cache_shape[1] == 0
        or q.stride()[2] != 1
        or kv_cache.stride()[2] != 1
    ):
        check_latent(MLA_EXTEND.name, q, kv_cache, latent_dim, "num_tokens")
    if out is not None:
        check_out(MLA_EXTEND.name, q, latent_dim, out)
    width, page_size = shape[2], cache_shape[1]
    if (
        plan is None
        or plan.cu_seqlens_q is not cu_seqlens_q
        or not plan.is_of(page_table, seq_lens, page_size, max_seqlen_k, device)
    ):
        num_reqs = max(cu_seqlens_q.numel() - 1, 0)
        check_table(MLA_EXTEND.name, q, page_size, page_table, seq_lens, num_reqs, max_seqlen_k, plan, cu_seqlens_q)
    other_dtype = None if cache_dtype is dtype else cache_dtype
    key = (device, cache_device, dtype, other_dtype, width, latent_dim, page_size, causal, return_lse, solution)
    kernel = _TABLE.get(key)
    if kernel is None:
        check_latent(MLA_EXTEND.name, q, kv_cache, latent_dim, "num_tokens")
        traits = (latent_dim, width - latent_dim, page_size, causal, return_lse)
        kernel = _EXTEND.bind(key, device, (dtype, cache_dtype), traits, solution)
    attended: torch.Tensor | tuple[torch.Tensor, torch.Tensor] = kernel(
        q,
        kv_cache,
        page_table,
        cu_seqlens_q,
        seq_lens,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        softmax_scale=softmax_scale,
        latent_dim=latent_dim,
        causal=causal,
        return_lse=return_lse,
        out=out,
        plan=plan,
    )
    return attended


_LIBRARY_OP: Final = library.register(
    "mla_extend",
    "Tensor q, Tensor kv_cache, Tensor page_table, Tensor cu_seqlens_q, Tensor seq_lens, int max_seqlen_q, int max_seqlen_k, "
    "float softmax_scale, int latent_dim=512, bool causal=True, bool return_lse=False, str? solution=None",
    mla_extend,
    lambda given: (*given["q"].shape[:-1], given["latent_dim"]),
    num_positional=5,
)
