"""Penalties and biases from lists of tokens."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tokenspeed_kernel.ops import sampling


def ints(*values: int, device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def floats(*values: float, device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=device)


def test_the_formula(solution: str, device: torch.device) -> None:
    """Repetition before frequency and presence; a prompt token (count 0) has no presence penalty."""
    logits = torch.tensor([[4.0, -4.0, 4.0, 0.0, 7.0]], device=device)
    result = sampling.apply_penalties(
        logits,
        ints(0, 4, device=device),
        ints(0, 1, 2, 3, device=device),
        ints(0, 2, 3, 1, device=device),
        floats(0.25, device=device),
        floats(0.5, device=device),
        floats(2.0, device=device),
        solution=solution,
    )
    expected = [4 / 2, -4 * 2 - 2 * 0.5 - 0.25, 4 / 2 - 3 * 0.5 - 0.25, -0.5 - 0.25, 7.0]
    assert result[0].tolist() == expected
    assert logits[0].tolist() == [4.0, -4.0, 4.0, 0.0, 7.0], "the input was changed"


@pytest.mark.parametrize("pending", [(2, 4, -1), (0, 3, 9)])
def test_a_pending_token_counts_as_one_that_is_listed(solution: str, device: torch.device, pending: tuple[int, ...]) -> None:
    """With a pending token the result is that of lists that already hold it."""
    logits = torch.randn(3, 6, generator=torch.Generator().manual_seed(2)).to(device)
    lists = [{2: 1, 0: 0}, {5: 2}, {}]
    penalties = (floats(0.3, 0.1, 0.7, device=device), floats(0.2, 0.4, 0.1, device=device), floats(1.5, 1.1, 2, device=device))

    def apply(lists: list[dict[int, int]], waiting: Tensor | None) -> Tensor:
        offsets = [sum(len(one) for one in lists[:row]) for row in range(len(lists) + 1)]
        ids = [token for one in lists for token in one]
        counts = [count for one in lists for count in one.values()]
        packed = (ints(*offsets, device=device), ints(*ids, device=device), ints(*counts, device=device))
        return sampling.apply_penalties(logits, *packed, *penalties, pending=waiting, solution=solution)

    merged = [dict(one) for one in lists]
    for one, token in zip(merged, pending, strict=True):
        if 0 <= token < 6:
            one[token] = one.get(token, 0) + 1
    assert torch.equal(apply(lists, ints(*pending, device=device)), apply(merged, None))


def test_in_place_touches_the_listed_logits_alone(solution: str, device: torch.device) -> None:
    """The rest may even be NaN: a row of 150,000 logits costs what its list costs."""
    logits = torch.full((2, 50), float("nan"), device=device)
    logits[0, 3], logits[1, 4] = 1.0, 2.0
    offsets, ids = ints(0, 1, 2, device=device), ints(3, 4, device=device)
    result = sampling.apply_logit_bias(logits, offsets, ids, floats(5, -5, device=device), out=logits, solution=solution)
    assert result is logits
    assert (logits[0, 3].item(), logits[1, 4].item()) == (6.0, -3.0)
    assert int(logits.isnan().sum()) == 98


def test_a_bias_of_minus_infinity_forbids(solution: str, device: torch.device) -> None:
    logits = torch.zeros(1, 3, device=device)
    bias = floats(float("-inf"), 1.0, device=device)
    result = sampling.apply_logit_bias(logits, ints(0, 2, device=device), ints(1, 2, device=device), bias, solution=solution)
    assert result[0].tolist() == [0.0, float("-inf"), 1.0]


def test_a_transposed_view_is_written_in_place(solution: str, device: torch.device) -> None:
    logits = torch.zeros(3, 2, device=device).t()
    offsets, ids = ints(0, 1, 2, device=device), ints(0, 2, device=device)
    sampling.apply_logit_bias(logits, offsets, ids, floats(1, 2, device=device), out=logits, solution=solution)
    assert logits.tolist() == [[1, 0, 0], [0, 0, 2]]
