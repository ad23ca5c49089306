"""Random numbers: known answers, and the same bits everywhere."""

from __future__ import annotations

import pytest
import torch

from tokenspeed_kernel.ops.sampling import philox_uniform
from tokenspeed_kernel.ops.sampling.reference import philox4x32

# Known answers of Philox4x32-10, published with Random123 (kat_vectors): counter, key, output.
KNOWN = (
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
)


@pytest.mark.parametrize(("counter", "key", "output"), KNOWN)
def test_known_answers(counter: tuple[int, int, int, int], key: tuple[int, int], output: tuple[int, int, int, int]) -> None:
    assert philox4x32(counter, key) == output


def test_the_same_bits_as_the_known_answer(solution: str, device: torch.device) -> None:
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    expected = ((0x6627E8D5 >> 5) * 2**26 + (0xE169C58D >> 6)) / 2**53
    assert philox_uniform(zero, zero, solution=solution).tolist() == [expected]


def test_every_bit_of_seed_counter_and_stream_counts(solution: str, device: torch.device) -> None:
    seeds = [0, *(1 << bit for bit in range(63)), -(2**63)]
    counters = [1 << bit for bit in range(0, 63, 9)]
    all_seeds = torch.tensor(seeds + [0] * len(counters), device=device)
    all_counters = torch.tensor([0] * len(seeds) + counters, device=device)
    drawn = set(philox_uniform(all_seeds, all_counters, solution=solution).tolist())
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    for stream in (1, 2**31, 2**32 - 1):
        drawn |= set(philox_uniform(zero, zero, stream=stream, solution=solution).tolist())
    assert len(drawn) == len(seeds) + len(counters) + 3


def test_a_row_does_not_depend_on_its_batch(solution: str, device: torch.device) -> None:
    seeds = torch.arange(200, device=device) * 7919
    counters = torch.arange(200, device=device) % 11
    whole = philox_uniform(seeds, counters, solution=solution)
    order = torch.randperm(200, generator=torch.Generator().manual_seed(3)).to(device)
    assert torch.equal(whole[order], philox_uniform(seeds[order], counters[order], solution=solution))
    assert torch.equal(whole[77:78], philox_uniform(seeds[77:78], counters[77:78], solution=solution))


def test_uniform_and_uncorrelated() -> None:
    """Neighbouring seeds and counters, the worst case in use: 256 cells, chi-square within five deviations."""
    seeds = torch.arange(300).repeat_interleave(400)
    counters = torch.arange(400).repeat(300)
    values = philox_uniform(seeds, counters)
    assert values.min() >= 0
    assert values.max() < 1
    for sample in (values, (values * 4096).frac()):
        counts = torch.histc(sample, bins=256, min=0, max=1)
        expected = len(values) / 256
        chi_square = ((counts - expected) ** 2 / expected).sum().item()
        assert abs(chi_square - 255) < 5 * (2 * 255) ** 0.5
    table = values.view(300, 400)
    for first, second in ((table[:-1], table[1:]), (table[:, :-1], table[:, 1:])):
        pair = torch.stack((first.flatten(), second.flatten()))
        assert abs(torch.corrcoef(pair)[0, 1].item()) < 5 / first.numel() ** 0.5
