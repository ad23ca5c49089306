"""Verified chains are distributed as the model's own tokens, and end where they must."""

from __future__ import annotations

import itertools
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor

from tokenspeed_kernel import ShapeError
from tokenspeed_kernel.ops import sampling

Filters = tuple[Tensor, Tensor, Tensor, Tensor]


def filters(
    rows: int, device: torch.device, *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> Filters:
    """The same filters for each row."""
    return (
        torch.full((rows,), temperature, device=device),
        torch.full((rows,), top_k, dtype=torch.int32, device=device),
        torch.full((rows,), top_p, device=device),
        torch.full((rows,), min_p, device=device),
    )


def deviations(counts: Tensor, probabilities: Tensor) -> float:
    """Standard deviations of Pearson's statistic from its mean; cells that expect fewer than 5 are left out."""
    expected = probabilities.double() * counts.sum()
    cells = expected >= 5
    freedom = int(cells.sum()) - 1
    statistic = float(((counts.double() - expected)[cells] ** 2 / expected[cells]).sum())
    return (statistic - freedom) / (2 * freedom) ** 0.5


def _exact_case(device: torch.device) -> tuple[dict[str, Any], list[Fraction], list[list[Fraction]], list[Fraction]]:
    """Every draft and a grid of uniforms on which each threshold of the algorithm is a grid line; with the weight of each row."""
    twelfth = Fraction(1, 12)
    target = [Fraction(1, 8), Fraction(3, 8), Fraction(1, 2)]
    proposed = [Fraction(1, 2), Fraction(1, 4), Fraction(1, 4)]  # leaves (0, 1/8, 1/4): borders at 1/3
    half, quarter, third = Fraction(1, 2), Fraction(1, 4), Fraction(1, 3)
    after = [[quarter, quarter, half], [third, 2 * third, 0 * third], [half, 0 * half, half]]
    cells = [float(twelfth * cell + twelfth / 2) for cell in range(12)]
    rows = list(itertools.product(range(3), cells, cells, cells))
    drafts = torch.tensor([row[0] for row in rows], dtype=torch.int32)
    first = torch.tensor([float(one) for one in target]).log().expand(len(rows), 3)
    second = torch.tensor([[float(one) for one in line] for line in after]).log()[drafts.long()]
    inputs = {
        "logits": torch.stack((first, second), 1).to(device),
        "draft_ids": drafts[:, None].to(device),
        "uniform": torch.tensor([[row[2], row[3]] for row in rows], dtype=torch.float64, device=device),
        "draft_probs": torch.tensor([float(one) for one in proposed]).expand(len(rows), 1, 3).to(device),
        "accept_uniform": torch.tensor([[row[1]] for row in rows], dtype=torch.float64, device=device),
    }
    return inputs, target, after, [proposed[row[0]] * twelfth**3 for row in rows]


def _check_exact(solution: str, device: torch.device) -> None:
    inputs, target, after, weights = _exact_case(device)
    named = dict(zip(("temperature", "top_k", "top_p", "min_p"), filters(len(weights), device), strict=True))
    tokens, number = sampling.verify_chain(**inputs, **named, solution=solution)
    first: dict[int, Fraction] = dict.fromkeys(range(3), Fraction(0))
    pair: dict[tuple[int, int], Fraction] = {}
    for (one, two), count, weight in zip(tokens.tolist(), number.tolist(), weights, strict=True):
        first[one] += weight
        assert (two >= 0) == (count == 2)
        if count == 2:
            pair[one, two] = pair.get((one, two), Fraction(0)) + weight
    # The first token has the target's law, and where the chain went on, so has the second, given the first.
    assert [first[token] for token in range(3)] == target
    for one in range(3):
        reached = sum(weight for (head, _), weight in pair.items() if head == one)
        assert reached == min(target[one], [Fraction(1, 2), Fraction(1, 4), Fraction(1, 4)][one]), "acceptance is min(p, q)"
        assert [pair.get((one, two), Fraction(0)) / reached for two in range(3)] == after[one]


@pytest.mark.parametrize("solution", ["reference", "cpu"])
def test_exactly_lossless_on_an_enumerated_vocabulary(solution: str) -> None:
    _check_exact(solution, torch.device("cpu"))


@pytest.mark.gpu
def test_exactly_lossless_on_the_gpu() -> None:
    _check_exact("triton", torch.device("cuda"))


@pytest.mark.parametrize("options", [{}, {"temperature": 0.7, "top_k": 20}, {"top_p": 0.85, "min_p": 0.01}], ids=str)
def test_statistically_lossless_with_filters(options: dict[str, Any]) -> None:
    """30,000 chains with fixed seeds: the first token has the target's law, and so has the second where the first draft stood."""
    size, rows, device = 40, 30000, torch.device("cpu")
    generator = torch.Generator().manual_seed(21)
    heads = torch.randn(2, size, generator=generator) * 1.5
    proposed = torch.softmax(heads + torch.randn(2, size, generator=generator), -1)
    seeds = torch.arange(rows) * 7919 + 5
    at = [sampling.philox_uniform(seeds, torch.full((rows,), place)) for place in range(3)]
    accept = [sampling.philox_uniform(seeds, torch.full((rows,), place), stream=sampling.ACCEPT_STREAM) for place in range(2)]
    drawn = [sampling.philox_uniform(seeds, torch.full((rows,), place), stream=99) for place in range(2)]
    drafts = torch.stack([torch.searchsorted(proposed[k].double().cumsum(0), drawn[k]).clamp(max=size - 1) for k in range(2)], 1)
    logits = heads[[0, 1, 1]].expand(rows, 3, size)
    tokens, number = sampling.verify_chain(
        logits,
        drafts.int(),
        torch.stack(at, 1),
        *filters(rows, device, **options),
        draft_probs=proposed.expand(rows, 2, size),
        accept_uniform=torch.stack(accept, 1),
    )
    target = sampling.sampling_probs(heads, *filters(2, device, **options), solution="reference").double()
    first = torch.bincount(tokens[:, 0].long(), minlength=size)
    assert not first[target[0] == 0].any(), "a token that the filters drop was given"
    assert deviations(first, target[0]) < 5
    second = torch.bincount(tokens[number >= 2, 1].long(), minlength=size)
    assert deviations(second, target[1]) < 5
    accepted = float((number >= 2).double().mean())
    expected = float(torch.minimum(target[0], proposed[0].double()).sum())
    assert abs(accepted - expected) < 5 * (0.25 / rows) ** 0.5
    # The statistic is sharp enough to see drafts that are taken without being tested.
    assert deviations(torch.bincount(drafts[:, 0], minlength=size), target[0]) > 20


def _model(context: list[int], size: int) -> Tensor:
    """Logits that depend on the last two tokens."""
    seed = context[-1] * 131 + context[-2] * 17 + 3
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)) * 2


