"""How latent decoding shares its work on Hopper: plain arithmetic, of which `shares` repeats on the device what needs the lengths.

Lengths are on the device and change between replays of a graph. So the host decides only what the batch's size and the model allow
to decide (`plan_latent`): how many programs there are, how rows lie in a tile, and how parts are merged. Which tiles a program
takes follows from the lengths: `shares` says it here, for tests and for readers.

Rows of a request that do not fit into one block are taken by as many programs beside each other, a group, that read the same keys
at the same time: the second one finds them in the L2 cache. One block after the other had read 8 times 9 MB a request from memory.

Floor of one call (what no kernel can undercut), for requests of L_i keys, s queries each and H heads: 1152 sum(L_i) bytes of bf16
rows of 576, and 2 (576 + 512) s H sum(L_i) floating-point operations. An H200 reads 4.6 TB/s and multiplies
786 TFLOP/s, 171 operations a byte: at s H = 16 a call needs 30, at 64 it needs 121, and bytes count alone; from s H = 91 on it is
the products.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

__all__ = [
    "FEW_ROWS",
    "LATENT_DIM",
    "MANY_ROWS",
    "MERGE_WARPS",
    "PAGE_SIZE",
    "LatentPlan",
    "Share",
    "begin_of",
    "item_tiles",
    "num_sharers",
    "owner_of",
    "plan_latent",
    "shares",
]

PAGE_SIZE = 64
"""Keys of a tile."""
LATENT_DIM = 512
"""Elements of a result's row."""
FEW_ROWS = 16
"""Rows of a block that lie along the columns of the matrix instruction."""
MANY_ROWS = 64
"""Rows of a block of the other kind."""
MERGE_WARPS = 4
"""Warps of a program of `merge`."""
_MERGED_ELEMENTS = 64 * 32 * MERGE_WARPS
"""Elements that a program of `merge` holds: 64 registers of each of its threads."""


@dataclass(frozen=True, slots=True)
class LatentPlan:
    """What the launcher needs to know.

    Attributes:
        programs: programs that attend, at most one on each processor unless there are more blocks: groups of `blocks`.
        rows: rows of a block: queries times heads of one request.
        blocks: blocks of each request, all of which read its keys.
        notes: blocks of rows or programs for which the merge gets a note.
        by_request: a note is for a block of rows of a request; otherwise for a program.
        merge_rows: rows that a program of the merge takes.
        merge_parts: parts that it takes at once.
        merge_slice: latent elements that it takes.
    """

    programs: int
    rows: int
    blocks: int
    notes: int
    by_request: bool
    merge_rows: int
    merge_parts: int
    merge_slice: int

    @property
    def groups(self) -> int:
        """Programs that have keys of their own."""
        return self.programs // self.blocks


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
    rows = FEW_ROWS if query_rows <= FEW_ROWS else MANY_ROWS
    blocks = -(-query_rows // rows)
    groups = max(1, min(num_processors // blocks, num_reqs * max(1, max_tiles)))
    programs, items = groups * blocks, num_reqs * blocks
    by_request = items <= 2 * programs
    # Groups that share a request if all are as long as can be; one more where their borders do not fall on those of the requests.
    sharers = num_sharers(groups, num_reqs * max(1, max_tiles))
    most = -(-sharers // num_reqs) + (sharers % num_reqs > 0)
    # Few parts: several rows together, each part's loads on their way at once. Many: one row, all of its parts at once.
    merge_rows = rows // 4 if most <= 4 else 1
    merge_parts = max(2, min(128, 1 << (most - 1).bit_length()))
    merge_slice = max(64, min(LATENT_DIM, _MERGED_ELEMENTS // merge_parts // merge_rows))
    return LatentPlan(
        programs, rows, blocks, items if by_request else programs, by_request, merge_rows, merge_parts, merge_slice
    )  # fmt: skip


def item_tiles(length: int, max_keys: int) -> int:
    """Tiles of each block of a request of ``length`` keys: those of its keys, and one where it has none."""
    return max(1, -(-min(length, max_keys) // PAGE_SIZE))


def num_sharers(groups: int, total: int) -> int:
    """Groups that get tiles: up to a tenth fewer where that leaves the longest share as it is; parts of fewer are merged."""
    groups = min(groups, total)
    fewer = -(-total // -(-total // groups))
    return fewer if 10 * fewer >= 9 * groups else groups


def shares(plan: LatentPlan, lengths: Sequence[int], *, max_keys: int) -> Iterator[Share]:
    """Yield who takes what, program after program: the same arithmetic as on the device."""
    tiles = [item_tiles(length, max_keys) for length in lengths]
    total = sum(tiles)
    groups = num_sharers(plan.groups, total)
    for program in range(groups * plan.blocks):
        group, block = divmod(program, plan.blocks)
        at, end = begin_of(group, groups, total), begin_of(group + 1, groups, total)
        request, start = 0, 0
        while start + tiles[request] <= at:
            start += tiles[request]
            request += 1
        while at < end:
            taken = min(start + tiles[request], end) - at
            yield Share(program, request, block, at - start, taken, taken == tiles[request])
            at += taken
            start += tiles[request]
            request += 1


def begin_of(group: int, groups: int, total: int) -> int:
    """First tile of a group: the first total % groups ones take a tile more than the others."""
    return group * (total // groups) + min(group, total % groups)


def owner_of(tile: int, groups: int, total: int) -> int:
    """The group that has a tile. There are at least as many tiles as groups, so none is without."""
    each, longer = divmod(total, groups)
    border = longer * (each + 1)
    return tile // (each + 1) if tile < border else longer + (tile - border) // each
