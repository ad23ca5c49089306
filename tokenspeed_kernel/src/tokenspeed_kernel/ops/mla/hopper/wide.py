"""Device code of latent decoding on Hopper for blocks of 64 rows, in Gluon: one group of warps for scores, one for values.

The first group multiplies queries with keys and takes the softmax; the second multiplies what the first left in shared memory
with the values, which are the same tile. So the matrix unit works on the values of one tile while the exponentials of the next are
taken. Shares of the batch and the parts that are merged are those of `stream`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tokenspeed_kernel.ops.mla.hopper.gluon_names import block_barrier, load_tile
from tokenspeed_kernel.ops.mla.hopper.shares import (
    begin_of,
    exp_base,
    next_page,
    note_parts,
    num_sharers,
    request_of,
    request_tiles,
)

_LN2 = gl.constexpr(0.6931471805599453)
_PAGE = gl.constexpr(64)
_ROWS = gl.constexpr(64)
_LATENT = gl.constexpr(512)
_ROPE = gl.constexpr(64)
_STAGES = gl.constexpr(2)


@gluon.jit
def _bring(latent_desc, rope_desc, latents, ropes, landed, page, num_pages, page_rows, slot):
    stage = slot % _STAGES
    row = gl.where((page >= 0) & (page < num_pages), page, 0) * page_rows
    mbarrier.expect(landed.index(stage), 2 * _PAGE * (_LATENT + _ROPE))
    load_tile(latent_desc, [row, 0], landed.index(stage), latents.index(stage))
    load_tile(rope_desc, [row, _LATENT], landed.index(stage), ropes.index(stage))


@gluon.jit
def _clear_rows(latent, num_valid):
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    rows = gl.arange(0, _PAGE, gl.SliceLayout(1, LAYOUT))
    for part in gl.static_range(_LATENT // 64):
        columns = latent.slice(part * 64, 64, dim=1)
        values = columns.load(LAYOUT)
        columns.store(gl.where((rows < num_valid)[:, None], values, gl.zeros_like(values)))
    fence_async_shared()
    block_barrier()


@gluon.jit
def _bring_pages(
    latent_desc, rope_desc, latents, ropes, landed, freed, pages_ptr, lengths_ptr, request, tile, length, count,
    num_reqs, num_pages, max_pages, pages_row, page_rows,
):  # fmt: skip
    pages = (gl.minimum(length, max_pages * _PAGE) + _PAGE - 1) // _PAGE
    for slot in range(count):
        page, request, tile, pages = next_page(
            pages_ptr, lengths_ptr, num_reqs, max_pages, pages_row, request, tile, pages
        )
        mbarrier.wait(freed.index(slot % _STAGES), (slot // _STAGES & 1) ^ 1)
        _bring(latent_desc, rope_desc, latents, ropes, landed, page, num_pages, page_rows, slot)


@gluon.jit
def _score(
    q_ptr, lse_ptr, pages_ptr, lengths_ptr, stats_ptr, latents, ropes, q_latent, q_rope, shrinks, inverses, landed, scored,
    request, first_tile, length, begin, end, program, block, num_reqs, num_pages, max_pages, q_len, scale,
    q_req, q_token, q_head, pages_row,
    HEADS: gl.constexpr, CAUSAL: gl.constexpr, LSE: gl.constexpr,
):  # fmt: skip
    S: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, _PAGE, 16])
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    keys = gl.arange(0, _PAGE, gl.SliceLayout(0, S))
    rows = gl.arange(0, _ROWS, gl.SliceLayout(1, S))
    at = begin
    while at < end:
        last_key = gl.minimum(length, max_pages * _PAGE)
        item_tiles = gl.maximum((last_key + _PAGE - 1) // _PAGE, 1)
        count = gl.minimum(item_tiles - first_tile, end - at)
        has_pages = (last_key + _PAGE - 1) // _PAGE - first_tile
        row_pages = pages_ptr + request.to(gl.int64) * pages_row + first_tile
        page = gl.load(row_pages, mask=has_pages > 0, other=-1)
        wide_rows = block * _ROWS + gl.arange(0, _ROWS, gl.SliceLayout(1, WIDE))
        q_rows = q_ptr + request.to(gl.int64) * q_req + wide_rows // HEADS * q_token + wide_rows % HEADS * q_head
        live = (wide_rows < q_len * HEADS)[:, None]
        at_dims = q_rows[:, None] + gl.arange(0, 64, gl.SliceLayout(0, WIDE))[None, :]
        block_barrier()
        for part in gl.static_range(8):
            q_latent.slice(part * 64, 64, dim=1).store(gl.load(at_dims + part * 64, mask=live, other=0.0))
        q_rope.store(gl.load(at_dims + 512, mask=live, other=0.0))
        fence_async_shared()
        block_barrier()
        limit = gl.zeros([_ROWS], gl.int32, gl.SliceLayout(1, S)) + last_key
        if CAUSAL:
            limit = gl.minimum(limit, length - q_len + 1 + (block * _ROWS + rows) // HEADS)
        top = gl.full([_ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, S))
        total = gl.zeros([_ROWS], gl.float32, gl.SliceLayout(1, S))
        slot = at - begin
        start = first_tile * _PAGE
        for tile in range(count):
            next_page = gl.load(row_pages + tile + 1, mask=tile + 1 < has_pages, other=-1)
            there = (page >= 0) & (page < num_pages)
            stage = slot % _STAGES
            latent = latents.index(stage)
            rope = ropes.index(stage)
            mbarrier.wait(landed.index(stage), slot // _STAGES & 1)
            num_valid = gl.where(there, last_key - start, 0)
            if num_valid < _PAGE:
                _clear_rows(latent, num_valid)
            s = gl.zeros([_ROWS, _PAGE], gl.float32, S)
            s = warpgroup_mma(q_latent, latent.permute((1, 0)), s, use_acc=False, is_async=True)
            s = warpgroup_mma(q_rope, rope.permute((1, 0)), s, is_async=True)
            found = warpgroup_mma_wait(0, deps=(s,))
            seen = keys[None, :] < gl.where(there, limit - start, 0)[:, None]
            found = gl.where(seen, found * scale, float("-inf"))
            new_top = gl.maximum(top, gl.max(found, 1))
            base = exp_base(new_top)
            shrink = gl.exp2(top - base)
            parts = gl.exp2(found - base[:, None])
            top = new_top
            total = total * shrink + gl.sum(parts, 1)
            block_barrier()  # every warp has read the rope: weights take its place
            rope.store(parts.to(gl.bfloat16))
            shrinks.index(stage).store(shrink)
            if tile == count - 1:
                inverses.index(stage).store(1.0 / gl.where(total == 0.0, 1.0, total))
            fence_async_shared()
            block_barrier()
            mbarrier.arrive(scored.index(stage), count=1)
            start += _PAGE
            slot += 1
            page = next_page
        if count == item_tiles:
            if LSE:
                row = block * _ROWS + rows
                lse = gl.where(total == 0.0, float("-inf"), (top + gl.log2(gl.where(total == 0.0, 1.0, total))) * _LN2)
                gl.store(lse_ptr + request.to(gl.int64) * q_len * HEADS + row, lse, mask=row < q_len * HEADS)
        else:
            place = 2 * program + gl.where(at == begin, 0, 1)
            gl.store(stats_ptr + (place * _ROWS + rows) * 2, top)
            gl.store(stats_ptr + (place * _ROWS + rows) * 2 + 1, total)
        at += count
        first_tile = first_tile * 0
        request += 1
        length = gl.load(lengths_ptr + request, mask=request < num_reqs, other=0)


@gluon.jit
def _value(
    out_ptr, lengths_ptr, parts_ptr, notes_ptr, latents, ropes, shrinks, inverses, freed, scored,
    request, first_tile, length, begin, end, groups, num_tiles, program, block, blocks, num_reqs, num_pages, max_pages, q_len,
    out_req, out_token, out_head,
    HEADS: gl.constexpr, BY_REQUEST: gl.constexpr,
):  # fmt: skip
    O: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 2], instr_shape=[16, 128, 16])
    dims = gl.arange(0, _LATENT, gl.SliceLayout(0, O))[None, :]
    rows = gl.arange(0, _ROWS, gl.SliceLayout(1, O))
    at = begin
    while at < end:
        last_key = gl.minimum(length, max_pages * _PAGE)
        item_tiles = gl.maximum((last_key + _PAGE - 1) // _PAGE, 1)
        count = gl.minimum(item_tiles - first_tile, end - at)
        note_parts(
            notes_ptr, program, block, blocks, request, at, first_tile, item_tiles, count, at == begin, at + count == end, groups,
            num_tiles, BY_REQUEST,
        )  # fmt: skip
        acc = gl.zeros([_ROWS, _LATENT], gl.float32, O)
        slot = at - begin
        inverse = gl.full([_ROWS], 1.0, gl.float32, gl.SliceLayout(1, O))
        for tile in range(count):
            stage = slot % _STAGES
            mbarrier.wait(scored.index(stage), slot // _STAGES & 1)
            shrink = shrinks.index(stage).load(gl.SliceLayout(1, O))
            acc = acc * shrink[:, None]
            adding = warpgroup_mma(ropes.index(stage), latents.index(stage), acc, is_async=True)
            if tile == count - 1:
                inverse = inverses.index(stage).load(gl.SliceLayout(1, O))
            acc = warpgroup_mma_wait(0, deps=(adding,))
            block_barrier()
            mbarrier.arrive(freed.index(stage), count=1)
            slot += 1
        if count == item_tiles:
            row = block * _ROWS + rows
            to = out_ptr + request.to(gl.int64) * out_req + row // HEADS * out_token + row % HEADS * out_head
            live = (row < q_len * HEADS)[:, None] & (dims >= 0)
            gl.store(to[:, None] + dims, (acc * inverse[:, None]).to(gl.bfloat16), mask=live)
        else:
            place = 2 * program + gl.where(at == begin, 0, 1)
            gl.store((parts_ptr + (place * _ROWS + rows) * _LATENT)[:, None] + dims, acc.to(gl.bfloat16))
        at += count
        first_tile = first_tile * 0
        request += 1
        length = gl.load(lengths_ptr + request, mask=request < num_reqs, other=0)


@gluon.jit(do_not_specialize=["num_reqs", "num_pages", "max_pages", "q_len", "pages_row", "page_rows"])
def latent_wide_kernel(
    latent_desc, rope_desc, q_ptr, out_ptr, lse_ptr, pages_ptr, lengths_ptr, parts_ptr, stats_ptr, notes_ptr,
    num_reqs, num_pages, max_pages, q_len, scale,
    q_req, q_token, q_head, out_req, out_token, out_head, pages_row, page_rows,
    REQS: gl.constexpr, HEADS: gl.constexpr, CAUSAL: gl.constexpr, LSE: gl.constexpr, SCORE_REGS: gl.constexpr,
    BY_REQUEST: gl.constexpr,
):  # fmt: skip
    program = gl.program_id(0)
    blocks = (q_len * HEADS + _ROWS - 1) // _ROWS
    block = program % blocks
    ends = request_tiles(lengths_ptr, num_reqs, max_pages, REQS)
    num_tiles = gl.max(ends, 0)
    groups = num_sharers(gl.num_programs(0) // blocks, num_tiles)
    begin = begin_of(program // blocks, groups, num_tiles)
    end = begin_of(program // blocks + 1, groups, num_tiles)
    if begin < end:
        latents = gl.allocate_shared_memory(gl.bfloat16, [_STAGES, _PAGE, _LATENT], latent_desc.layout)
        ropes = gl.allocate_shared_memory(gl.bfloat16, [_STAGES, _PAGE, _ROPE], rope_desc.layout)
        q_latent = gl.allocate_shared_memory(gl.bfloat16, [_ROWS, 512], latent_desc.layout)
        q_rope = gl.allocate_shared_memory(gl.bfloat16, [_ROWS, 64], rope_desc.layout)
        shrinks = gl.allocate_shared_memory(gl.float32, [_STAGES, _ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        inverses = gl.allocate_shared_memory(gl.float32, [_STAGES, _ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        landed = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
        scored = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
        freed = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
        for ring in gl.static_range(_STAGES):
            mbarrier.init(freed.index(ring), count=1)
            mbarrier.init(landed.index(ring), count=1)
            mbarrier.init(scored.index(ring), count=1)
        fence_async_shared()
        block_barrier()
        request, request_tile, _ = request_of(ends, begin)
        tile = begin - request_tile
        length = gl.load(lengths_ptr + request, mask=request < num_reqs, other=0)
        gl.warp_specialize(
            [
                (
                    _value,
                    (
                        out_ptr, lengths_ptr, parts_ptr, notes_ptr, latents, ropes, shrinks, inverses,
                        freed, scored, request, tile, length, begin, end, groups, num_tiles, program, block, blocks,
                        num_reqs, num_pages, max_pages, q_len, out_req, out_token, out_head, HEADS, BY_REQUEST,
                    ),
                ),
                (
                    _score,
                    (
                        q_ptr, lse_ptr, pages_ptr, lengths_ptr, stats_ptr, latents, ropes, q_latent, q_rope, shrinks, inverses,
                        landed, scored, request, tile, length, begin, end, program, block, num_reqs, num_pages, max_pages, q_len,
                        scale, q_req, q_token, q_head, pages_row, HEADS, CAUSAL, LSE,
                    ),
                ),
                (
                    _bring_pages,
                    (
                        latent_desc, rope_desc, latents, ropes, landed, freed, pages_ptr, lengths_ptr, request, tile, length,
                        end - begin, num_reqs, num_pages, max_pages, pages_row, page_rows,
                    ),
                ),
            ],
            [4, 1],
            [SCORE_REGS, 40],
        )  # fmt: skip
        for ring in gl.static_range(_STAGES):
            mbarrier.invalidate(freed.index(ring))
            mbarrier.invalidate(landed.index(ring))
            mbarrier.invalidate(scored.index(ring))
    elif not BY_REQUEST:
        gl.store(notes_ptr + program * 4, 0)
