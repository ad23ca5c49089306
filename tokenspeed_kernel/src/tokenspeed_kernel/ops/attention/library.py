"""The attention ops' form in `torch.library`, for torch.compile and export."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

from tokenspeed_kernel.ops import library

_OPTIONS: Final = (
    "float? softmax_scale, {causal}int? sliding_window, float? logit_cap, Tensor? sinks, bool return_lse, str? solution"
)
_OPERANDS: Final = {
    "mha_prefill": "Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, int max_seqlen_q, int max_seqlen_k",
    "mha_extend": (
        "Tensor q, Tensor k_cache, Tensor v_cache, Tensor page_table, Tensor cu_seqlens_q, Tensor seq_lens, "
        "int max_seqlen_q, int max_seqlen_k"
    ),
    "mha_decode": "Tensor q, Tensor k_cache, Tensor v_cache, Tensor page_table, Tensor seq_lens, int max_seqlen_k",
    "mha_extend_scaled": (
        "Tensor q, Tensor k_cache, Tensor v_cache, Tensor page_table, Tensor cu_seqlens_q, Tensor seq_lens, "
        "Tensor k_scale, Tensor v_scale, int max_seqlen_q, int max_seqlen_k"
    ),
    "mha_decode_scaled": (
        "Tensor q, Tensor k_cache, Tensor v_cache, Tensor page_table, Tensor seq_lens, Tensor k_scale, Tensor v_scale, "
        "int max_seqlen_k"
    ),
}


def register(name: str, eager: Callable[..., Any]) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """Define ``tokenspeed::<name>`` over the eager op. It always returns (output, LSE); the LSE is empty unless asked for."""
    options = _OPTIONS.format(causal="" if name.startswith("mha_decode") else "bool causal, ")
    arguments = f"{_OPERANDS[name]}, {options}"
    num_positional = arguments.split(", int ")[0].count(",") + 1
    return library.register(name, arguments, eager, lambda named: tuple(named["q"].shape), num_positional)