def _uniforms(seed: int, start: int, number: int) -> Tensor:
    return sampling.philox_uniform(torch.full((number,), seed), torch.arange(start, start + number))


@pytest.mark.parametrize("options", [{}, {"temperature": 0.0}, {"temperature": 1.3, "top_p": 0.9}, {"top_k": 5}], ids=str)
def test_without_draft_probs_the_text_is_the_one_without_drafts(options: dict[str, Any]) -> None:
    """Whatever is proposed, good or bad: token for token, because the same draws are made."""
    size, length, seed, device = 30, 40, 77, torch.device("cpu")
    plain = [1, 2]
    for index in range(length):
        logits = _model(plain, size)[None]
        plain.append(int(sampling.sample(logits, _uniforms(seed, index, 1), *filters(1, device, **options))))
    generator = torch.Generator().manual_seed(3)
    text, steps = [1, 2], 0
    while len(text) < length + 2:
        at = len(text)
        good = int(torch.randint(0, 4, (1,), generator=generator))  # so many right drafts, then wrong ones
        drafts = [token if place < good else (token + 1) % size for place, token in enumerate(plain[at : at + 3])]
        drafts += [-1] * (3 - len(drafts))
        logits = torch.stack([_model(text + [max(one, 0) for one in drafts[:place]], size) for place in range(4)])
        tokens, number = sampling.verify_chain(
            logits[None],
            torch.tensor([drafts], dtype=torch.int32),
            _uniforms(seed, at - 2, 4)[None],
            *filters(1, device, **options),
        )
        assert int(number) == min(good, sum(one >= 0 for one in drafts)) + 1
        text += tokens[0, : int(number)].tolist()
        steps += 1
    assert text[: length + 2] == plain
    assert steps < length


