"""Device code that merges the parts which the programs of `stream` and `wide` left of blocks that they share.

A launch of its own: merging within the first, behind a barrier of all its programs, was measured 3 us slower at one request of
65,536 keys. The first kernel says which parts there are (`note_parts` in `shares`), because working it out here, from the lengths
and by divisions, took as long as the merging: 2 us.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tokenspeed_kernel.ops.mla.hopper.shares import exp_base

__all__ = ["latent_merge_kernel"]

_LN2 = gl.constexpr(0.6931471805599453)
_LATENT = gl.constexpr(512)


@gluon.jit(do_not_specialize=["q_len"])
def latent_merge_kernel(
    out_ptr, lse_ptr, notes_ptr, parts_ptr, stats_ptr, q_len, out_req, out_token, out_head,
    HEADS: gl.constexpr, ROWS: gl.constexpr, TAKEN: gl.constexpr, PARTS: gl.constexpr, SLICE: gl.constexpr, LSE: gl.constexpr,
):  # fmt: skip
    """Program (i, j) merges the j-th slice of TAKEN rows of the block of note i // (ROWS / TAKEN), PARTS parts at once."""
    WARPS: gl.constexpr = gl.num_warps()
    ACROSS: gl.constexpr = min(32, SLICE // 8)
    LAYOUT: gl.constexpr = gl.BlockedLayout(
        [1, 1, 8], [32 // ACROSS, 1, ACROSS] if TAKEN == 1 else [1, 32 // ACROSS, ACROSS],
        [WARPS, 1, 1] if TAKEN == 1 else [1, WARPS, 1], [2, 1, 0],
    )  # fmt: skip
    PAIRS: gl.constexpr = gl.SliceLayout(2, LAYOUT)
    note = notes_ptr + gl.program_id(0) // (ROWS // TAKEN) * 4
    count, first_place, item, blocks = gl.load(note), gl.load(note + 1), gl.load(note + 2), gl.load(note + 3)
    if count > 0:
        part = gl.expand_dims(gl.arange(0, PARTS, gl.SliceLayout(1, PAIRS)), 1)
        row = gl.program_id(0) % (ROWS // TAKEN) * TAKEN + gl.expand_dims(gl.arange(0, TAKEN, gl.SliceLayout(0, PAIRS)), 0)
        dims = gl.arange(0, SLICE, gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))
        dims = gl.program_id(1) * SLICE + gl.expand_dims(gl.expand_dims(dims, 0), 1)
        top = gl.full([PARTS, TAKEN], float("-inf"), gl.float32, PAIRS)
        total = gl.zeros([PARTS, TAKEN], gl.float32, PAIRS)
        acc = gl.zeros([PARTS, TAKEN, SLICE], gl.float32, LAYOUT)
        for start in range(0, count, PARTS):
            # The first part may be its program's second, the others are their programs' first.
            place = gl.where(start + part == 0, first_place, 2 * (first_place // 2 + (start + part) * blocks))
            source = place * ROWS + row
            there = (start + part < count) & (row >= 0)
            mask = gl.expand_dims(there, 2) & (dims >= 0)
            values = gl.load(parts_ptr + gl.expand_dims(source, 2) * _LATENT + dims, mask=mask, other=0.0)
            part_top = gl.load(stats_ptr + source * 2, mask=there, other=float("-inf"))
            part_total = gl.load(stats_ptr + source * 2 + 1, mask=there, other=0.0)
            new_top = gl.maximum(top, part_top)
            base = exp_base(new_top)
            shrink, grow = gl.exp2(top - base), gl.exp2(part_top - base)
            total = total * shrink + part_total * grow
            acc = acc * gl.expand_dims(shrink, 2) + values.to(gl.float32) * gl.expand_dims(grow, 2)
            top = new_top
        highest = gl.max(top, 0)
        weights = gl.exp2(top - gl.expand_dims(exp_base(highest), 0))
        row_total = gl.sum(total * weights, 0)
        safe = gl.where(row_total == 0.0, 1.0, row_total)
        merged = gl.sum(acc * gl.expand_dims(weights, 2), 0)
        OUT: gl.constexpr = gl.SliceLayout(0, LAYOUT)
        merged = merged / gl.expand_dims(gl.convert_layout(safe, gl.SliceLayout(1, OUT)), 1)
        request, block = item // blocks, item % blocks
        out_row = block * ROWS + gl.program_id(0) % (ROWS // TAKEN) * TAKEN + gl.arange(0, TAKEN, gl.SliceLayout(1, OUT))
        out_dims = gl.program_id(1) * SLICE + gl.arange(0, SLICE, gl.SliceLayout(0, OUT))
        out = out_ptr + request.to(gl.int64) * out_req + out_row // HEADS * out_token + out_row % HEADS * out_head
        live = gl.expand_dims(out_row < q_len * HEADS, 1) & gl.expand_dims(out_dims >= 0, 0)
        gl.store(gl.expand_dims(out, 1) + gl.expand_dims(out_dims, 0), merged.to(gl.bfloat16), mask=live)
        if LSE:
            lse = gl.where(row_total == 0.0, float("-inf"), (highest + gl.log2(safe)) * _LN2)
            lse_row = block * ROWS + gl.program_id(0) % (ROWS // TAKEN) * TAKEN + gl.arange(0, TAKEN, gl.SliceLayout(0, PAIRS))
            gl.store(lse_ptr + request.to(gl.int64) * q_len * HEADS + lse_row, lse, mask=lse_row < q_len * HEADS)
