"""Latent attention over expanded keys on Hopper: the kernel of `attention.hopper.prefill`, with keys of 192 and values of 128."""

from __future__ import annotations

import torch

from tokenspeed_kernel.ops.attention.hopper.prefill import attend, bulk_copies, new_counters
from tokenspeed_kernel.ops.mla.triton import prefill

__all__ = ["mla_prefill"]


def mla_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float | None = None,
    causal: bool = True,
    return_lse: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """See `tokenspeed_kernel.ops.mla.mla_prefill`."""
    if not bulk_copies(q, k, v, softmax_scale):
        return prefill.mla_prefill(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k, softmax_scale=softmax_scale,
            causal=causal, return_lse=return_lse, out=out,
        )  # fmt: skip
    return attend(
        q, k, v, None, cu_seqlens_q, cu_seqlens_k, softmax_scale=softmax_scale, causal=causal, return_lse=return_lse, out=out,
        counters=new_counters(q.device),
    )  # fmt: skip