def _call(solution: str, device: torch.device, drafts: list[list[int]], **changes: Any) -> tuple[list[list[int]], list[int]]:
    """Greedy target 5, 6, 7 whatever the drafts; each proposed with certainty unless changed."""
    rows, places = len(drafts), len(drafts[0])
    logits = torch.zeros(rows, places + 1, 10)
    for place in range(places + 1):
        logits[:, place, 5 + place] = 4.0
    ids = torch.tensor(drafts, dtype=torch.int32)
    probs = torch.nn.functional.one_hot(ids.long().clamp(0, 9), 10).float()
    inputs: dict[str, Any] = {
        "logits": logits,
        "draft_ids": ids,
        "uniform": torch.full((rows, places + 1), 0.5, dtype=torch.float64),
        **dict(zip(("temperature", "top_k", "top_p", "min_p"), filters(rows, torch.device("cpu"), temperature=0.0), strict=True)),
        "draft_probs": probs,
        "accept_uniform": torch.full((rows, places), 0.5, dtype=torch.float64),
        **changes,
    }
    moved = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in inputs.items()}
    tokens, number = sampling.verify_chain(**moved, solution=solution)
    return tokens.tolist(), number.tolist()


WITHOUT_PROBS = {"draft_probs": None, "accept_uniform": None}


@pytest.mark.parametrize("changes", [{}, WITHOUT_PROBS], ids=["rejection", "greedy"])
def test_greedy_chains(solution: str, device: torch.device, changes: dict[str, Any]) -> None:
    """All right; wrong at each place; none; a pad or an id outside before a right one."""
    drafts = [[5, 6], [9, 6], [5, 9], [-1, -1], [5, -1], [-1, 6], [10, 6]]
    tokens, number = _call(solution, device, drafts, **changes)
    assert tokens == [[5, 6, 7], [5, -1, -1], [5, 6, -1], [5, -1, -1], [5, 6, -1], [5, -1, -1], [5, -1, -1]]
    assert number == [3, 1, 2, 1, 2, 1, 1]


@pytest.mark.parametrize("temperature", [1e-12, 1e-8, 1e-4])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_temperatures_near_zero_are_greedy(solution: str, device: torch.device, temperature: float, dtype: torch.dtype) -> None:
    logits = torch.zeros(1, 3, 10, dtype=dtype)
    logits[0, [0, 1, 2], [5, 6, 7]] = 1000
    logits[:, :, ::4] = float("-inf")
    heat = torch.tensor([temperature])
    for changes in ({}, WITHOUT_PROBS):
        assert _call(solution, device, [[5, 6]], logits=logits, temperature=heat, **changes) == ([[5, 6, 7]], [3])


@pytest.mark.parametrize("changes", [{}, WITHOUT_PROBS], ids=["rejection", "drawn"])
def test_a_position_that_cannot_be_sampled_ends_the_row_before_it(
    solution: str, device: torch.device, changes: dict[str, Any]
) -> None:
    logits = torch.zeros(3, 3, 10)
    for place in range(3):
        logits[:, place, 5 + place] = 200.0
    logits[0, 0, 1] = float("nan")
    logits[1, 1] = float("-inf")
    logits[2, 2, 0] = float("inf")
    for heat in (0.0, 1.0):
        tokens, number = _call(solution, device, [[5, 6]] * 3, logits=logits, temperature=torch.full((3,), heat), **changes)
        assert tokens == [[-1, -1, -1], [5, -1, -1], [5, 6, -1]]
        assert number == [0, 1, 2]


