"""Cases of the choice of the best scores."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch

from tokenspeed_kernel.case import Case
from tokenspeed_kernel.ops.dsa.contract import TOPK_SLOTS
from tokenspeed_kernel.ops.random_shapes import random_size

__all__ = ["TOPK_CASES", "random_choice"]


def _random(scores: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return scores


def _few_values(scores: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Many ties, among them those of 0.0 and -0.0."""
    return (scores * 2).round().clamp(-2, 2) * torch.where(torch.rand(scores.shape, generator=generator) < 0.5, 1.0, -1.0)


def _equal(scores: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return torch.full_like(scores, 3.5)


def _near(scores: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Values that differ in their last bits alone."""
    return (1.0 + (scores * 8).round() * 2.0**-23).to(torch.float32)


def _masked(scores: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """A causal prefix in each row, from none to all."""
    lengths = torch.linspace(0, scores.shape[1], scores.shape[0]).round()
    return torch.where(torch.arange(scores.shape[1]) < lengths[:, None], scores, -math.inf)


def _special(scores: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """NaN of both signs, infinities, the smallest and the largest numbers."""
    kinds = torch.tensor([math.nan, -math.nan, math.inf, -math.inf, 1e-45, -1e-45, 3.4e38, -3.4e38])
    picked = kinds[torch.randint(len(kinds), scores.shape, generator=generator)]
    return torch.where(torch.rand(scores.shape, generator=generator) < 0.5, picked, scores)


@dataclass(frozen=True, slots=True)
class _Choice:
    label: str
    num_tokens: int
    num_keys: int
    k: int
    values: Callable[[torch.Tensor, torch.Generator], torch.Tensor] = _random
    query_lens: tuple[int, ...] = ()
    page_size: int = 4
    missing: int = 0
    strided: bool = False


_CHOICES: Final = (
    _Choice("no row", 0, 10, 3),
    _Choice("no key", 2, 0, 3),
    _Choice("one of one", 1, 1, 1),
    _Choice("k of 1", 3, 40, 1),
    _Choice("k beyond the keys", 3, 5, 9),
    _Choice("k as many as the keys", 3, 7, 7),
    _Choice("random", 4, 300, 17),
    _Choice("many ties", 4, 300, 40, _few_values),
    _Choice("all equal", 3, 150, 40, _equal),
    _Choice("last bits", 4, 300, 40, _near),
    _Choice("masked", 9, 130, 20, _masked),
    _Choice("nan and infinities", 4, 200, 50, _special),
    _Choice("paged", 5, 37, 8, _masked, query_lens=(2, 0, 1, 2)),
    _Choice("paged with missing pages", 5, 37, 20, query_lens=(2, 0, 1, 2), missing=3),
    _Choice("page size 1", 3, 20, 8, query_lens=(3,), page_size=1),
    _Choice("strided", 4, 60, 9, query_lens=(4,), strided=True),
)


def _case(choice: _Choice, *, bench: bool = False) -> Case:
    def build(generator: torch.Generator, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
        scores = choice.values(torch.randn((choice.num_tokens, choice.num_keys), generator=generator), generator)
        if choice.strided:
            scores = torch.cat((scores, torch.full((choice.num_tokens, 3), math.inf)), 1)[:, : choice.num_keys]
        inputs: dict[str, Any] = {"scores": scores.to(device), "k": choice.k}
        if choice.query_lens:
            columns = -(-choice.num_keys // choice.page_size) + 1
            num_pages = columns * len(choice.query_lens)
            table = torch.randperm(num_pages, generator=generator).to(torch.int32).view(-1, columns)
            for page in range(choice.missing):
                table[table == page] = (-1, -7, -(2**31), 2**31 - 1)[page % 4]
            offsets = torch.tensor([0, *choice.query_lens]).cumsum(0).to(torch.int32)
            if choice.strided:
                table, offsets = torch.stack((table, table), 2)[..., 0], torch.stack((offsets, offsets), 1)[:, 0]
            inputs |= {"page_table": table.to(device), "cu_seqlens_q": offsets.to(device), "page_size": choice.page_size}
        return inputs

    # The scores are float32 whatever dtype is asked for.
    return Case(TOPK_SLOTS.name, choice.label, build, bench=bench, dtypes=(torch.float32,))


def random_choice(rng: random.Random) -> Case:
    """A case of `topk_slots` with random sizes, values, and pages or none."""
    num_tokens, num_keys = rng.randint(1, 6), random_size(rng, 300)
    lengths: tuple[int, ...] = ()
    if rng.random() < 0.5:  # paged: the rows belong to one request or to two
        first = rng.randint(0, num_tokens)
        lengths = (first, num_tokens - first)
    values = rng.choice((_random, _few_values, _equal, _near, _masked, _special))
    page_size = rng.choice((1, 3, 4, 64))
    label, k, missing = f"random {rng.getrandbits(32):08x}", random_size(rng, 320), rng.choice((0, 2))
    return _case(_Choice(label, num_tokens, num_keys, k, values, lengths, page_size, missing))


TOPK_CASES: Final = (
    *(_case(choice) for choice in _CHOICES),
    _case(_Choice("2048 of 8192, 64 rows", 64, 8192, 2048, _masked, query_lens=(1,) * 64, page_size=64), bench=True),
    _case(_Choice("2048 of 65536, 4 rows", 4, 65536, 2048, query_lens=(4,), page_size=64), bench=True),
    _case(_Choice("2048 of 32768 with many ties", 8, 32768, 2048, _few_values), bench=True),
)
"""Every kernel of `topk_slots` meets these."""
