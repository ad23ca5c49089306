"""What the filters keep, at the edges; for every solution."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tokenspeed_kernel.ops import sampling


def probs(
    logits: Tensor,
    solution: str,
    device: torch.device,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> Tensor:
    """The distribution of each row, all with the same filters."""
    rows = len(logits)
    result = sampling.sampling_probs(
        logits.to(device),
        torch.full((rows,), temperature, device=device),
        torch.full((rows,), top_k, dtype=torch.int32, device=device),
        torch.full((rows,), top_p, device=device),
        torch.full((rows,), min_p, device=device),
        solution=solution,
    )
    return result.cpu()


def kept(row: Tensor) -> list[int]:
    return row.nonzero()[:, 0].tolist()


LOGITS = torch.tensor([[0.5, 2.0, -1.0, 2.0, 1.0, float("-inf"), 0.5, -3.0]])


def test_top_k_takes_the_lower_id_of_a_tie_at_the_cut(solution: str, device: torch.device) -> None:
    assert kept(probs(LOGITS, solution, device, top_k=4)[0]) == [0, 1, 3, 4]
    assert kept(probs(LOGITS, solution, device, top_k=2)[0]) == [1, 3]


def test_top_k_one_is_argmax(solution: str, device: torch.device) -> None:
    assert kept(probs(LOGITS, solution, device, top_k=1)[0]) == [1]


@pytest.mark.parametrize("top_k", [8, 9, 0, -1, 2**31 - 1])
def test_top_k_of_the_vocabulary_or_more_is_off(solution: str, device: torch.device, top_k: int) -> None:
    assert kept(probs(LOGITS, solution, device, top_k=top_k)[0]) == [0, 1, 2, 3, 4, 6, 7]


@pytest.mark.parametrize("top_p", [1e-30, 1e-6, 0.0, -1.0])
def test_a_tiny_top_p_leaves_the_first_token(solution: str, device: torch.device, top_p: float) -> None:
    assert kept(probs(LOGITS, solution, device, top_p=top_p)[0]) == [1]


def test_top_p_keeps_the_shortest_prefix_that_reaches_it(solution: str, device: torch.device) -> None:
    quarters = torch.zeros(1, 4)
    assert kept(probs(quarters, solution, device, top_p=0.5)[0]) == [0, 1]
    assert kept(probs(quarters, solution, device, top_p=0.500001)[0]) == [0, 1, 2]
    assert kept(probs(quarters, solution, device, top_p=1.0)[0]) == [0, 1, 2, 3]


def test_top_p_counts_what_top_k_left(solution: str, device: torch.device) -> None:
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    # Of the whole 0.6 needs two tokens; of the first two's 0.7 it needs two as well, 0.5 only one.
    assert kept(probs(logits, solution, device, top_k=2, top_p=0.5)[0]) == [0]
    assert kept(probs(logits, solution, device, top_p=0.5)[0]) == [0, 1]


def test_min_p_one_keeps_the_maxima_only(solution: str, device: torch.device) -> None:
    assert kept(probs(LOGITS, solution, device, min_p=1.0)[0]) == [1, 3]
    close = torch.tensor([[1.0, 1.0 - 6e-8, 0.0]])
    assert kept(probs(close, solution, device, min_p=1.0)[0]) == [0]


def test_min_p_is_relative_to_the_most_likely(solution: str, device: torch.device) -> None:
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    assert kept(probs(logits, solution, device, min_p=0.29)[0]) == [0, 1, 2]
    assert kept(probs(logits, solution, device, min_p=0.31)[0]) == [0, 1]


def test_filters_see_the_temperature(solution: str, device: torch.device) -> None:
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    expected = torch.tensor([0.4, 0.3, 0.2, 0.1]).sqrt()
    torch.testing.assert_close(probs(logits, solution, device, temperature=2.0)[0], expected / expected.sum())
    # Squared and renormalised: 0.533, 0.3, 0.133, 0.033.
    assert kept(probs(logits, solution, device, temperature=0.5, top_p=0.5)[0]) == [0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("temperature", [0.0, 1e-12, 1e-8, 1e-5, 1e-4, -1.0, float("nan")])
def test_a_tiny_temperature_is_argmax_without_nan(
    solution: str, device: torch.device, temperature: float, dtype: torch.dtype
) -> None:
    """Greedy rows beside sampled ones, logits masked with -inf, fp16 (public case Z8)."""
    logits = (torch.randn(4, 40, generator=torch.Generator().manual_seed(1)) * 5).to(dtype)
    logits[:, ::3] = float("-inf")
    temperatures = torch.tensor([temperature, 1.0, temperature, 0.7], device=device)
    rows = logits.to(device)
    others = (
        torch.zeros(4, dtype=torch.int32, device=device),
        torch.ones(4, device=device),
        torch.zeros(4, device=device),
    )
    uniform = torch.full((4,), 0.999, dtype=torch.float64, device=device)
    tokens = sampling.sample(rows, uniform, temperatures, *others, solution=solution).tolist()
    best = logits.float().argmax(-1).tolist()
    assert (tokens[0], tokens[2]) == (best[0], best[2])
    assert all(token % 3 for token in tokens), "a forbidden token was drawn"
    distribution = sampling.sampling_probs(rows, temperatures, *others, solution=solution)
    assert not distribution.isnan().any()
    torch.testing.assert_close(distribution.sum(-1).cpu(), torch.ones(4))


def test_a_low_temperature_that_is_not_greedy_has_no_nan(solution: str, device: torch.device) -> None:
    logits = torch.tensor([[3e38, -3e38, 3e38, float("-inf")], [1e-30, 0.0, -1e-30, 1e-38]])
    result = probs(logits, solution, device, temperature=2e-4)
    torch.testing.assert_close(result, torch.tensor([[0.5, 0, 0.5, 0], [0.25, 0.25, 0.25, 0.25]]))


def test_what_cannot_be_sampled_is_reported(solution: str, device: torch.device) -> None:
    nan, inf = float("nan"), float("inf")
    logits = torch.tensor([[0, nan, 1], [-inf, -inf, -inf], [inf, 0, 0], [-inf, -inf, 2], [nan, nan, nan]], device=device)
    for temperature in (0.0, 1.0):
        filters = (
            torch.full((5,), temperature, device=device),
            torch.tensor([0, 2, 0, 2, 0], dtype=torch.int32, device=device),
            torch.full((5,), 0.9, device=device),
            torch.zeros(5, device=device),
        )
        uniform = torch.full((5,), 0.5, dtype=torch.float64, device=device)
        drawn = sampling.sample(logits, uniform, *filters, solution=solution)
        assert drawn.tolist() == [-1, -1, -1, 2, -1]
        distribution = sampling.sampling_probs(logits, *filters, solution=solution).cpu()
        assert distribution.isnan().all(-1).tolist() == [True, True, True, False, True]
    assert sampling.argmax(logits, solution=solution).tolist() == [-1, -1, -1, 2, -1]


def test_argmax_takes_the_lowest_id_of_equal_logits(solution: str, device: torch.device) -> None:
    size = 4500
    logits = torch.zeros(4, size)
    for row, ids in enumerate(([7, 4400], [4096, 4097], [0, size - 1], [130, 3000])):
        logits[row, ids] = 1
    logits = torch.cat((logits, torch.full((1, size), -0.0)))
    logits[4, 5:] = 0.0  # equal to -0.0
    assert sampling.argmax(logits.to(device), solution=solution).tolist() == [7, 4096, 0, 130, 0]


def test_draws_walk_the_ids_in_order(solution: str, device: torch.device) -> None:
    shares = torch.tensor([0.1, 0.2, 0.3, 0.4])
    uniform = torch.tensor([0.0, 0.0999, 0.1001, 0.2999, 0.3001, 0.5999, 0.6001, 1 - 2**-53], dtype=torch.float64)
    rows = len(uniform)
    drawn = sampling.sample(
        shares.log().expand(rows, 4).to(device),
        uniform.to(device),
        torch.ones(rows, device=device),
        torch.zeros(rows, dtype=torch.int32, device=device),
        torch.ones(rows, device=device),
        torch.zeros(rows, device=device),
        solution=solution,
    )
    assert drawn.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
