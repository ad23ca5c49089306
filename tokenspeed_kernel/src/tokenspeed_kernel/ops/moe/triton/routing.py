"""Top-k routing in Triton: one program a token, all of its logits in registers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

__all__ = ["topk_routing"]

_LARGEST = tl.constexpr(3.4028234663852886e38)
_NO_EXPERT = tl.constexpr(1 << 30)


@triton.jit
def _routing_kernel(
    logits_ptr, bias_ptr, weights_ptr, ids_ptr, group_size, scaling_factor,
    logits_row, logits_col, bias_step, weights_row, weights_col, ids_row, ids_col,
    TOP_K: tl.constexpr, SCORING: tl.constexpr, RENORMALIZE: tl.constexpr, BIASED: tl.constexpr,
    NUM_GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, TOP2: tl.constexpr,
    GROUPS: tl.constexpr, MEMBERS: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    # Experts lie in a tile [group, member], so that a number of groups or members that is no power of two needs no division.
    token = tl.program_id(0).to(tl.int64)
    groups, members = tl.arange(0, GROUPS), tl.arange(0, MEMBERS)
    experts = groups[:, None] * group_size + members[None, :]
    valid = (groups[:, None] < NUM_GROUPS) & (members[None, :] < group_size)
    logits = tl.load(logits_ptr + token * logits_row + experts.to(tl.int64) * logits_col, mask=valid, other=0.0).to(tl.float32)
    logits = tl.where(logits != logits, -_LARGEST, logits)
    logits = tl.minimum(tl.maximum(logits, -_LARGEST), _LARGEST)
    if SCORING == "sigmoid":
        scores = 1.0 / (1.0 + tl.exp(-logits))
    elif SCORING == "softmax":
        largest = tl.max(tl.max(tl.where(valid, logits, -_LARGEST), 1), 0)
        scores = tl.where(valid, tl.exp(logits - largest), 0.0)
        scores = scores / tl.sum(tl.sum(scores, 1), 0)
    else:
        scores = logits
    choice = scores
    if BIASED:
        choice += tl.load(bias_ptr + experts * bias_step, mask=valid, other=0.0).to(tl.float32)
        choice = tl.where(choice != choice, -_LARGEST, choice)
        choice = tl.minimum(tl.maximum(choice, -_LARGEST), _LARGEST)
    # Everything that may be chosen is finite: -inf marks what is taken, barred or not there.
    choice = tl.where(valid, choice, float("-inf"))
    if NUM_GROUPS > 1:
        worth = tl.max(choice, 1)
        if TOP2:
            first = tl.min(tl.where(choice == worth[:, None], members[None, :], MEMBERS), 1)
            second = tl.max(tl.where(members[None, :] == first[:, None], float("-inf"), choice), 1)
            worth += tl.where(second == float("-inf"), 0.0, second)
            worth = tl.maximum(worth, -_LARGEST)
        worth = tl.where(groups < NUM_GROUPS, worth, float("-inf"))
        allowed = groups < 0
        for _ in tl.static_range(TOP_GROUPS):
            best = tl.max(worth, 0)
            group = tl.min(tl.where(worth == best, groups, _NO_EXPERT), 0)
            allowed = allowed | (groups == group)
            worth = tl.where(groups == group, float("-inf"), worth)
        choice = tl.where(allowed[:, None], choice, float("-inf"))
    slots = tl.arange(0, SLOTS)
    weights = tl.zeros([SLOTS], dtype=tl.float32)
    ids = tl.zeros([SLOTS], dtype=tl.int32)
    for slot in tl.static_range(TOP_K):
        best = tl.max(tl.max(choice, 1), 0)
        # Of equal ones the lowest index; places outside a group share an index with its neighbour, and hold -inf.
        expert = tl.min(tl.min(tl.where((choice == best) & valid, experts, _NO_EXPERT), 1), 0)
        hit = (experts == expert) & valid
        score = tl.sum(tl.sum(tl.where(hit, scores, 0.0), 1), 0)
        weights = tl.where(slots == slot, score, weights)
        ids = tl.where(slots == slot, expert, ids)
        choice = tl.where(hit, float("-inf"), choice)
    used = slots < TOP_K
    if SCORING == "topk_softmax":
        largest = tl.max(tl.where(used, weights, -_LARGEST), 0)
        weights = tl.where(used, tl.exp(weights - largest), 0.0)
        weights = weights / tl.sum(weights, 0)
    if RENORMALIZE:
        weights = weights / (tl.sum(weights, 0) + 1e-20)
    weights = weights * scaling_factor
    tl.store(weights_ptr + token * weights_row + slots * weights_col, weights, mask=used)
    tl.store(ids_ptr + token * ids_row + slots * ids_col, ids, mask=used)


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
    if weights_out is None:
        weights_out = torch.empty((num_tokens, top_k), dtype=torch.float32, device=logits.device)
    if ids_out is None:
        ids_out = torch.empty((num_tokens, top_k), dtype=torch.int32, device=logits.device)
    if num_tokens == 0:
        return weights_out, ids_out
    group_size = num_experts // num_groups
    bias = logits if correction_bias is None else correction_bias
    groups, members = triton.next_power_of_2(num_groups), triton.next_power_of_2(group_size)
    _routing_kernel[(num_tokens,)](
        logits, bias, weights_out, ids_out, group_size, float(scaling_factor),
        *logits.stride(), 0 if correction_bias is None else correction_bias.stride(0), *weights_out.stride(), *ids_out.stride(),
        TOP_K=top_k, SCORING=scoring, RENORMALIZE=renormalize, BIASED=correction_bias is not None,
        NUM_GROUPS=num_groups, TOP_GROUPS=top_groups, TOP2=group_score == "top2_sum",
        GROUPS=groups, MEMBERS=members, SLOTS=triton.next_power_of_2(top_k),
        # One warp: its reductions need no shared memory, and eight rounds of them are what the kernel spends its time on.
        num_warps=1 if groups * members <= 1024 else 4,
    )  # fmt: skip
    return weights_out, ids_out
