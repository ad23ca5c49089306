"""How latent decoding shares its work on Hopper: plain arithmetic, of which `stream` repeats on the device what needs the lengths.

Lengths are on the device and change between replays of a graph. So the host decides only what the batch's size and the model allow
to decide (`plan_latent`): how many programs there are, how rows lie in a tile, and how parts are merged. Which tiles a program
takes follows from the lengths: `shares` says it here, for tests and for readers.

Floor of one call (what no kernel can undercut), for requests of L_i keys, s queries each and H heads: 1152 sum(L_i) bytes of bf16
rows of 576, and 2 (576 + 512) s H sum(L_i) floating-point operations. An H200 reads 4.6 TB/s and multiplies 786 TFLOP/s, 171
operations a byte: at s H = 16 a call needs 30, at 64 it needs 121, and bytes count alone; from s H = 91 on it is the products.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

__all__ = [
    "LATENT_DIM",
    "MERGE_WARPS",
    "PAGE_SIZE",
    "LatentPlan",
    "Share",
    "begin_of",
    "item_tiles",
    "owner_of",
    "plan_latent",
    "shares",
]

PAGE_SIZE = 64
"""Keys of a tile."""
LATENT_DIM = 512
"""Elements of a result's row."""
_MOST_PROGRAMS = 256
"""Parts of one row that a program of `merge` takes, at most."""
_MERGED_ELEMENTS = 32 * 32 * 8
"""Elements that a program of `merge` holds: 32 registers of each of its threads."""
MERGE_WARPS = 8
"""Warps of a program of `merge`."""


@dataclass(frozen=True, slots=True)
class LatentPlan:
    """What the launcher needs to know.

    Attributes:
        programs: programs that attend, one on each processor.
        rows: rows of a block: queries times heads of one request.
        blocks: blocks of each request, all of which read its keys.
        swap: rows lie along the columns of the matrix instruction.
        num_warps: of a program.
        one_row: a program of the merge takes all parts of one row; otherwise of a block, one after the other.
        parts: parts of a row for which there is room, or the rows of a block.
        merge_slice: latent elements that a program of the merge takes.
    """

    programs: int
    rows: int
    blocks: int
    swap: bool
    num_warps: int
    one_row: bool
    parts: int
    merge_slice: int


@dataclass(frozen=True, slots=True)
class Share:
    """A run of tiles of one block of rows that one program takes.

    Attributes:
        program: who.
        request, block: whose.
        first_tile, num_tiles: the run, counted within the request's tiles.
        whole: whether that is all of them.
    """

    program: int
    request: int
    block: int
    first_tile: int
    num_tiles: int
    whole: bool


def plan_latent(num_reqs: int, query_rows: int, max_tiles: int, num_processors: int) -> LatentPlan:
    """Plan decoding of ``num_reqs`` requests, whatever their lengths.

    Args:
        num_reqs: requests, at least 1.
        query_rows: queries times heads of a request.
        max_tiles: tiles of the longest request that may come.
        num_processors: multiprocessors of the device; each holds one program.
    Returns:
        The plan, a function of the arguments alone.
    """
    few = query_rows <= 16
    rows, num_warps = (16, 4) if few else (64, 8)
    blocks = -(-query_rows // rows)
    items = num_reqs * blocks
    # Measured on an H200 with 64 rows: alone, or with more blocks, they are faster along the rows (perf/baselines/h200).
    swap = few or (blocks == 1 and num_reqs > 1)
    programs = min(num_processors, _MOST_PROGRAMS, items * max(1, max_tiles))
    # Programs that share a block of the usual length; it may begin and end within one's tiles.
    most_parts = -(-programs // items) + 1
    one_row = programs > 3 * items
    parts = 1 << (most_parts - 1).bit_length() if one_row else rows
    merge_slice = max(32, min(LATENT_DIM, _MERGED_ELEMENTS // parts))
    return LatentPlan(programs, rows, blocks, swap, num_warps, one_row, parts, merge_slice)


def item_tiles(length: int, max_keys: int) -> int:
    """Tiles of each block of a request of ``length`` keys: those of its keys, and one where it has none."""
    return max(1, -(-min(length, max_keys) // PAGE_SIZE))


def shares(plan: LatentPlan, lengths: Sequence[int], *, max_keys: int) -> Iterator[Share]:
    """Yield who takes what, program after program: the same arithmetic as in `stream`."""
    tiles = [item_tiles(length, max_keys) for length in lengths]
    items = [(request, block, count) for request, count in enumerate(tiles) for block in range(plan.blocks)]
    total = sum(count for _, _, count in items)
    programs = min(plan.programs, total)
    item, item_start = 0, 0
    for program in range(programs):
        at, end = begin_of(program, programs, total), begin_of(program + 1, programs, total)
        while at < end:
            request, block, count = items[item]
            taken = min(item_start + count, end) - at
            yield Share(program, request, block, at - item_start, taken, taken == count)
            at += taken
            if at == item_start + count:
                item, item_start = item + 1, item_start + count


def begin_of(program: int, programs: int, total: int) -> int:
    """First tile of a program: the first total % programs ones take a tile more than the others."""
    return program * (total // programs) + min(program, total % programs)


def owner_of(tile: int, programs: int, total: int) -> int:
    """The program that has a tile. There are at least as many tiles as programs, so none is without."""
    each, longer = divmod(total, programs)
    border = longer * (each + 1)
    return tile // (each + 1) if tile < border else longer + (tile - border) // each
