"""The 2048 best of each row's scores on a Hopper GPU: their slots, in the order of their positions.

The peer is torch.topk, which gives values and positions in the order of the values: by default, and without sorting them. Neither
maps positions to slots or puts them in order. Scores are normally distributed; each is once the input of a replayed graph.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from perf.hopper.bench import Bench, as_benchmark, chosen
from perf.hopper.rows import Error, Family, Goal, Result, Work
from tokenspeed_kernel.ops import dsa

_K, _PAGE = 2048, 64
_COLD_BYTES = 128 << 20
"""More than the L2 cache of an H200 (50 MB)."""
_TORCH, _UNSORTED = "torch.topk", "torch.topk, not sorted"


@dataclass(frozen=True, slots=True)
class Shape:
    """Rows of scores; `seen` is the part of a row that is not -inf."""

    num_rows: int
    num_keys: int = 65536
    seen: float = 1.0

    def __str__(self) -> str:
        seen = "" if self.seen == 1.0 else f", {self.seen:.0%} seen"
        return f"{self.num_rows} x {self.num_keys}{seen}"


SHAPES = (*(Shape(rows) for rows in (1, 4, 16, 64)), Shape(64, 8192), Shape(1, 131072), Shape(16, 65536, 0.125), Shape(1024, 16384))


def _scores(shape: Shape) -> torch.Tensor:
    scores = torch.randn((shape.num_rows, shape.num_keys), device="cuda")
    scores[:, int(shape.num_keys * shape.seen) :] = -math.inf
    return scores


def _right(scores: torch.Tensor, slots: torch.Tensor, table: torch.Tensor) -> bool:
    """Whether they are those of a stable sort."""
    order = scores.sort(dim=1, descending=True, stable=True)
    chosen_positions = order.indices[:, :_K].masked_fill(order.values[:, :_K] == -math.inf, scores.shape[1])
    positions = chosen_positions.sort(1).values
    there = positions < scores.shape[1]
    positions = positions.clamp(max=scores.shape[1] - 1)
    rows = torch.arange(scores.shape[0], device="cuda")[:, None]
    want = torch.where(there, table[rows, positions // _PAGE] * _PAGE + positions % _PAGE, -1)
    return torch.equal(slots, want.to(torch.int32))


def work(shape: Shape) -> Work:
    """Scores read once, slots written."""
    return Work(str(shape), 4 * shape.num_rows * (shape.num_keys + _K), goals=(Goal(3.0, (_TORCH,)),))


def measure(shape: Shape, bench: Bench) -> Result:
    """Times of the kernel that is selected and of PyTorch's."""
    rows, pages = shape.num_rows, shape.num_keys // _PAGE
    table = torch.stack([torch.randperm(pages, device="cuda") for _ in range(rows)]).to(torch.int32)
    offsets = torch.arange(rows + 1, dtype=torch.int32, device="cuda")
    paging = {"page_table": table, "cu_seqlens_q": offsets, "page_size": _PAGE}
    inputs = [_scores(shape) for _ in range(max(2, min(64, _COLD_BYTES // (4 * rows * shape.num_keys))))]
    tied = (inputs[0] * 16).round()
    problem = ""
    for name, scores in (("random scores", inputs[0]), ("many ties", tied), ("sorted scores", inputs[0].sort(1).values)):
        if not _right(scores, dsa.topk_slots(scores, _K, **paging), table):
            problem = f"wrong choice among {name}"
    out = torch.empty((rows, _K), dtype=torch.int32, device="cuda")
    ours = [lambda scores=scores: dsa.topk_slots(scores, _K, **paging, out=out) for scores in inputs]
    peers: dict[str, Callable[[], list[Callable[[], object]]]] = {
        _TORCH: lambda: [lambda scores=scores: torch.topk(scores, _K) for scores in inputs],
        _UNSORTED: lambda: [lambda scores=scores: torch.topk(scores, _K, sorted=False) for scores in inputs],
    }
    solution = chosen(dsa.topk_slots, scores=inputs[0], k=_K, **paging)
    error = Error(math.nan, math.nan) if problem else Error(1.0, 0.0)
    return bench.measured(work(shape), ours, peers, error=error, problem=problem, solution=solution)


FAMILY = Family("dsa_topk", "slots of the 2048 best scores of each row against torch.topk", SHAPES, work, measure)
BENCHMARK = as_benchmark(FAMILY)
