"""Which requests of a call count, and where their rows and slots are."""

from __future__ import annotations

import torch

__all__ = ["l2_normalized", "ragged_requests", "sums_between", "valid_rows"]


def ragged_requests(
    num_slots: int, state_indices: torch.Tensor, cu_seqlens: torch.Tensor, has_initial_state: torch.Tensor | None, out: torch.Tensor
) -> list[tuple[int, int, int, bool]]:
    """(first row, last row, slot, whether the slot's state counts) of each request with tokens; rows without a slot become 0."""
    bounds, slots = cu_seqlens.tolist(), state_indices.tolist()
    known = [True] * len(slots) if has_initial_state is None else has_initial_state.tolist()
    found = []
    for first, last, slot, has in zip(bounds[:-1], bounds[1:], slots, known, strict=True):
        if not 0 <= slot < num_slots:
            out[first:last] = 0
        elif last > first:
            found.append((first, last, slot, bool(has)))
    return found


def valid_rows(num_slots: int, state_indices: torch.Tensor) -> torch.Tensor | None:
    """Requests whose slot is in the pool, [n] int64; None where all are."""
    if state_indices.numel() == 0:
        return None
    lowest, highest = state_indices.aminmax()
    if int(lowest) >= 0 and int(highest) < num_slots:
        return None
    return ((state_indices >= 0) & (state_indices < num_slots)).nonzero().squeeze(1)


def sums_between(logs: torch.Tensor) -> torch.Tensor:
    """[..., n] to [..., n, n]: entry (i, j) is the sum of logs j + 1 to i, -inf above the diagonal.

    Summed, not taken as a difference of running sums: after one very strong decay such differences have lost what follows.
    """
    size = logs.shape[-1]
    later = torch.ones(size, size, dtype=torch.bool, device=logs.device).tril(-1)
    sums = torch.where(later, logs[..., :, None], 0.0).cumsum(-2)
    return sums.masked_fill_(~torch.ones_like(later).tril(), float("-inf"))


def l2_normalized(x: torch.Tensor) -> torch.Tensor:
    """Divide by the Euclidean length of the last dimension."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)
