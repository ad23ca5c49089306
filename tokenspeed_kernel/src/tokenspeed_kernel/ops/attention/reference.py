"""The truth of the attention family: one query row at a time over the keys that it sees, in float64.

Only keys that a row may see are ever read, so whatever lies in masked slots cannot leak into a result.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from tokenspeed_kernel.ops.attention.plan import AttentionPlan


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
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attend ragged queries to ragged keys; see the public op for the contract."""
    result, lse = _outputs(q)
    starts_q, starts_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for request in range(len(starts_q) - 1):
        keys = k[starts_k[request] : starts_k[request + 1]]
        values = v[starts_k[request] : starts_k[request + 1]]
        rows = range(starts_q[request], starts_q[request + 1])
        for row in rows:
            position = len(keys) - len(rows) + (row - rows.start)
            seen = _visible(position, len(keys), causal, sliding_window)
            result[row], lse[row] = _attend(q[row], keys[seen], values[seen], softmax_scale, logit_cap, sinks)
    return _deliver(result, lse, q, return_lse, out)


def mha_extend(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
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
    plan: AttentionPlan | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attend each request's new queries to its paged cache; see the public op for the contract."""
    num_pages, page_size = k_cache.shape[:2]
    result, lse = _outputs(q)
    starts = cu_seqlens_q.tolist()
    for request, seq_len in enumerate(seq_lens.tolist()):
        pages = page_table[request].tolist()
        rows = range(starts[request], starts[request + 1])
        for row in rows:
            position = seq_len - len(rows) + (row - rows.start)
            seen = [key for key in _visible(position, seq_len, causal, sliding_window) if 0 <= pages[key // page_size] < num_pages]
            where = ([pages[key // page_size] for key in seen], [key % page_size for key in seen])
            result[row], lse[row] = _attend(q[row], k_cache[where], v_cache[where], softmax_scale, logit_cap, sinks)
    return _deliver(result, lse, q, return_lse, out)


def mha_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seqlen_k: int,
    softmax_scale: float | None = None,
    sliding_window: int | None = None,
    logit_cap: float | None = None,
    sinks: torch.Tensor | None = None,
    return_lse: bool = False,
    out: torch.Tensor | None = None,
    plan: AttentionPlan | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attend each request's newest query to its paged cache; see the public op for the contract."""
    return mha_extend(
        q,
        k_cache,
        v_cache,
        page_table,
        torch.arange(q.shape[0] + 1, dtype=torch.int32),
        seq_lens,
        max_seqlen_q=1,
        max_seqlen_k=max_seqlen_k,
        softmax_scale=softmax_scale,
        sliding_window=sliding_window,
        logit_cap=logit_cap,
        sinks=sinks,
        return_lse=return_lse,
        out=out,
    )


def merge_states(
    outs: Sequence[torch.Tensor],
    lses: Sequence[torch.Tensor],
    *,
    out: torch.Tensor | None = None,
    lse_out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge states over parts of the keys; see the public op for the contract."""
    logs = torch.stack([lse.to(torch.float64) for lse in lses])
    total = torch.logsumexp(logs, dim=0)
    merged = torch.zeros(outs[0].shape, dtype=torch.float64, device=outs[0].device)
    for part, log in zip(outs, logs, strict=True):
        seen = log > -math.inf  # where a state saw no key, its output means nothing
        merged[seen] += torch.exp(log - total)[seen][:, None] * part[seen].to(torch.float64)
    return (
        merged.to(outs[0].dtype) if out is None else out.copy_(merged),
        total.to(torch.float32) if lse_out is None else lse_out.copy_(total),
    )


def _visible(position: int, num_keys: int, causal: bool, sliding_window: int | None) -> list[int]:
    """Positions of the keys that the query at ``position`` sees."""
    last = position if causal else num_keys - 1
    first = 0 if sliding_window is None else max(0, position - sliding_window + 1)
    return list(range(first, last + 1))


def _attend(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    softmax_scale: float | None,
    logit_cap: float | None,
    sinks: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One query [Hq, D] over n keys [n, Hkv, D]: the output [Hq, D] and the log of the softmax's denominator [Hq]."""
    num_heads, head_dim = q.shape
    group = num_heads // keys.shape[1]
    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    keys = keys.to(torch.float64).repeat_interleave(group, dim=1)
    values = values.to(torch.float64).repeat_interleave(group, dim=1)
    logits = torch.einsum("hd,nhd->hn", q.to(torch.float64), keys) * scale
    if logit_cap is not None:
        logits = logit_cap * torch.tanh(logits / logit_cap)
    terms = logits if sinks is None else torch.cat((logits, sinks.to(torch.float64)[:, None]), dim=1)
    if terms.shape[1] == 0:
        return torch.zeros_like(q, dtype=torch.float64), torch.full_like(q[:, 0], -math.inf, dtype=torch.float64)
    lse = torch.logsumexp(terms, dim=1)
    return torch.einsum("hn,nhd->hd", torch.exp(logits - lse[:, None]), values), lse


def _outputs(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros_like(q, dtype=torch.float64), torch.zeros(q.shape[:2], dtype=torch.float64, device=q.device)


def _deliver(
    result: torch.Tensor, lse: torch.Tensor, q: torch.Tensor, return_lse: bool, out: torch.Tensor | None
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    result = result.to(q.dtype) if out is None else out.copy_(result)
    return (result, lse.to(torch.float32)) if return_lse else result
