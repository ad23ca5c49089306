"""Public ops: scores by which a query chooses the keys that it attends."""

from __future__ import annotations

from typing import Final

import torch
from torch.compiler import is_compiling

from tokenspeed_kernel.dispatch import NEW_CALL, BoundOp, check_devices, register_library_op
from tokenspeed_kernel.errors import ShapeError
from tokenspeed_kernel.ops.attention.check import check_int32, check_paged
from tokenspeed_kernel.ops.dsa.contract import INDEXER_SCORES, INDEXER_SCORES_RAGGED
from tokenspeed_kernel.ops.mla.check import refuse
from tokenspeed_kernel.ops.operands import OPERAND_ERRORS, refuse_kinds
from tokenspeed_kernel.signature import Format

__all__ = ["indexer_scores", "indexer_scores_ragged"]

_PAGED: Final = BoundOp(INDEXER_SCORES)
_RAGGED: Final = BoundOp(INDEXER_SCORES_RAGGED)
_FP8: Final = torch.float8_e4m3fn
_FP8_KEYS: Final = Format.parse("fp8_e4m3@token")
_FP8_QUERIES: Final = Format.parse("fp8_e4m3@none")


def indexer_scores(
    q: torch.Tensor,
    weights: torch.Tensor,
    k_cache: torch.Tensor,
    page_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    max_seqlen_q: int,
    max_seqlen_k: int,
    k_scale: torch.Tensor | None = None,
    causal: bool = True,
    out: torch.Tensor | None = None,
    solution: str | None = None,
) -> torch.Tensor:
    """Score each key of a request for each of its queries, over the indexer's paged key cache.

    The score of query t for key s is the sum over heads h of weights[t, h] * relu(q[t, h] . k[s]); all heads share one key. Queries
    are aligned with the tail of their request: of n queries over L keys, query i stands at position L - n + i, and with ``causal``
    it sees no later key. A key that a query does not see, or that lies on a page outside the cache, has score -inf; its memory is
    never used in arithmetic.

    Args:
        q: [num_tokens, num_index_heads, index_dim] fp32, fp16, bf16 (fp64 on the CPU); or fp8_e4m3, whose scale the caller has
            multiplied into weights. Last dimension contiguous.
        weights: [num_tokens, num_index_heads] float32, any sign; softmax scales and the like are in it.
        k_cache: [num_pages, page_size, index_dim] of q's dtype; or fp8_e4m3 beside any of these, with k_scale.
        page_table: [num_reqs, max_pages] int32, page indices; pages outside 0..num_pages-1 (-1, say) are masked.
        cu_seqlens_q: [num_reqs + 1] int32, request r's queries are rows [cu[r], cu[r + 1]); from 0 to num_tokens.
        seq_lens: [num_reqs] int32, tokens in the cache including the new ones.
        max_seqlen_q: int, at least every request's number of queries.
        max_seqlen_k: int, at least every entry of seq_lens; at most max_pages * page_size. The width of the result.
        k_scale: [num_pages, page_size] float32 and not negative, what each key is multiplied by; for fp8_e4m3 keys, which need it.
        causal: a query sees no key at a later position than its own.
        out: optional [num_tokens, max_seqlen_k] float32, last dimension contiguous, written in place.
        solution: solution or kernel to use instead of the best that qualifies.
    Returns:
        out, or a new tensor of that shape.
    Raises:
        ShapeError: shapes, dtypes or strides disagree.  NoKernelError: nothing qualifies.
    Source: DeepSeek-V3.2-Exp technical report, section 1, equation 1.
    """
    if is_compiling():
        result = _PAGED_LIBRARY(
            q, weights, k_cache, page_table, cu_seqlens_q, seq_lens, max_seqlen_q, max_seqlen_k, k_scale, causal, solution
        )
        return result if out is None else out.copy_(result)
    try:
        operands: tuple[torch.Tensor, ...] = (q, weights, k_cache, page_table, cu_seqlens_q, seq_lens)
        if k_scale is not None:
            operands += (k_scale,)
        if out is not None:
            operands += (out,)
        key = (q.shape, k_scale is None, None if out is None else max_seqlen_k, solution)
        looks_same, kernel = _PAGED.seen.get(key, NEW_CALL)
        if not looks_same(*operands) or page_table.shape[1] * k_cache.shape[1] < max_seqlen_k:
            op = INDEXER_SCORES.name
            _check_operands(op, q, weights, k_cache, "k_cache [num_pages, page_size, {}]", k_scale, out, max_seqlen_k)
            page_size = k_cache.shape[1]
            num_reqs = max(cu_seqlens_q.numel() - 1, 0)
            check_paged(op, q, page_size, page_table, seq_lens, max_seqlen_k, None)
            check_int32(op, "seq_lens", seq_lens, num_reqs, q)
            check_int32(op, "cu_seqlens_q", cu_seqlens_q, num_reqs + 1, q)
            check_devices(op, q.device, weights=weights, k_cache=k_cache, k_scale=k_scale, out=out)
            kernel = _PAGED.kernel(q.device, _formats(q, k_cache), (q.shape[2], q.shape[1]), solution)
            _PAGED.remember(key, kernel, *operands)
        scores: torch.Tensor = kernel(
            q,
            weights,
            k_cache,
            page_table,
            cu_seqlens_q,
            seq_lens,
            max_seqlen_q,
            max_seqlen_k,
            k_scale,
            causal,
            out,
        )
        return scores
    except OPERAND_ERRORS as error:
        refuse_kinds(indexer_scores, locals(), error)
        raise


