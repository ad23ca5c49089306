"""How paged decoding shares its work on Hopper: plain arithmetic, of which `stream` repeats on the device what needs the lengths.

Lengths are on the device and change between replays of a graph. So the host decides only what the batch's size and the model allow
to decide (`plan_stream`): how many programs there are, and how heads and keys lie in a tile. Which tiles a program takes follows
from the lengths: `shares` says it here, for tests and for readers.

Floor of one call (what no kernel can undercut), for n requests of L_i visible keys, Hkv key heads and Hq query heads of D elements:
4 Hkv D sum(L_i) bytes of bf16 keys and values, and 4 Hq D sum(L_i) floating-point operations. At 32/8 heads of 128 that is 4
operations a byte, of the 170 that an H200 does in the time of one (786 TFLOP/s over 4.6 TB/s): bytes alone count.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

__all__ = ["Share", "StreamPlan", "item_tiles", "plan_stream", "sharers", "shares", "stream_plan"]

_BLOCK_M = 16
"""Rows of one matrix instruction; a group of fewer query heads leaves the others empty."""
_BLOCK_N = 16
"""Keys of one lane: the depth of one matrix instruction, and no more than lie in a page."""
# Tuned on an H200: perf/baselines/h200/hopper.gqa_decode.txt.
_NUM_WARPS = 4
_FEW_REQUESTS = 8
_MIN_TILES = 1
_STAGES = {64: 4, 128: 3}
"""By the largest head_dim; one less is the number of tiles, of 16 and 32 KB, that a program keeps."""
_LEAST_USE = 0.8
"""Part of the places for programs that must be taken when their number is rounded."""
_MERGED_REGISTERS = 64
"""Registers of a thread that take parts while they are merged."""
_MOST_PARTS = 16
"""Parts that are merged at a time, at most: the loop over them is unrolled."""


@dataclass(frozen=True, slots=True)
class StreamPlan:
    """What the launcher needs to know.

    Attributes:
        programs: programs of the launch; all are resident at once.
        heads, chunks: key heads of a tile, and runs of `block_n` keys; their product is the number of warps.
        block_m, block_n: rows of a head and keys of a run.
        rows: rows of a head that are kept of a part.
        blocks: items of each request.
        parts: parts that are merged at a time.
        min_tiles: tiles that a program takes at least, where there are so many.
        num_stages: pipeline depth of the compiler; one less is the number of tiles that shared memory holds.
    """

    programs: int
    heads: int
    chunks: int
    block_m: int
    block_n: int
    rows: int
    blocks: int
    parts: int
    min_tiles: int
    num_stages: int

    @property
    def num_warps(self) -> int:
        """Warps of a program: one for each lane of a tile."""
        return self.heads * self.chunks

    @property
    def tile(self) -> int:
        """Keys of a tile."""
        return self.chunks * self.block_n

    @property
    def part_rows(self) -> int:
        """Rows of one part."""
        return self.heads * self.rows


@dataclass(frozen=True, slots=True)
class Share:
    """A run of tiles of one item that one program takes.

    Attributes:
        program: who.
        request, block: the item.
        first_tile, num_tiles: the run, counted within the item.
        whole: whether that is all of the item.
    """

    program: int
    request: int
    block: int
    first_tile: int
    num_tiles: int
    whole: bool


def plan_stream(num_reqs: int, num_heads: int, num_kv_heads: int, head_dim: int, num_processors: int) -> StreamPlan:
    """Plan decoding of ``num_reqs`` requests, whatever their lengths.

    Args:
        num_reqs: requests, at least 1.
        num_heads, num_kv_heads: heads of queries and of keys; the second divides the first.
        head_dim: elements of a head.
        num_processors: multiprocessors of the device.
    Returns:
        The plan, a function of the arguments alone.
    """
    # A part holds all heads of a tile: few requests, which are cut into many parts to be merged, take one head at a time. Of many
    # requests, heads that lie side by side are read together.
    wanted = 1 if num_reqs < _FEW_REQUESTS else _NUM_WARPS
    heads = 1
    while heads < wanted and num_kv_heads % (2 * heads) == 0:
        heads *= 2
    items = num_reqs * (num_kv_heads // heads) * -(-num_heads // num_kv_heads // _BLOCK_M)
    # One program on a multiprocessor where that keeps enough bytes in flight: its items are merged from fewer parts.
    alone = items <= num_processors and (head_dim > 64 or num_reqs < _FEW_REQUESTS)
    slots = num_processors if alone else 2 * num_processors
    # Where requests are equally long and programs a multiple of items, or items of programs, no program has the end of one item and
    # the beginning of another, and programs of neighbouring heads read neighbouring memory at the same time.
    programs = slots // items * items if items <= slots else items // -(-items // slots)
    if programs < _LEAST_USE * slots:
        programs = slots
    return stream_plan(
        num_heads,
        num_kv_heads,
        head_dim,
        programs,
        heads=heads,
        num_warps=_NUM_WARPS,
        num_stages=_STAGES[64 if head_dim <= 64 else 128],
        min_tiles=_MIN_TILES,
    )


def stream_plan(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    programs: int,
    *,
    heads: int,
    num_warps: int,
    num_stages: int,
    min_tiles: int,
) -> StreamPlan:
    """Complete a plan of the given tile shape."""
    group = num_heads // num_kv_heads
    rows = min(_BLOCK_M, 1 << max(0, group - 1).bit_length())
    parts = min(_MOST_PARTS, max(1, _MERGED_REGISTERS * 32 * num_warps // (heads * rows * head_dim)))
    return StreamPlan(
        programs=programs,
        heads=heads,
        chunks=num_warps // heads,
        block_m=_BLOCK_M,
        block_n=_BLOCK_N,
        rows=rows,
        blocks=num_kv_heads // heads * -(-group // _BLOCK_M),
        parts=1 << (parts.bit_length() - 1),
        min_tiles=min_tiles,
        num_stages=num_stages,
    )


def item_tiles(length: int, tile: int, max_keys: int, window: int | None) -> int:
    """Tiles of each item of a request of ``length`` keys: those of its visible keys, and one where it has none."""
    last = min(length, max_keys)
    first = 0 if window is None else max(0, length - window)
    return max(1, -(-last // tile) - first // tile)


def shares(plan: StreamPlan, lengths: Sequence[int], *, max_keys: int, window: int | None = None) -> Iterator[Share]:
    """Yield who takes what, program after program: the same arithmetic as in `stream`."""
    tiles = [item_tiles(length, plan.tile, max_keys, window) for length in lengths]
    items = [(request, block, count) for request, count in enumerate(tiles) for block in range(plan.blocks)]
    total = sum(count for _, _, count in items)
    programs = max(1, min(plan.programs, total // plan.min_tiles))
    item, item_start = 0, 0
    for program in range(programs):
        at, end = program * total // programs, (program + 1) * total // programs
        while at < end:
            request, block, count = items[item]
            taken = min(item_start + count, end) - at
            yield Share(program, request, block, at - item_start, taken, taken == count)
            at += taken
            if at == item_start + count:
                item, item_start = item + 1, item_start + count


def sharers(first_tile: int, num_tiles: int, programs: int, total: int) -> tuple[int, int]:
    """First and last of ``programs`` that have one of tiles [first_tile, first_tile + num_tiles) of ``total``, as `stream` counts.

    Program p begins at tile p total // programs; the last that begins at tile t or before is the one that has t. There are at least
    as many tiles as programs, so none is empty.
    """
    return ((first_tile + 1) * programs - 1) // total, ((first_tile + num_tiles) * programs - 1) // total
