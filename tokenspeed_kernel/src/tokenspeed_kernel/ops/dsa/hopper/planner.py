"""How attention to given slots shares its work on Hopper: plain arithmetic.

Floor of one call (what no kernel can undercut), for T tokens of H heads and K slots each: 2 (576 + 512) T H K floating-point
operations, and the bytes of the rows that are named, 1152 each, once. An H200 multiplies 786 TFLOP/s and reads 4.6 TB/s, 171
operations a byte. Where tokens share no row, a row is worth 2176 H operations to its 1152 bytes: from H = 91 on it is the products
that count. A program takes 64 heads, so that rows come from the L2 cache once for each 64 heads: at the full rate of products that
is 6.5 TB/s.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

__all__ = ["LATENT_DIM", "ROPE_DIM", "ROWS", "SparsePlan", "plan_sparse", "run_of"]

LATENT_DIM = 512
"""Elements of a row that are key and value."""
ROPE_DIM = 64
"""Elements of a row that are key alone."""
ROWS = 64
"""Heads of a program: rows of an asynchronous product."""
_MOST_SPLITS = 16
_TILE_US, _MERGE_US, _MERGE_ROW_US = 1.9, 3.0, 0.016
"""Of a tile of 64 slots, and of the merge as a whole and for each row (token and head)."""


@dataclass(frozen=True, slots=True)
class SparsePlan:
    """What the launcher needs to know.

    Attributes:
        splits: programs that share the slots of a token's block of heads.
        keys: slots of a tile.
        stages: tiles in shared memory.
        parts: 1, or 2 where each half of a tile's place is free as soon as its own values are added.
        gather_registers, weigh_registers: of each thread of two of the roles; the third has what is left.
    """

    splits: int
    keys: int = 64
    stages: int = 2
    parts: int = 2
    gather_registers: int = 72
    weigh_registers: int = 120


@functools.lru_cache(maxsize=1024)
def plan_sparse(num_tokens: int, num_heads: int, num_slots: int, num_processors: int) -> SparsePlan:
    """Plan attention of ``num_tokens`` tokens with ``num_slots`` slots each.

    A processor holds one program. Slots are split where processors would be idle and the shorter runs save more than merging takes:
    both are estimated from what an H200 took (perf/baselines/h200/hopper.dsa.txt).
    """
    programs = num_tokens * -(-num_heads // ROWS)
    tiles = -(-num_slots // SparsePlan(1).keys)

    def estimate_us(splits: int) -> float:
        merge = 0.0 if splits == 1 else _MERGE_US + _MERGE_ROW_US * num_tokens * num_heads
        return _TILE_US * -(-tiles // splits) + merge

    most = max(1, min(num_processors // max(1, programs), tiles, _MOST_SPLITS))
    return SparsePlan(min(range(1, most + 1), key=lambda splits: (estimate_us(splits), splits)))


def run_of(split: int, plan: SparsePlan, num_slots: int) -> tuple[int, int, int]:
    """(first slot, slots, tiles) of a program: the same arithmetic as in `stream`. It has a tile even where it has no slot."""
    all_tiles = -(-num_slots // plan.keys)
    each = -(-all_tiles // plan.splits)
    first = min(split * each, all_tiles)
    tiles = max(min(first + each, all_tiles) - first, 1)
    begin = first * plan.keys
    return begin, max(min(num_slots, begin + tiles * plan.keys) - begin, 0), tiles