def indexer_scores_ragged(
    q: torch.Tensor,
    weights: torch.Tensor,
    k: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    *,
    max_seqlen_q: int,
    max_seqlen_k: int,
    k_scale: torch.Tensor | None = None,
    causal: bool = True,
    out: torch.Tensor | None = None,
    solution: str | None = None,
) -> torch.Tensor:
    """Score each key of a request for each of its queries, over keys that lie one request after the other.

    As `indexer_scores`; column j of a row is key j of the row's request.

    Args:
        q: [num_tokens, num_index_heads, index_dim] fp32, fp16, bf16 (fp64 on the CPU); or fp8_e4m3, whose scale the caller has
            multiplied into weights. Last dimension contiguous.
        weights: [num_tokens, num_index_heads] float32, any sign.
        k: [num_keys, index_dim] of q's dtype; or fp8_e4m3 beside any of these, with k_scale.
        cu_seqlens_q: [num_reqs + 1] int32, request r's queries are rows [cu[r], cu[r + 1]); from 0 to num_tokens.
        cu_seqlens_k: [num_reqs + 1] int32, the same for its keys; from 0 to num_keys.
        max_seqlen_q: int, at least every request's number of queries.
        max_seqlen_k: int, at least every request's number of keys. The width of the result.
        k_scale: [num_keys] float32 and not negative, what each key is multiplied by; for fp8_e4m3 keys, which need it.
        causal: a query sees no key at a later position than its own.
        out: optional [num_tokens, max_seqlen_k] float32, last dimension contiguous, written in place.
        solution: solution or kernel to use instead of the best that qualifies.
    Returns:
        out, or a new tensor of that shape.
    Raises:
        ShapeError: shapes, dtypes or strides disagree.  NoKernelError: nothing qualifies.
    Source: DeepSeek-V3.2-Exp technical report, section 1, equation 1.
    """
    if is_compiling():
        result = _RAGGED_LIBRARY(q, weights, k, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, k_scale, causal, solution)
        return result if out is None else out.copy_(result)
    try:
        operands: tuple[torch.Tensor, ...] = (q, weights, k, cu_seqlens_q, cu_seqlens_k)
        if k_scale is not None:
            operands += (k_scale,)
        if out is not None:
            operands += (out,)
        key = (q.shape, k_scale is None, None if out is None else max_seqlen_k, solution)
        looks_same, kernel = _RAGGED.seen.get(key, NEW_CALL)
        if not looks_same(*operands):
            op = INDEXER_SCORES_RAGGED.name
            _check_operands(op, q, weights, k, "k [num_keys, {}]", k_scale, out, max_seqlen_k)
            num_reqs = max(cu_seqlens_q.numel() - 1, 0)
            check_int32(op, "cu_seqlens_q", cu_seqlens_q, num_reqs + 1, q)
            check_int32(op, "cu_seqlens_k", cu_seqlens_k, num_reqs + 1, q)
            check_devices(op, q.device, weights=weights, k=k, k_scale=k_scale, out=out)
            kernel = _RAGGED.kernel(q.device, _formats(q, k), (q.shape[2], q.shape[1]), solution)
            _RAGGED.remember(key, kernel, *operands)
        scores: torch.Tensor = kernel(
            q,
            weights,
            k,
            cu_seqlens_q,
            cu_seqlens_k,
            max_seqlen_q,
            max_seqlen_k,
            k_scale,
            causal,
            out,
        )
        return scores
    except OPERAND_ERRORS as error:
        refuse_kinds(indexer_scores_ragged, locals(), error)
        raise


