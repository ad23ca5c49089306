"""Attention of cuDNN over ragged keys, through PyTorch.

The library's masks start at the first key while those here end at the last one. The two are the same where a sequence has as many
queries as keys; with more keys than queries the keys that every query sees are taken without a mask and merged by their LSE.
Lengths are read on the host, which waits for the device; sequences of one shape that lie side by side go into one call.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["mha_prefill"]


@dataclass(frozen=True, slots=True)
class _Run:
    """`count` sequences behind one another, each of `queries` and `keys` tokens, from token `first_query` and `first_key` on."""

    count: int
    queries: int
    keys: int
    first_query: int
    first_key: int


def _runs(cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor) -> Iterator[_Run]:
    starts, key_starts = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    bounds = zip(itertools.pairwise(starts), itertools.pairwise(key_starts), strict=True)
    shapes = [(end - start, key_end - key_start, start, key_start) for (start, end), (key_start, key_end) in bounds]
    for (queries, keys), group in itertools.groupby(shapes, key=lambda shape: shape[:2]):
        members = list(group)
        if queries and keys:
            yield _Run(len(members), queries, keys, members[0][2], members[0][3])


def _split(rows: torch.Tensor, count: int) -> torch.Tensor:
    """A view of [count * tokens, ...] as [count, tokens, ...], whatever the strides."""
    return rows.as_strided(
        (count, rows.shape[0] // count, *rows.shape[1:]), (rows.stride(0) * (rows.shape[0] // count), *rows.stride())
    )


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, *, causal: bool, lse: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Of [count, tokens, heads, dim]: the output in the same form, and [count, tokens, heads] float32 LSE of base e."""
    got = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), None, lse, 0.0, causal, False, scale=scale
    )
    count, num_queries, num_heads, _ = q.shape
    return got[0].transpose(1, 2), got[1].view(count, num_heads, num_queries).transpose(1, 2) if lse else None


def _merge(
    first: tuple[torch.Tensor, torch.Tensor | None], second: tuple[torch.Tensor, torch.Tensor | None]
) -> tuple[torch.Tensor, torch.Tensor]:
    assert first[1] is not None and second[1] is not None
    lse = torch.logaddexp(first[1], second[1])
    parts = (out.float() * torch.exp(own - lse).unsqueeze(-1) for out, own in ((first[0], first[1]), (second[0], second[1])))
    return sum(parts, torch.zeros((), device=lse.device)).to(first[0].dtype), lse


def mha_prefill(
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
    sliding_window: int | None = None,
    logit_cap: float | None = None,
    sinks: torch.Tensor | None = None,
    return_lse: bool = False,
    out: torch.Tensor | None = None,
) -> Any:
    """See `tokenspeed_kernel.ops.attention.mha_prefill`."""
    scale = softmax_scale if softmax_scale is not None else q.shape[-1] ** -0.5
    result = torch.zeros_like(q, memory_format=torch.contiguous_format) if out is None else out.zero_()
    result_lse = torch.full(q.shape[:-1], -math.inf, dtype=torch.float32, device=q.device) if return_lse else None
    for run in _runs(cu_seqlens_q, cu_seqlens_k):
        blind = max(0, run.queries - run.keys) if causal else 0  # queries that stand before the first key
        shared = max(0, run.keys - run.queries) if causal else 0  # keys that every query sees
        query_slice = slice(run.first_query, run.first_query + run.count * run.queries)
        key_slice = slice(run.first_key, run.first_key + run.count * run.keys)
        queries = _split(q[query_slice], run.count)[:, blind:]
        keys, values = (_split(x[key_slice], run.count) for x in (k, v))
        want_lse = return_lse or shared > 0
        got: tuple[torch.Tensor, torch.Tensor | None] = _attend(
            queries, keys[:, shared:], values[:, shared:], scale, causal=causal, lse=want_lse
        )
        if shared:
            before = _attend(queries, keys[:, :shared], values[:, :shared], scale, causal=False, lse=True)
            got = _merge(before, got)
        _split(result[query_slice], run.count)[:, blind:] = got[0]
        if result_lse is not None and got[1] is not None:
            _split(result_lse[query_slice], run.count)[:, blind:] = got[1]
    return result if result_lse is None else (result, result_lse)