def test_draft_probabilities_at_the_edges(solution: str, device: torch.device) -> None:
    """Equal to the target: always accepted; NaN: refused without a NaN in what is left; certain but impossible: replaced."""
    target = torch.tensor([0.25, 0.5, 0.25, 0.0])
    logits = target.log().expand(4, 2, 4).clone()
    nan = torch.full((4,), float("nan"))
    zero = torch.tensor([1.0, 0.0, 0.0, 0.0])
    probs = torch.stack((target, nan, torch.tensor([0.0, 0.0, 0.0, 1.0]), zero))[:, None]
    tokens, number = _call(
        solution,
        device,
        [[2], [1], [3], [0]],
        logits=logits,
        draft_probs=probs,
        temperature=torch.ones(4),
        uniform=torch.tensor([[0.5, 0.1], [0.9, 0.5], [0.5, 0.5], [0.1, 0.5]], dtype=torch.float64),
        accept_uniform=torch.tensor([[0.999999], [0.0], [0.0], [0.9]], dtype=torch.float64),
    )
    # Row 1 draws from the target itself at 0.9; row 2 at 0.5; row 3 from (0, 0.5, 0.25, 0) at 0.1.
    assert tokens == [[2, 0], [2, -1], [1, -1], [1, -1]]
    assert number == [2, 1, 1, 1]


def test_a_row_does_not_depend_on_its_batch() -> None:
    rows, places, size, device = 70, 3, 500, torch.device("cpu")
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(rows, places + 1, size, generator=generator) * 2
    inputs = {
        "draft_ids": torch.randint(0, 8, (rows, places), generator=generator, dtype=torch.int32),
        "uniform": torch.rand(rows, places + 1, dtype=torch.float64, generator=generator),
        "draft_probs": torch.softmax(torch.randn(rows, places, size, generator=generator), -1),
        "accept_uniform": torch.rand(rows, places, dtype=torch.float64, generator=generator) * 0.2,
    }
    named = dict(zip(("temperature", "top_k", "top_p", "min_p"), filters(rows, device, temperature=1.2, top_p=0.97), strict=True))
    whole = sampling.verify_chain(logits, **inputs, **named)
    assert len(set(whole[1].tolist())) == places + 1, "chains of every length"
    for row in (0, 33, 69):
        only = slice(row, row + 1)
        alone = sampling.verify_chain(logits[only], **{name: value[only] for name, value in (inputs | named).items()})
        assert all(torch.equal(mine, many[only]) for mine, many in zip(alone, whole, strict=True))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logits": torch.zeros(1, 10)}, r"logits \[R, K \+ 1, V\]"),
        ({"logits": torch.zeros(1, 3, 0)}, r"V >= 1"),
        ({"draft_ids": torch.zeros(1, 3, dtype=torch.int32)}, r"draft_ids \[1, 2\] int32.*got \[1, 3\]"),
        ({"draft_ids": torch.zeros(1, 2, dtype=torch.int64)}, r"draft_ids \[1, 2\] int32.*int64"),
        ({"uniform": torch.zeros(1, 2, dtype=torch.float64)}, r"uniform \[1, 3\] float64"),
        ({"temperature": torch.zeros(2)}, r"temperature \[1\] float32"),
        ({"accept_uniform": None}, "draft_probs alone"),
        ({"draft_probs": None}, "accept_uniform alone"),
        ({"draft_probs": torch.zeros(1, 2, 9)}, r"draft_probs \[1, 2, 10\] float32"),
        ({"out": torch.zeros(1, 2, dtype=torch.int32)}, r"out \[1, 3\] int32"),
        ({"out": torch.zeros(1, 6, dtype=torch.int32)[:, ::2]}, "out contiguous"),
        ({"num_tokens_out": torch.zeros(2, dtype=torch.int32)}, r"num_tokens_out \[1\]"),
    ],
)
def test_a_call_that_does_not_fit_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        _call("cpu", torch.device("cpu"), [[5, 6]], **changes)