def _formats(q: torch.Tensor, k: torch.Tensor) -> tuple[torch.dtype | Format, torch.dtype | Format]:
    return (_FP8_QUERIES if q.dtype is _FP8 else q.dtype), (_FP8_KEYS if k.dtype is _FP8 else k.dtype)


def _check_operands(
    op: str,
    q: torch.Tensor,
    weights: torch.Tensor,
    k: torch.Tensor,
    keys: str,
    k_scale: torch.Tensor | None,
    out: torch.Tensor | None,
    max_seqlen_k: int,
) -> None:
    """Say which operand does not fit; ``keys`` is the expected form of the keys with a place for index_dim."""
    if q.dim() != 3 or q.shape[1] == 0 or q.shape[2] == 0 or q.stride(2) != 1:
        refuse(op, "q [num_tokens, num_index_heads >= 1, index_dim >= 1], last dimension contiguous", q, strides=True)
    num_tokens, num_heads, dim = q.shape
    if weights.shape != (num_tokens, num_heads) or weights.dtype != torch.float32:
        refuse(op, f"weights [{num_tokens}, {num_heads}] float32", weights)
    if k.dim() != keys.count(",") + 1 or k.shape[-1] != dim or k.stride(-1) != 1 or (k.dim() == 3 and k.shape[1] == 0):
        refuse(op, f"{keys.format(dim)}, last dimension contiguous", k, strides=True)
    if (k_scale is None) != (k.dtype is not _FP8):
        got = f"{str(k.dtype).removeprefix('torch.')} keys {'without' if k_scale is None else 'with'} k_scale"
        raise ShapeError(op, expected="k_scale with fp8_e4m3 keys, and with these alone", got=got)
    if k_scale is not None and (k_scale.shape != k.shape[:-1] or k_scale.dtype != torch.float32):
        refuse(op, f"k_scale {list(k.shape[:-1])} float32", k_scale)
    if out is not None and (out.shape != (num_tokens, max_seqlen_k) or out.dtype != torch.float32 or out.stride(1) != 1):
        refuse(op, f"out [{num_tokens}, {max_seqlen_k}] float32, last dimension contiguous", out, strides=True)


def _paged_eager(
    q: torch.Tensor,
    weights: torch.Tensor,
    k_cache: torch.Tensor,
    page_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    k_scale: torch.Tensor | None = None,
    causal: bool = True,
    solution: str | None = None,
) -> torch.Tensor:
    return indexer_scores(
        q,
        weights,
        k_cache,
        page_table,
        cu_seqlens_q,
        seq_lens,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        k_scale=k_scale,
        causal=causal,
        solution=solution,
    )


def _paged_fake(
    q: torch.Tensor,
    weights: torch.Tensor,
    k_cache: torch.Tensor,
    page_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    k_scale: torch.Tensor | None = None,
    causal: bool = True,
    solution: str | None = None,
) -> torch.Tensor:
    return q.new_empty((q.shape[0], max_seqlen_k), dtype=torch.float32)


def _ragged_eager(
    q: torch.Tensor,
    weights: torch.Tensor,
    k: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    k_scale: torch.Tensor | None = None,
    causal: bool = True,
    solution: str | None = None,
) -> torch.Tensor:
    return indexer_scores_ragged(
        q,
        weights,
        k,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        k_scale=k_scale,
        causal=causal,
        solution=solution,
    )


def _ragged_fake(
    q: torch.Tensor,
    weights: torch.Tensor,
    k: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    k_scale: torch.Tensor | None = None,
    causal: bool = True,
    solution: str | None = None,
) -> torch.Tensor:
    return q.new_empty((q.shape[0], max_seqlen_k), dtype=torch.float32)


_PAGED_LIBRARY: Final = register_library_op(
    "indexer_scores(Tensor q, Tensor weights, Tensor k_cache, Tensor page_table, Tensor cu_seqlens_q, Tensor seq_lens, "
    "int max_seqlen_q, int max_seqlen_k, Tensor? k_scale=None, bool causal=True, str? solution=None) -> Tensor",
    _paged_eager,
    _paged_fake,
)
_RAGGED_LIBRARY: Final = register_library_op(
    "indexer_scores_ragged(Tensor q, Tensor weights, Tensor k, Tensor cu_seqlens_q, Tensor cu_seqlens_k, "
    "int max_seqlen_q, int max_seqlen_k, Tensor? k_scale=None, bool causal=True, str? solution=None) -> Tensor",
    _ragged_eager,
    _ragged_fake,
)
