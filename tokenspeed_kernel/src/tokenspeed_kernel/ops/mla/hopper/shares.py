"""Device code that both kernels of latent decoding share: which programs take which tiles; `planner` says the same in Python."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

__all__ = ["begin_of", "exp_base", "next_page", "note_parts", "num_sharers", "owner_of", "request_of", "request_tiles"]

_NO_TILE = gl.constexpr(2**30)
_PAGE = gl.constexpr(64)


@gluon.jit
def _plus(a, b):
    return a + b


@gluon.jit
def exp_base(top):
    """What is subtracted from logits: their maximum, or 0 where nothing was seen, because -inf - -inf is NaN."""
    return gl.where(top == float("-inf"), 0.0, top)


@gluon.jit
def request_tiles(lengths_ptr, num_reqs, max_pages, REQS: gl.constexpr):
    """Running sum of the requests' tiles. Every request has at least one, so that one without keys gets its result too."""
    EACH: gl.constexpr = max(1, REQS // 32)  # every warp has all of them: no warp waits for another
    layout: gl.constexpr = gl.BlockedLayout([EACH], [32], [gl.num_warps()], [0])
    reqs = gl.arange(0, REQS, layout)
    lengths = gl.load(lengths_ptr + reqs, mask=reqs < num_reqs, other=0)
    tiles = gl.maximum((gl.minimum(lengths, max_pages * _PAGE) + _PAGE - 1) // _PAGE, 1)
    return gl.associative_scan(gl.where(reqs < num_reqs, tiles, 0), 0, _plus)


@gluon.jit
def request_of(ends, tile):
    """(request, its first tile, its number of tiles) of a tile."""
    before = ends <= tile
    request = gl.sum(before.to(gl.int32), 0)
    first = gl.max(gl.where(before, ends, 0), 0)
    return request, first, gl.min(gl.where(before, _NO_TILE, ends), 0) - first


@gluon.jit
def num_sharers(groups, num_tiles):
    """Groups that get tiles: a tenth fewer than there are where the longest share stays as it is; fewer parts are merged."""
    groups = gl.minimum(groups, num_tiles)
    each = (num_tiles + groups - 1) // groups
    fewer = (num_tiles + each - 1) // each
    return gl.where(10 * fewer >= 9 * groups, fewer, groups)


@gluon.jit
def begin_of(group, groups, num_tiles):
    """First tile of a group: the first num_tiles % groups ones take a tile more than the others."""
    return gl.minimum(group * (num_tiles // groups) + gl.minimum(group, num_tiles % groups), num_tiles)


@gluon.jit
def owner_of(tile, groups, num_tiles):
    """The group that has a tile."""
    each = num_tiles // groups
    longer = num_tiles % groups
    border = longer * (each + 1)
    return gl.where(tile < border, tile // (each + 1), longer + (tile - border) // each)


@gluon.jit
def next_page(pages_ptr, lengths_ptr, num_reqs, max_pages, pages_row, request, tile, num_pages):
    """(page of the tile that the cursor is at, and the cursor behind it): it runs ahead of the products, over all requests."""
    page = gl.load(pages_ptr + request.to(gl.int64) * pages_row + tile, mask=tile < num_pages, other=-1)
    tile += 1
    if tile >= num_pages:
        tile = tile * 0
        request += 1
        length = gl.load(lengths_ptr + request, mask=request < num_reqs, other=0)
        num_pages = (gl.minimum(length, max_pages * _PAGE) + _PAGE - 1) // _PAGE
    return page, request, tile, num_pages


@gluon.jit
def note_parts(
    notes_ptr, program, block, blocks, request, at, first_tile, item_tiles, count, is_first, is_last, groups, num_tiles,
    BY_REQUEST: gl.constexpr,
):  # fmt: skip
    """Tell the merge: (number of parts, 0 where there is nothing to merge; place of the first; request * blocks + block; blocks).

    There is a note for each block of rows, written by the program that has its first tile; or for each program, of the block whose
    first tile and not last tile it has, which can only be its last.
    """
    parts = at * 0
    if count < item_tiles:
        parts = owner_of(at + item_tiles - 1, groups, num_tiles) - program // blocks + 1
    if BY_REQUEST:
        note = request * blocks + block
        write = first_tile == 0
    else:
        note = program
        write = is_last
        parts = gl.where(first_tile == 0, parts, 0)
    if write:
        gl.store(notes_ptr + note * 4, parts)
        gl.store(notes_ptr + note * 4 + 1, 2 * program + gl.where(is_first, 0, 1))
        gl.store(notes_ptr + note * 4 + 2, request * blocks + block)
        gl.store(notes_ptr + note * 4 + 3, blocks)
