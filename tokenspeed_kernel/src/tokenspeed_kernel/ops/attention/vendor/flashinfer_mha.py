"""Attention of FlashInfer over paged and ragged keys.

Its planning runs on the host and waits for the device; a plan of the batch (`attention.plan`) lets all layers share it. Its LSE has
base 2, and queries without keys, and pages that do not exist, are dealt with here.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, Final

import torch
from flashinfer.decode import BatchDecodeWithPagedKVCacheWrapper
from flashinfer.prefill import BatchPrefillWithPagedKVCacheWrapper, BatchPrefillWithRaggedKVCacheWrapper

from tokenspeed_kernel.errors import ShapeError
from tokenspeed_kernel.ops.attention.plan import AttentionPlan
from tokenspeed_kernel.ops.attention.vendor.pages import CompactPages, compact, host_pages, is_regular, one_query_rows

__all__ = ["empty_result", "finish", "mha_decode", "mha_extend", "mha_prefill", "workspace"]

_WORKSPACE_BYTES: Final = 128 << 20  # what the library's documentation asks for
_LN2: Final = math.log(2.0)


@functools.lru_cache(maxsize=16)
def workspace(device: torch.device) -> torch.Tensor:
    """The library's scratch memory on a device; calls on one stream share it."""
    with torch.inference_mode(False):
        return torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)


def empty_result(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, out: torch.Tensor | None, return_lse: bool
) -> Any:
    """What queries without any key get: 0 and -inf."""
    result = torch.zeros(shape, dtype=dtype, device=device) if out is None else out.zero_()
    return (result, torch.full(shape[:-1], -math.inf, device=device)) if return_lse else result


def finish(
    run: Callable[[torch.Tensor], Any],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    out: torch.Tensor | None,
    return_lse: bool,
    dead: torch.Tensor | None,
    lse_scale: float = _LN2,
) -> Any:
    """Run into `out` or beside it, turn the LSE to base e, and overwrite rows that see no key.

    Args:
        run: writes the output into the tensor that it is given; returns (output, LSE) where that is wanted.
        shape, dtype, device: of the output.
        out: the caller's.
        return_lse: the LSE is wanted.
        dead: [*shape[:-2]] bool, queries that see no key; None where there are none.
        lse_scale: factor of the library's LSE.
    """
    direct = out is not None and out.is_contiguous()
    target = out if out is not None and direct else torch.empty(shape, dtype=dtype, device=device)
    got = run(target)
    lse = (got[1].float() * lse_scale).view(shape[:-1]) if return_lse else None
    if dead is not None:
        target.masked_fill_(dead[..., None, None], 0)
        if lse is not None:
            lse.masked_fill_(dead[..., None], -math.inf)
    result = target if out is None or direct else out.copy_(target)
    return (result, lse) if return_lse else result


