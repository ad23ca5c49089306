"""Top-k routing on the CPU, in float32."""

from __future__ import annotations

import torch

__all__ = ["topk_routing"]

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
    scores = logits.float().nan_to_num(nan=-_LARGEST, posinf=_LARGEST, neginf=-_LARGEST)
    if scoring != "topk_softmax":
        scores = scores.softmax(1) if scoring == "softmax" else scores.sigmoid()
    choice = scores
    if correction_bias is not None:
        choice = (scores + correction_bias).nan_to_num_(nan=-_LARGEST, posinf=_LARGEST, neginf=-_LARGEST)
    if num_groups > 1:
        choice = _within_groups(choice, num_groups, top_groups, group_score)
    # torch.topk breaks ties at will; a stable sort keeps the lowest index in front.
    ids = choice.sort(dim=1, descending=True, stable=True).indices[:, :top_k]
    weights = scores.gather(1, ids)
    if scoring == "topk_softmax":
        weights = weights.softmax(1)
    if renormalize:
        weights /= weights.sum(dim=1, keepdim=True).add_(1e-20)
    if scaling_factor != 1.0:
        weights *= scaling_factor
    return (
        weights if weights_out is None else weights_out.copy_(weights),
        ids.to(torch.int32) if ids_out is None else ids_out.copy_(ids),
    )


def _within_groups(choice: torch.Tensor, num_groups: int, top_groups: int, group_score: str) -> torch.Tensor:
    """Lower all but the best groups to -inf, which is never chosen because the others are finite."""
    groups = choice.reshape(choice.shape[0], num_groups, choice.shape[1] // num_groups)
    if group_score == "top2_sum" and groups.shape[2] > 1:
        worth = groups.topk(2, dim=2).values.sum(dim=2)
    else:
        worth = groups.amax(dim=2)
    best = worth.sort(dim=1, descending=True, stable=True).indices[:, :top_groups]
    barred = torch.ones_like(worth, dtype=torch.bool).scatter_(1, best, False)
    return groups.masked_fill(barred[:, :, None], float("-inf")).view(choice.shape)
