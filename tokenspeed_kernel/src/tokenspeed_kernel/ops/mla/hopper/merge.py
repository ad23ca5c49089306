"""Device code that merges the parts which the programs of `stream` left of blocks that they share.

A launch of its own: merging within the first, behind a barrier of all its programs, was measured 3 us slower at one request of
65,536 keys, because the barrier and the first run of far code cost more than a launch inside a graph.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tokenspeed_kernel.ops.mla.hopper.stream import begin_of, exp_base, owner_of, request_tiles

__all__ = ["latent_merge_kernel"]

_LN2 = gl.constexpr(0.6931471805599453)
_LATENT = gl.constexpr(512)


@gluon.jit
def _merge_row(
    out, lse, parts_ptr, stats_ptr, dims, item_row, first_program, last_program, second,
    ROWS: gl.constexpr, PARTS: gl.constexpr, SLICE: gl.constexpr, LSE: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Merge elements `dims` of one row: PARTS parts at once, so that their loads are on their way together.

    That is all of them, unless a request is longer than the others by far.
    """
    top = gl.full([PARTS], float("-inf"), gl.float32, gl.SliceLayout(1, LAYOUT))
    total = gl.zeros([PARTS], gl.float32, gl.SliceLayout(1, LAYOUT))
    acc = gl.zeros([PARTS, SLICE], gl.float32, LAYOUT)
    for start in range(first_program, last_program + 1, PARTS):
        part = start + gl.arange(0, PARTS, gl.SliceLayout(1, LAYOUT))
        there = part <= last_program
        source = (2 * part + gl.where(part == first_program, second, 0)) * ROWS + item_row
        part_top = gl.load(stats_ptr + source * 2, mask=there, other=float("-inf"))
        part_total = gl.load(stats_ptr + source * 2 + 1, mask=there, other=0.0)
        mask = there[:, None] & (dims >= 0)[None, :]
        values = gl.load(parts_ptr + source[:, None] * _LATENT + dims[None, :], mask=mask, other=0.0)
        new_top = gl.maximum(top, part_top)
        base = exp_base(new_top)
        shrink, grow = gl.exp2(top - base), gl.exp2(part_top - base)
        total = total * shrink + part_total * grow
        acc = acc * shrink[:, None] + values * grow[:, None]
        top = new_top
    highest = gl.max(top, 0)
    weights = gl.exp2(top - exp_base(highest))
    row_total = gl.sum(total * weights, 0)
    safe = gl.where(row_total == 0.0, 1.0, row_total)
    gl.store(out + dims, (gl.sum(acc * weights[:, None], 0) / safe).to(gl.bfloat16))
    if LSE:
        gl.store(lse, gl.where(row_total == 0.0, float("-inf"), (highest + gl.log2(safe)) * _LN2))


@gluon.jit
def _merge_block(
    out, lse, parts_ptr, stats_ptr, dims, live, first_program, last_program, second,
    ROWS: gl.constexpr, SLICE: gl.constexpr, LSE: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Merge elements `dims` of all rows of a block, one part after the other: for blocks of few parts."""
    top = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, LAYOUT))
    total = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, LAYOUT))
    acc = gl.zeros([ROWS, SLICE], gl.float32, LAYOUT)
    for part in range(first_program, last_program + 1):
        source = (2 * part + gl.where(part == first_program, second, 0)) * ROWS
        source = source + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
        part_top = gl.load(stats_ptr + source * 2)
        part_total = gl.load(stats_ptr + source * 2 + 1)
        values = gl.load(parts_ptr + source[:, None] * _LATENT + dims[None, :])
        new_top = gl.maximum(top, part_top)
        base = exp_base(new_top)
        shrink, grow = gl.exp2(top - base), gl.exp2(part_top - base)
        total = total * shrink + part_total * grow
        acc = acc * shrink[:, None] + values * grow[:, None]
        top = new_top
    safe = gl.where(total == 0.0, 1.0, total)
    mask = live[:, None] & (dims >= 0)[None, :]
    gl.store(out[:, None] + dims[None, :], (acc * (1.0 / safe)[:, None]).to(gl.bfloat16), mask=mask)
    if LSE:
        gl.store(lse, gl.where(total == 0.0, float("-inf"), (top + gl.log2(safe)) * _LN2), mask=live)


@gluon.jit(do_not_specialize=["num_reqs", "max_pages", "q_len", "num_programs"])
def latent_merge_kernel(
    out_ptr, lse_ptr, lengths_ptr, parts_ptr, stats_ptr, num_reqs, max_pages, q_len, num_programs, out_req, out_token, out_head,
    REQS: gl.constexpr, HEADS: gl.constexpr, ROWS: gl.constexpr, ONE_ROW: gl.constexpr, PARTS: gl.constexpr,
    SLICE: gl.constexpr, LSE: gl.constexpr,
):  # fmt: skip
    """Program (i, j) merges the j-th slice of the i-th row (ONE_ROW) or block of rows, if programs of `stream` share it."""
    WARPS: gl.constexpr = gl.num_warps()
    ACROSS: gl.constexpr = min(32, SLICE // 4)
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [32 // ACROSS, ACROSS], [WARPS, 1], [1, 0])
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    blocks = (q_len * HEADS + ROWS - 1) // ROWS
    ends = request_tiles(lengths_ptr, num_reqs, max_pages, REQS)
    num_tiles = gl.max(ends, 0) * blocks
    programs = gl.minimum(num_programs, num_tiles)
    dims = gl.program_id(1) * SLICE + gl.arange(0, SLICE, gl.SliceLayout(0, LAYOUT))
    item_rows = q_len * HEADS if ONE_ROW else blocks
    request = gl.program_id(0) // item_rows
    item_row = gl.program_id(0) % item_rows
    block = item_row // ROWS if ONE_ROW else item_row
    reqs = gl.arange(0, REQS, LINE)
    first = gl.max(gl.where(reqs < request, ends, 0), 0)
    item_tiles = gl.max(gl.where(reqs <= request, ends, 0), 0) - first
    item_tile = first * blocks + block * item_tiles
    first_program = owner_of(item_tile, programs, num_tiles)
    last_program = owner_of(item_tile + item_tiles - 1, programs, num_tiles)
    if last_program > first_program:
        # Of the first program it is the last item, and so the second place where it has another before.
        second = gl.where(begin_of(first_program, programs, num_tiles) < item_tile, 1, 0)
        out_of = out_ptr + request.to(gl.int64) * out_req
        lse_of = lse_ptr + request.to(gl.int64) * q_len * HEADS
        if ONE_ROW:
            _merge_row(
                out_of + item_row // HEADS * out_token + item_row % HEADS * out_head, lse_of + item_row,
                parts_ptr, stats_ptr, dims, item_row % ROWS, first_program, last_program, second, ROWS, PARTS, SLICE, LSE, LAYOUT,
            )  # fmt: skip
        else:
            row = block * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
            _merge_block(
                out_of + row // HEADS * out_token + row % HEADS * out_head, lse_of + row,
                parts_ptr, stats_ptr, dims, row < q_len * HEADS, first_program, last_program, second, ROWS, SLICE, LSE, LAYOUT,
            )  # fmt: skip
