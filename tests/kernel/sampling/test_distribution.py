"""Draws follow the distribution; a row's draw depends on that row alone."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from tokenspeed_kernel.ops import sampling


@dataclass(frozen=True)
class Filters:
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def tensors(self, rows: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return (
            torch.full((rows,), self.temperature, device=device),
            torch.full((rows,), self.top_k, dtype=torch.int32, device=device),
            torch.full((rows,), self.top_p, device=device),
            torch.full((rows,), self.min_p, device=device),
        )


FILTERS = (
    Filters(),
    Filters(temperature=0.6),
    Filters(temperature=1.7),
    Filters(top_k=12),
    Filters(top_p=0.8),
    Filters(min_p=0.1),
    Filters(temperature=1.3, top_k=20, top_p=0.9, min_p=0.02),
)


def chi_square_deviations(counts: Tensor, probabilities: Tensor) -> float:
    """Deviations of Pearson's statistic from its mean; rare tokens are pooled so that each cell expects at least 5."""
    expected = probabilities.double() * counts.sum()
    order = expected.argsort(descending=True)
    expected, counts = expected[order], counts[order].double()
    frequent = int((expected >= 5).sum())
    if frequent < len(expected):
        expected = torch.cat((expected[:frequent], expected[frequent:].sum()[None]))
        counts = torch.cat((counts[:frequent], counts[frequent:].sum()[None]))
        if expected[-1] < 5:  # what is left is too little for a cell of its own
            expected = torch.cat((expected[:-2], expected[-2:].sum()[None]))
            counts = torch.cat((counts[:-2], counts[-2:].sum()[None]))
    freedom = len(expected) - 1
    statistic = ((counts - expected) ** 2 / expected).sum().item()
    return (statistic - freedom) / (2 * freedom) ** 0.5


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_draws_follow_the_reference_distribution(filters: Filters) -> None:
    size, number = 300, 20000
    logits = torch.randn(1, size, generator=torch.Generator().manual_seed(11)) * 2
    expected = sampling.sampling_probs(logits, *filters.tensors(1, logits.device), solution="reference")[0]
    uniform = sampling.philox_uniform(torch.full((number,), 1234), torch.arange(number))
    drawn = sampling.sample(logits.expand(number, size), uniform, *filters.tensors(number, logits.device))
    counts = torch.bincount(drawn.long(), minlength=size)
    assert not counts[expected == 0].any(), "a token that the filters drop was drawn"
    assert chi_square_deviations(counts, expected) < 5


def test_the_statistic_finds_a_wrong_distribution() -> None:
    """The check above can fail: 3 % of the mass moved between two tokens stands out."""
    expected = torch.full((20,), 0.05)
    wrong = expected.clone()
    wrong[0], wrong[1] = 0.065, 0.035
    assert chi_square_deviations((wrong * 20000).round(), expected) > 20
    assert abs(chi_square_deviations(expected * 20000, expected)) < 5


@pytest.mark.parametrize("rows", [5, 300])
@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_a_row_does_not_depend_on_its_batch_or_the_threads(filters: Filters, rows: int) -> None:
    """Bit for bit: alone, in another order, among rows with other filters, with one thread and with two."""
    size = 5003
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(rows, size, generator=generator) * 3
    uniform = torch.rand(rows, dtype=torch.float64, generator=generator)
    mine = filters.tensors(rows, logits.device)
    torch.set_num_threads(2)
    whole = sampling.sample(logits, uniform, *mine)
    torch.set_num_threads(1)
    assert torch.equal(whole, sampling.sample(logits, uniform, *mine))
    order = torch.randperm(rows, generator=generator)
    assert torch.equal(whole[order], sampling.sample(logits[order], uniform[order], *(one[order] for one in mine)))
    for row in (0, rows - 1):
        only = slice(row, row + 1)
        assert torch.equal(whole[only], sampling.sample(logits[only], uniform[only], *(one[only] for one in mine)))
    mixed = [torch.cat((one[:1], other[1:])) for one, other in zip(mine, FILTERS[3].tensors(rows, logits.device), strict=True)]
    assert torch.equal(whole[:1], sampling.sample(logits, uniform, *mixed)[:1])


def test_log_probs_do_not_depend_on_the_batch() -> None:
    logits = torch.randn(70, 9001, generator=torch.Generator().manual_seed(6))
    ids = torch.arange(70, dtype=torch.int32)
    whole = sampling.log_probs(logits, ids, top_n=4)
    for row in (0, 33, 69):
        alone = sampling.log_probs(logits[row : row + 1].clone(), ids[row : row + 1], top_n=4)
        for many, one in zip(whole, alone, strict=True):
            assert torch.equal(many[row : row + 1], one)


@pytest.mark.gpu
@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_the_gpu_draws_what_the_cpu_draws(filters: Filters) -> None:
    """Uniforms agree in every bit; tokens do where no border lies within the rounding of exp: 64 fixed draws, one may differ."""
    size, rows = 128256, 64
    logits = torch.randn(rows, size, generator=torch.Generator().manual_seed(7)) * 3
    seeds = torch.arange(rows) * 104729
    host, chip = torch.device("cpu"), torch.device("cuda")
    uniform = sampling.philox_uniform(seeds, seeds % 17)
    on_chip = sampling.philox_uniform(seeds.to(chip), (seeds % 17).to(chip))
    assert torch.equal(uniform, on_chip.cpu())
    expected = sampling.sample(logits, uniform, *filters.tensors(rows, host))
    drawn = sampling.sample(logits.to(chip), on_chip, *filters.tensors(rows, chip)).cpu()
    assert (expected != drawn).sum() <= 1


def test_threads_and_inference_mode_do_not_disturb_each_other() -> None:
    """Buffers are kept from call to call: each thread has its own, and they serve in and out of inference mode."""
    size, rows = 30011, 12
    logits = torch.randn(rows, size, generator=torch.Generator().manual_seed(8)) * 3
    uniform = sampling.philox_uniform(torch.arange(rows), torch.arange(rows))
    filters = [Filters(top_p=0.95).tensors(rows, logits.device), Filters(temperature=1.5, min_p=0.01).tensors(rows, logits.device)]

    def draw(which: int, inference: bool) -> list[int]:
        with torch.inference_mode(inference):
            return sampling.sample(logits, uniform, *filters[which]).tolist()

    expected = [draw(0, True), draw(1, False)]
    assert [draw(0, False), draw(1, True)] == expected
    with ThreadPoolExecutor(4) as pool:
        jobs = [pool.submit(draw, number % 2, number % 3 == 0) for number in range(24)]
        assert [job.result() for job in jobs] == expected * 12
