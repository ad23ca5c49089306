"""The truth for the mixture-of-experts ops: float64, one expert after the other, rounded once."""

from __future__ import annotations

import torch
from torch.nn.functional import gelu

from tokenspeed_kernel.ops.moe.gate import GatedActivation
from tokenspeed_kernel.ops.quantization.reference_decode import decode
from tokenspeed_kernel.ops.quantization.reference_encode import encode
from tokenspeed_kernel.quantized import QuantizedTensor
from tokenspeed_kernel.signature import Format

__all__ = ["fused_experts", "permute", "topk_routing", "unpermute"]

_LARGEST = torch.finfo(torch.float32).max


def topk_routing(
    logits: torch.Tensor,
    top_k: int,
    *,
    scoring: str = "softmax",
    renormalize: bool = False,
    correction_bias: torch.Tensor | None = None,
    num_groups: int = 1,
    top_groups: int = 1,
    group_score: str = "max",
    scaling_factor: float = 1.0,
    weights_out: torch.Tensor | None = None,
    ids_out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `tokenspeed_kernel.ops.moe.topk_routing`."""
    num_tokens, num_experts = logits.shape
    finite = logits.double().nan_to_num(nan=-_LARGEST).clamp(-_LARGEST, _LARGEST)
    scores = finite if scoring == "topk_softmax" else finite.softmax(1) if scoring == "softmax" else finite.sigmoid()
    # Scores are float32: two that are equal there are equal, and what is too small for it is 0.
    choice = scores.float()
    if correction_bias is not None:
        choice = (choice + correction_bias.float()).nan_to_num(nan=-_LARGEST).clamp(-_LARGEST, _LARGEST)
    if num_groups > 1:
        groups = choice.view(num_tokens, num_groups, num_experts // num_groups)
        count = min(2, groups.shape[2]) if group_score == "top2_sum" else 1
        worth = groups.sort(dim=2, descending=True).values[:, :, :count].sum(dim=2)
        best = worth.sort(dim=1, descending=True, stable=True).indices[:, :top_groups]
        allowed = torch.zeros_like(worth, dtype=torch.bool).scatter_(1, best, True)
        choice = groups.masked_fill(~allowed[:, :, None], float("-inf")).reshape(num_tokens, num_experts)
    ids = choice.sort(dim=1, descending=True, stable=True).indices[:, :top_k]
    weights = scores.float().double().gather(1, ids)
    if scoring == "topk_softmax":
        weights = weights.softmax(1)
    if renormalize:
        weights = weights / (weights.sum(dim=1, keepdim=True) + 1e-20)
    weights = weights * scaling_factor
    return (
        weights.float() if weights_out is None else weights_out.copy_(weights),
        ids.int() if ids_out is None else ids_out.copy_(ids),
    )


def permute(
    x: torch.Tensor, topk_ids: torch.Tensor, *, num_experts: int, first_expert: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `tokenspeed_kernel.ops.moe.permute`."""
    top_k = topk_ids.shape[1]
    rows = x.new_zeros((topk_ids.numel(), x.shape[1]))
    row_of_pair = torch.full((topk_ids.numel(),), -1, dtype=torch.int32)
    offsets = [0]
    flat = topk_ids.flatten().tolist()
    for expert in range(first_expert, first_expert + num_experts):
        pairs = [pair for pair, one in enumerate(flat) if one == expert]
        for row, pair in enumerate(pairs, start=offsets[-1]):
            rows[row] = x[pair // top_k]
            row_of_pair[pair] = row
        offsets.append(offsets[-1] + len(pairs))
    expert_offsets = torch.tensor(offsets, dtype=torch.int32, device=x.device)
    return rows, expert_offsets, row_of_pair.view(topk_ids.shape).to(x.device)


def unpermute(
    rows: torch.Tensor,
    row_of_pair: torch.Tensor,
    topk_weights: torch.Tensor,
    *,
    addend: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `tokenspeed_kernel.ops.moe.unpermute`."""
    num_tokens, top_k = row_of_pair.shape
    total = torch.zeros((num_tokens, rows.shape[1]), dtype=torch.float64, device=rows.device)
    if addend is not None:
        total += addend
    for slot in range(top_k):
        row = row_of_pair[:, slot].long()
        valid = (row >= 0) & (row < rows.shape[0])
        total[valid] += rows[row[valid]].double() * topk_weights[valid, slot].double()[:, None]
    return total.to(rows.dtype) if out is None else out.copy_(total)


def fused_experts(
    x: torch.Tensor,
    w13: torch.Tensor | QuantizedTensor,
    w2: torch.Tensor | QuantizedTensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    *,
    w13_bias: torch.Tensor | None = None,
    w2_bias: torch.Tensor | None = None,
    activation: GatedActivation | None = None,
    activation_format: str | None = None,
    first_expert: int = 0,
    addend: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `tokenspeed_kernel.ops.moe.fused_experts`."""
    gate = activation or GatedActivation()
    total = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    if addend is not None:
        total += addend
    for expert in range(w13.shape[0]):
        token, slot = (topk_ids == first_expert + expert).nonzero(as_tuple=True)
        if token.numel() == 0:
            continue
        hidden = _rows(x[token], activation_format) @ _matrix(w13, expert).t()
        hidden = _gated(hidden if w13_bias is None else hidden + w13_bias[expert], gate)
        if activation_format is not None:  # without it, what is rounded to x's dtype on the way is a kernel's own affair
            hidden = _rows(hidden.to(x.dtype), activation_format)
        result = hidden @ _matrix(w2, expert).t()
        result = result if w2_bias is None else result + w2_bias[expert]
        total.index_add_(0, token, result * topk_weights[token, slot].double()[:, None])
    return total.to(x.dtype) if out is None else out.copy_(total)


def _rows(rows: torch.Tensor, activation_format: str | None) -> torch.Tensor:
    """Rows of a product, rounded to the format."""
    return rows.double() if activation_format is None else decode(encode(rows, Format.parse(activation_format), None, None))


def _matrix(stack: torch.Tensor | QuantizedTensor, expert: int) -> torch.Tensor:
    return stack[expert].double() if isinstance(stack, torch.Tensor) else decode(stack[expert])


def _gated(hidden: torch.Tensor, activation: GatedActivation) -> torch.Tensor:
    gate, up = hidden.chunk(2, dim=1)
    if activation.kind != "swiglu":
        return gelu(gate, approximate="tanh" if activation.kind == "gelu_tanh" else "none") * up
    gate, up = gate.clamp(max=activation.limit), up.clamp(-activation.limit, activation.limit)
    return gate * torch.sigmoid(activation.alpha * gate) * (up + activation.up_offset)
