"""The attention ops' form in `torch.library`, for torch.compile and export."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

from tokenspeed_kernel.dispatch import register_library_op

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
}


def register(name: str, eager: Callable[..., Any]) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """Define ``tokenspeed::<name>`` over the eager op. It always returns (output, LSE); the LSE is empty unless asked for."""
    options = _OPTIONS.format(causal="" if name == "mha_decode" else "bool causal, ")
    arguments = f"{_OPERANDS[name]}, {options}"
    parameters = [argument.split()[-1] for argument in arguments.split(", ")]
    num_positional = arguments.split(", int ")[0].count(",") + 1

    def implementation(*given: Any) -> tuple[torch.Tensor, torch.Tensor]:
        named = dict(zip(parameters[num_positional:], given[num_positional:], strict=True))
        attended = eager(*given[:num_positional], **named)
        if isinstance(attended, tuple):
            return attended
        return attended, attended.new_empty((0,), dtype=torch.float32)

    def fake(*given: Any) -> tuple[torch.Tensor, torch.Tensor]:
        q = given[0]
        wants_lse = given[parameters.index("return_lse")]
        lse_shape = (q.shape[0], q.shape[1]) if wants_lse else (0,)
        return q.new_empty(q.shape), q.new_empty(lse_shape, dtype=torch.float32)

    operator: Callable[..., tuple[torch.Tensor, torch.Tensor]] = register_library_op(
        f"{name}({arguments}) -> (Tensor, Tensor)", implementation, fake
    )
    return operator
