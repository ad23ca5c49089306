"""Latent attention of FlashInfer."""

from __future__ import annotations

from typing import Any

import torch
from flashinfer.mla import BatchMLAPagedAttentionWrapper, MLAPlanMetadata

from tokenspeed_kernel.ops.attention.plan import AttentionPlan
from tokenspeed_kernel.ops.attention.vendor.flashinfer_mha import empty_result, finish, workspace
from tokenspeed_kernel.ops.attention.vendor.pages import compact, host_pages, is_regular, one_query_rows

__all__ = ["mla_decode", "mla_extend"]


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
) -> Any:
    """See `tokenspeed_kernel.ops.mla.mla_decode`."""
    num_reqs, q_len, num_heads, width = q.shape
    starts = torch.arange(num_reqs + 1, dtype=torch.int32, device=q.device) * q_len
    direct = out is not None and out.is_contiguous()
    got = mla_extend(
        q.reshape(-1, num_heads, width),
        kv_cache,
        page_table,
        starts,
        seq_lens,
        max_seqlen_q=q_len,
        max_seqlen_k=max_seqlen_k,
        softmax_scale=softmax_scale,
        latent_dim=latent_dim,
        causal=causal,
        return_lse=return_lse,
        out=out.view(-1, num_heads, latent_dim) if out is not None and direct else None,
        plan=plan,
    )
    result = (got[0] if return_lse else got).view(num_reqs, q_len, num_heads, latent_dim)
    if out is not None:
        result = out if direct else out.copy_(result)
    return (result, got[1].view(num_reqs, q_len, num_heads)) if return_lse else result


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
) -> Any:
    """See `tokenspeed_kernel.ops.mla.mla_extend`."""
    num_tokens, num_heads, width = q.shape
    num_pages, page_size, _ = kv_cache.shape
    shape = (num_tokens, num_heads, latent_dim)
    if num_tokens == 0:
        return empty_result(shape, q.dtype, q.device, out, return_lse)

    def build() -> Any:
        table, lens, starts, masked = page_table, seq_lens, cu_seqlens_q, causal
        pages = compact(table, lens, page_size, num_pages)
        counts = starts[1:] - starts[:-1]
        if masked and not is_regular(pages, lens, counts, page_size):
            table, lens = one_query_rows(table, lens, starts, num_tokens, causal=True)
            starts, masked = torch.arange(num_tokens + 1, dtype=torch.int32, device=q.device), False
            counts = torch.ones_like(lens)
            pages = compact(table, lens, page_size, num_pages)
        host = host_pages(pages, page_size)
        if len(host.indices) == 0:
            return None
        wrapper = BatchMLAPagedAttentionWrapper(workspace(q.device))
        wrapper.plan(
            metadata=MLAPlanMetadata.csr(starts.cpu(), host.indptr, host.indices, host.seq_lens),
            num_heads=num_heads,
            head_dim_ckv=latent_dim,
            head_dim_kpe=width - latent_dim,
            page_size=page_size,
            causal=masked,
            sm_scale=softmax_scale,
            q_data_type=q.dtype,
            kv_data_type=kv_cache.dtype,
            query_layout="split",
            kv_cache_layout="split",
            lse_mode="base2" if return_lse else "none",
        )
        dead = torch.repeat_interleave(pages.seq_lens == 0, counts.long(), output_size=num_tokens) if host.has_empty else None
        return wrapper, dead

    key = ("flashinfer_mla", num_pages, q.shape, q.dtype, latent_dim, softmax_scale, causal, return_lse)
    prepared = build() if plan is None else plan.prepared(key, lambda: (build(),))[0]
    if prepared is None:
        return empty_result(shape, q.dtype, q.device, out, return_lse)
    wrapper, dead = prepared
    parts = {
        "query": (q[..., :latent_dim], q[..., latent_dim:]),
        "kv_cache": (kv_cache[..., :latent_dim], kv_cache[..., latent_dim:]),
    }

    def run(target: torch.Tensor) -> Any:
        return wrapper.run(**parts, out=target, return_lse=return_lse)

    return finish(run, shape, q.dtype, q.device, out, return_lse, dead)
