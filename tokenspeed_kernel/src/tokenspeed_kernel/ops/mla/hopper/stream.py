"""Device code of latent decoding on Hopper, in Gluon: resident programs share all pages of the batch evenly.

The pages of the batch are one sequence of tiles: request after request, in each request one block of rows (row = query * heads +
head) after the other. Program p takes a run of it as long as any other program's, whatever the lengths are; `planner` is the same
arithmetic in Python. A tile is one page, 72 KB: the copy engine brings it to shared memory while another is multiplied, and there
it is key and value at once.

With 16 rows the operands swap places (SWAP): keys, and then latent elements, lie along the 64 rows of the matrix instruction, and
query rows along its columns, of which 16 cost a quarter of 64.

Of a block that several programs share each leaves a part in the work space; `merge` puts them together.
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

__all__ = ["latent_stream_kernel"]

_LN2 = gl.constexpr(0.6931471805599453)
_PAGE = gl.constexpr(64)
_LATENT = gl.constexpr(512)
_ROPE = gl.constexpr(64)
_STAGES = gl.constexpr(2)  # pages in shared memory: one is multiplied while the other comes


@gluon.jit
def _bring_pages(
    latent_desc, rope_desc, latents, ropes, landed, freed, pages_ptr, lengths_ptr, request, tile, length, count,
    num_reqs, num_pages, max_pages, pages_row, page_rows,
):  # fmt: skip
    """What one warp does meanwhile: bring this program's tiles, one after the other, as places become free.

    A warp of its own, because a thread's fence before the products of weights waits for all that it has asked for, copies too.
    """
    request_pages = (gl.minimum(length, max_pages * _PAGE) + _PAGE - 1) // _PAGE
    for slot in range(count):
        page, request, tile, request_pages = next_page(
            pages_ptr, lengths_ptr, num_reqs, max_pages, pages_row, request, tile, request_pages
        )
        stage = slot % _STAGES
        # No page is page 0 here: its rows are taken for 0 later.
        row = gl.where((page >= 0) & (page < num_pages), page, 0) * page_rows
        # The first round of a barrier counts as over: the places are free.
        mbarrier.wait(freed.index(stage), (slot // _STAGES & 1) ^ 1)
        mbarrier.expect(landed.index(stage), 2 * _PAGE * (_LATENT + _ROPE))
        load_tile(latent_desc, [row, 0], landed.index(stage), latents.index(stage))
        load_tile(rope_desc, [row, _LATENT], landed.index(stage), ropes.index(stage))


@gluon.jit
def _load_rows(source, target, live, START: gl.constexpr, WIDTH: gl.constexpr, ROWS: gl.constexpr, LAYOUT: gl.constexpr):
    """Bring [ROWS, WIDTH] of the queries to shared memory; source points at the rows."""
    dims = START + gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT))
    target.store(gl.load(source[:, None] + dims[None, :], mask=live[:, None], other=0.0))


@gluon.jit
def _clear_rows(latent, num_valid, LAYOUT: gl.constexpr):
    """Zero the rows of a tile that are no keys: a weight of 0 times NaN would be NaN."""
    rows = gl.arange(0, _PAGE, gl.SliceLayout(1, LAYOUT))
    for part in gl.static_range(_LATENT // 64):
        columns = latent.slice(part * 64, 64, dim=1)
        values = columns.load(LAYOUT)
        columns.store(gl.where((rows < num_valid)[:, None], values, gl.zeros_like(values)))
    fence_async_shared()
    block_barrier()


@gluon.jit
def _attend(
    latent_desc, rope_desc, q_ptr, out_ptr, lse_ptr, pages_ptr, lengths_ptr, parts_ptr, stats_ptr, notes_ptr, ends, begin, end,
    groups, num_tiles, program, block, blocks, num_reqs, num_pages, max_pages, q_len, scale,
    q_req, q_token, q_head, out_req, out_token, out_head, pages_row, page_rows,
    HEADS: gl.constexpr, ROWS: gl.constexpr, CAUSAL: gl.constexpr, LSE: gl.constexpr,
    BY_REQUEST: gl.constexpr,
):  # fmt: skip
    """Take tiles [begin, end): one warp brings them, the others multiply."""
    latents = gl.allocate_shared_memory(gl.bfloat16, [_STAGES, _PAGE, _LATENT], latent_desc.layout)
    ropes = gl.allocate_shared_memory(gl.bfloat16, [_STAGES, _PAGE, _ROPE], rope_desc.layout)
    landed = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    freed = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    for ring in gl.static_range(_STAGES):
        mbarrier.init(landed.index(ring), count=1)
        mbarrier.init(freed.index(ring), count=1)
    fence_async_shared()
    block_barrier()
    # The request that tile `begin` is of, and the tile's place in it.
    request, request_tile, _ = request_of(ends, begin)
    tile = begin - request_tile
    length = gl.load(lengths_ptr + request, mask=request < num_reqs, other=0)
    gl.warp_specialize(
        [
            (
                _multiply,
                (
                    q_ptr, out_ptr, lse_ptr, pages_ptr, lengths_ptr, parts_ptr, stats_ptr, notes_ptr, latents, ropes, landed, freed,
                    request, tile, length, begin, end, groups, num_tiles, program, block, blocks, num_reqs, num_pages, max_pages,
                    q_len, scale, q_req, q_token, q_head, out_req, out_token, out_head, pages_row,
                    HEADS, ROWS, CAUSAL, LSE, BY_REQUEST,
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
        [1],
        [40],
    )  # fmt: skip
    for ring in gl.static_range(_STAGES):
        mbarrier.invalidate(landed.index(ring))
        mbarrier.invalidate(freed.index(ring))


@gluon.jit
def _multiply(
    q_ptr, out_ptr, lse_ptr, pages_ptr, lengths_ptr, parts_ptr, stats_ptr, notes_ptr, latents, ropes, landed, freed,
    request, first_tile, length, begin, end, groups, num_tiles, program, block, blocks, num_reqs, num_pages, max_pages,
    q_len, scale, q_req, q_token, q_head, out_req, out_token, out_head, pages_row,
    HEADS: gl.constexpr, ROWS: gl.constexpr, CAUSAL: gl.constexpr, LSE: gl.constexpr,
    BY_REQUEST: gl.constexpr,
):  # fmt: skip
    """Attend to tiles [begin, end) as they come, and write the results, or parts of those that others share."""
    WARPS: gl.constexpr = gl.num_warps()
    # Keys lie along the rows of the scores, latent elements along those of the result, queries along the columns of both.
    FORM: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, ROWS, 16])
    COLUMNS: gl.constexpr = gl.SliceLayout(0, FORM)
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [WARPS, 1], [1, 0])
    NARROW: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    Q_SHARED: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    q_latent = gl.allocate_shared_memory(gl.bfloat16, [ROWS, _LATENT], Q_SHARED)
    q_rope = gl.allocate_shared_memory(gl.bfloat16, [ROWS, _ROPE], Q_SHARED)
    WEIGHTS: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=2 * ROWS, element_bitwidth=16, rank=2)
    weights = gl.allocate_shared_memory(gl.bfloat16, [_PAGE, ROWS], WEIGHTS)
    keys = gl.arange(0, _PAGE, gl.SliceLayout(1, FORM))[:, None]
    dims = gl.arange(0, _LATENT, gl.SliceLayout(1, FORM))[:, None]
    rows = gl.arange(0, ROWS, COLUMNS)
    at = begin
    while at < end:
        last_key = gl.minimum(length, max_pages * _PAGE)
        item_tiles = gl.maximum((last_key + _PAGE - 1) // _PAGE, 1)
        count = gl.minimum(item_tiles - first_tile, end - at)
        has_pages = (last_key + _PAGE - 1) // _PAGE - first_tile
        row_pages = pages_ptr + request.to(gl.int64) * pages_row + first_tile
        page = gl.load(row_pages, mask=has_pages > 0, other=-1)
        q_of = q_ptr + request.to(gl.int64) * q_req
        wide_rows = block * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, WIDE))
        q_rows = q_of + wide_rows // HEADS * q_token + wide_rows % HEADS * q_head
        _load_rows(q_rows, q_latent, wide_rows < q_len * HEADS, 0, _LATENT, ROWS, WIDE)
        narrow_rows = block * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, NARROW))
        q_rows = q_of + narrow_rows // HEADS * q_token + narrow_rows % HEADS * q_head
        _load_rows(q_rows, q_rope, narrow_rows < q_len * HEADS, _LATENT, _ROPE, ROWS, NARROW)
        fence_async_shared()
        block_barrier()
        note_parts(
            notes_ptr, program, block, blocks, request, at, first_tile, item_tiles, count, at == begin, at + count == end, groups,
            num_tiles, BY_REQUEST,
        )  # fmt: skip
        # Keys that each row sees: all before this one.
        limit = gl.zeros([ROWS], gl.int32, COLUMNS) + last_key
        if CAUSAL:
            limit = gl.minimum(limit, length - q_len + 1 + (block * ROWS + rows) // HEADS)
        top = gl.full([ROWS], float("-inf"), gl.float32, COLUMNS)
        total = gl.zeros([_PAGE, ROWS], gl.float32, FORM)  # of each place in a tile: summed up when all tiles are done
        acc = gl.zeros([_LATENT, ROWS], gl.float32, FORM)
        slot = at - begin
        start = first_tile * _PAGE
        for tile in range(count):
            next_page = gl.load(row_pages + tile + 1, mask=tile + 1 < has_pages, other=-1)
            there = (page >= 0) & (page < num_pages)
            latent = latents.index(slot % _STAGES)
            rope = ropes.index(slot % _STAGES)
            mbarrier.wait(landed.index(slot % _STAGES), slot // _STAGES & 1)
            num_valid = gl.where(there, last_key - start, 0)
            if num_valid < _PAGE:
                _clear_rows(latent, num_valid, NARROW)
            scores = gl.zeros([_PAGE, ROWS], gl.float32, FORM)
            scores = warpgroup_mma(latent, q_latent.permute((1, 0)), scores, use_acc=False, is_async=True)
            scores = warpgroup_mma(rope, q_rope.permute((1, 0)), scores, is_async=True)
            found = warpgroup_mma_wait(0, deps=(scores,))
            seen = keys < gl.where(there, limit - start, 0)[None, :]
            found = gl.where(seen, found * scale, float("-inf"))
            new_top = gl.maximum(top, gl.max(found, 0))
            base = exp_base(new_top)
            shrink = gl.exp2(top - base)
            parts = gl.exp2(found - base[None, :])
            top = new_top
            weights.store(parts.to(gl.bfloat16))
            fence_async_shared()
            block_barrier()
            total = total * shrink[None, :] + parts
            acc = acc * shrink[None, :]
            adding = warpgroup_mma(latent.permute((1, 0)), weights, acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=(adding,))
            block_barrier()  # every warp has read the tile: its place may take another
            mbarrier.arrive(freed.index(slot % _STAGES), count=1)
            start += _PAGE
            slot += 1
            page = next_page
        row_total = gl.sum(total, 0)
        row = block * ROWS + rows
        if count == item_tiles:
            safe = gl.where(row_total == 0.0, 1.0, row_total)
            to = out_ptr + request.to(gl.int64) * out_req + row // HEADS * out_token + row % HEADS * out_head
            live = (row < q_len * HEADS)[None, :] & (dims >= 0)
            gl.store(to[None, :] + dims, (acc * (1.0 / safe)[None, :]).to(gl.bfloat16), mask=live)
            if LSE:
                lse = gl.where(row_total == 0.0, float("-inf"), (top + gl.log2(safe)) * _LN2)
                gl.store(lse_ptr + request.to(gl.int64) * q_len * HEADS + row, lse, mask=row < q_len * HEADS)
        else:
            # A program shares at most the first and the last of its requests with others: two places are enough.
            place = 2 * program + gl.where(at == begin, 0, 1)
            gl.store((parts_ptr + (place * ROWS + rows) * _LATENT)[None, :] + dims, acc.to(gl.bfloat16))
            gl.store(stats_ptr + (place * ROWS + rows) * 2, top)
            gl.store(stats_ptr + (place * ROWS + rows) * 2 + 1, row_total)
        at += count
        first_tile = first_tile * 0
        request += 1
        length = gl.load(lengths_ptr + request, mask=request < num_reqs, other=0)


@gluon.jit(do_not_specialize=["num_reqs", "num_pages", "max_pages", "q_len", "pages_row", "page_rows"])
def latent_stream_kernel(
    latent_desc, rope_desc, q_ptr, out_ptr, lse_ptr, pages_ptr, lengths_ptr, parts_ptr, stats_ptr, notes_ptr,
    num_reqs, num_pages, max_pages, q_len, scale,
    q_req, q_token, q_head, out_req, out_token, out_head, pages_row, page_rows,
    REQS: gl.constexpr, HEADS: gl.constexpr, ROWS: gl.constexpr, CAUSAL: gl.constexpr, LSE: gl.constexpr,
    BY_REQUEST: gl.constexpr,
):  # fmt: skip
    program = gl.program_id(0)
    blocks = (q_len * HEADS + ROWS - 1) // ROWS
    ends = request_tiles(lengths_ptr, num_reqs, max_pages, REQS)
    num_tiles = gl.max(ends, 0)
    groups = num_sharers(gl.num_programs(0) // blocks, num_tiles)
    begin = begin_of(program // blocks, groups, num_tiles)
    end = begin_of(program // blocks + 1, groups, num_tiles)
    if begin < end:
        _attend(
            latent_desc, rope_desc, q_ptr, out_ptr, lse_ptr, pages_ptr, lengths_ptr, parts_ptr, stats_ptr, notes_ptr, ends,
            begin, end, groups, num_tiles, program, program % blocks, blocks, num_reqs, num_pages, max_pages, q_len, scale,
            q_req, q_token, q_head, out_req, out_token, out_head, pages_row, page_rows, HEADS, ROWS, CAUSAL, LSE,
            BY_REQUEST,
        )  # fmt: skip
    elif not BY_REQUEST:
        gl.store(notes_ptr + program * 4, 0)