def mha_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    max_seqlen_k: int,
    softmax_scale: float | None = None,
    sliding_window: int | None = None,
    logit_cap: float | None = None,
    sinks: torch.Tensor | None = None,
    return_lse: bool = False,
    out: torch.Tensor | None = None,
    plan: AttentionPlan | None = None,
) -> Any:
    """See `tokenspeed_kernel.ops.attention.mha_decode`."""
    _check_caches("attention.mha_decode", k_cache, v_cache)
    num_pages, page_size, num_kv_heads, head_dim = k_cache.shape
    num_heads = q.shape[1]

    def build() -> tuple[Any, torch.Tensor | None] | None:
        pages = compact(page_table, seq_lens, page_size, num_pages)
        host = host_pages(pages, page_size)
        if len(host.indices) == 0:
            return None
        # Its kernel without tensor cores knows few ratios of heads; with them any will do.
        wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace(q.device), "NHD", use_tensor_cores=num_heads > num_kv_heads)
        wrapper.plan(
            host.indptr,
            host.indices,
            host.last_page_len,
            num_heads,
            num_kv_heads,
            head_dim,
            page_size,
            q_data_type=q.dtype,
            kv_data_type=k_cache.dtype,
            sm_scale=softmax_scale if softmax_scale is not None else head_dim**-0.5,
            logits_soft_cap=logit_cap,
        )
        return wrapper, pages.seq_lens == 0 if host.has_empty else None

    key = ("flashinfer_mha_decode", num_pages, q.shape, q.dtype, num_kv_heads, softmax_scale, logit_cap)
    prepared = _prepared(plan, key, build)
    if prepared is None:
        return empty_result(tuple(q.shape), q.dtype, q.device, out, return_lse)
    wrapper, dead = prepared

    def run(target: torch.Tensor) -> Any:
        return wrapper.run(q.contiguous(), (k_cache, v_cache), out=target, return_lse=return_lse)

    return finish(run, tuple(q.shape), q.dtype, q.device, out, return_lse, dead)


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
) -> Any:
    """See `tokenspeed_kernel.ops.attention.mha_extend`."""
    _check_caches("attention.mha_extend", k_cache, v_cache)
    num_pages, page_size, num_kv_heads, head_dim = k_cache.shape
    scale = softmax_scale if softmax_scale is not None else head_dim**-0.5

    def build() -> tuple[Any, torch.Tensor | None] | None:
        pages = compact(page_table, seq_lens, page_size, num_pages)
        counts = cu_seqlens_q[1:] - cu_seqlens_q[:-1]
        if causal and not is_regular(pages, seq_lens, counts, page_size):
            return None
        host = host_pages(pages, page_size)
        if len(host.indices) == 0:
            return None
        wrapper = BatchPrefillWithPagedKVCacheWrapper(workspace(q.device), "NHD")
        wrapper.plan(
            cu_seqlens_q.cpu(),
            host.indptr,
            host.indices,
            host.last_page_len,
            q.shape[1],
            num_kv_heads,
            head_dim,
            page_size,
            causal=causal,
            sm_scale=scale,
            logits_soft_cap=logit_cap,
            q_data_type=q.dtype,
            kv_data_type=k_cache.dtype,
        )
        return wrapper, _dead_tokens(pages, counts, q.shape[0]) if host.has_empty else None

    key = ("flashinfer_mha_extend", num_pages, q.shape, q.dtype, num_kv_heads, scale, logit_cap, causal)
    prepared = _prepared(plan, key, build) if q.shape[0] else None
    if prepared is None:
        table, lens = one_query_rows(page_table, seq_lens, cu_seqlens_q, q.shape[0], causal=causal)
        return mha_decode(
            q,
            k_cache,
            v_cache,
            table,
            lens,
            max_seqlen_k=max_seqlen_k,
            softmax_scale=softmax_scale,
            logit_cap=logit_cap,
            return_lse=return_lse,
            out=out,
        )
    wrapper, dead = prepared

    def run(target: torch.Tensor) -> Any:
        return wrapper.run(q.contiguous(), (k_cache, v_cache), out=target, return_lse=return_lse)

    return finish(run, tuple(q.shape), q.dtype, q.device, out, return_lse, dead)


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
    starts, key_starts = cu_seqlens_q.cpu(), cu_seqlens_k.cpu()
    queries, keys = starts[1:] - starts[:-1], key_starts[1:] - key_starts[:-1]
    # Queries before the first key see none, and the library is not asked about them.
    blind = (queries - keys).clamp_(min=0) if causal else torch.where(keys == 0, queries, 0)
    if bool((blind == queries).all()):
        return empty_result(tuple(q.shape), q.dtype, q.device, out, return_lse)
    seeing = None
    if bool(blind.any()):
        owner = torch.repeat_interleave(queries.long())
        token = torch.arange(len(owner)) - starts[:-1].long()[owner]
        seeing = (token >= blind[owner]).nonzero().squeeze(1).to(q.device)
        starts = torch.zeros_like(starts)
        torch.cumsum(queries - blind, 0, out=starts[1:])
    num_heads, head_dim = q.shape[1:]
    wrapper = BatchPrefillWithRaggedKVCacheWrapper(workspace(q.device), "NHD")
    wrapper.plan(
        starts,
        key_starts,
        num_heads,
        k.shape[1],
        head_dim,
        causal=causal,
        sm_scale=softmax_scale if softmax_scale is not None else head_dim**-0.5,
        logits_soft_cap=logit_cap,
        q_data_type=q.dtype,
        kv_data_type=k.dtype,
    )
    k, v = k.contiguous(), v.contiguous()
    if seeing is None:

        def run(target: torch.Tensor) -> Any:
            return wrapper.run(q.contiguous(), k, v, out=target, return_lse=return_lse)

        return finish(run, tuple(q.shape), q.dtype, q.device, out, return_lse, None)
    got = wrapper.run(q[seeing].contiguous(), k, v, return_lse=return_lse)
    result = empty_result(tuple(q.shape), q.dtype, q.device, out, return_lse)
    if return_lse:
        result[0][seeing] = got[0]
        result[1][seeing] = got[1].float() * _LN2
    else:
        result[seeing] = got
    return result


def _prepared(plan: AttentionPlan | None, key: tuple[Any, ...], build: Callable[[], Any]) -> Any:
    """What `build` gives, once a batch. None counts too, so it is wrapped: a plan asks again for what it does not have."""
    return build() if plan is None else plan.prepared(key, lambda: (build(),))[0]


def _dead_tokens(pages: CompactPages, counts: torch.Tensor, num_tokens: int) -> torch.Tensor:
    return torch.repeat_interleave(pages.seq_lens == 0, counts.long(), output_size=num_tokens)


def _check_caches(op: str, k_cache: torch.Tensor, v_cache: torch.Tensor) -> None:
    if k_cache.stride() != v_cache.stride():
        raise ShapeError(
            op,
            expected="k_cache and v_cache with the same strides",
            got=f"{k_cache.stride()} and {v_cache.stride()}",
            fix="lay both out alike, or pass another solution",
        )
