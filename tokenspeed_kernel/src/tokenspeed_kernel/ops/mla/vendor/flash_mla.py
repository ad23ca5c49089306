"""Dense latent attention of FlashMLA: bf16, pages of 64 tokens."""

from __future__ import annotations

import inspect
import math
from typing import Any, Final

import flash_mla
import torch

from tokenspeed_kernel.ops.attention.plan import AttentionPlan
from tokenspeed_kernel.ops.attention.vendor.pages import compact, is_regular, one_query_rows

__all__ = ["mla_decode"]

# Newer wheels keep the dense kernels apart, and ask for them by this argument.
_DENSE: Final = {"use_legacy": True} if "use_legacy" in inspect.signature(flash_mla.flash_mla_with_kvcache).parameters else {}


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
    num_pages, page_size, _ = kv_cache.shape
    shape = (num_reqs, q_len, num_heads, latent_dim)
    if 0 in (num_reqs, q_len, num_pages):
        result = torch.zeros(shape, dtype=q.dtype, device=q.device) if out is None else out.zero_()
        return (result, torch.full(shape[:-1], -math.inf, device=q.device)) if return_lse else result

    def build() -> Any:
        table, lens, rows, masked = page_table, seq_lens, num_reqs, causal and q_len > 1
        pages = compact(table, lens, page_size, num_pages)
        if masked and not is_regular(pages, lens, torch.full_like(lens, q_len), page_size):
            starts = torch.arange(num_reqs + 1, dtype=torch.int32, device=q.device) * q_len
            rows, masked = num_reqs * q_len, False
            pages = compact(*one_query_rows(table, lens, starts, rows, causal=True), page_size, num_pages)
        dead = pages.seq_lens == 0
        # A length of 0 is not asked for: such rows read one key of some page, and are overwritten.
        return pages.page_table, pages.seq_lens.clamp(min=1), dead, rows, masked, flash_mla.get_mla_metadata()[0]

    key = ("flash_mla", num_pages, q.shape, causal)
    table, lens, dead, rows, masked, schedule = build() if plan is None else plan.prepared(key, build)
    attended, lse = flash_mla.flash_mla_with_kvcache(
        q.reshape(rows, -1, num_heads, width),
        kv_cache.unsqueeze(2),
        table,
        lens,
        latent_dim,
        schedule,
        None,
        softmax_scale,
        masked,
        **_DENSE,
    )
    attended = attended.masked_fill_(dead[:, None, None, None], 0).view(shape)
    result = attended if out is None else out.copy_(attended)
    if not return_lse:
        return result
    # [rows, num_heads, queries] there.
    lse = lse.transpose(1, 2).masked_fill(dead[:, None, None], -math.inf).reshape(shape[:-1])
    return result, lse.float()
