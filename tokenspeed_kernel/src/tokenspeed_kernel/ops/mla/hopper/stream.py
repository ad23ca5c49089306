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

__all__ = ["begin_of", "exp_base", "latent_stream_kernel", "owner_of", "request_tiles"]

_LN2 = gl.constexpr(0.6931471805599453)
_NO_TILE = gl.constexpr(2**30)
_PAGE = gl.constexpr(64)
_LATENT = gl.constexpr(512)
_ROPE = gl.constexpr(64)
_STAGES = gl.constexpr(2)  # pages in shared memory: one is multiplied while the other comes


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
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    reqs = gl.arange(0, REQS, layout)
    lengths = gl.load(lengths_ptr + reqs, mask=reqs < num_reqs, other=0)
    tiles = gl.maximum((gl.minimum(lengths, max_pages * _PAGE) + _PAGE - 1) // _PAGE, 1)
    return gl.associative_scan(gl.where(reqs < num_reqs, tiles, 0), 0, _plus)


@gluon.jit
def _request_of(ends, tile):
    """(request, its first tile, its number of tiles) of a tile in units of one block of rows."""
    before = ends <= tile
    request = gl.sum(before.to(gl.int32), 0)
    first = gl.max(gl.where(before, ends, 0), 0)
    return request, first, gl.min(gl.where(before, _NO_TILE, ends), 0) - first


@gluon.jit
def begin_of(program, programs, num_tiles):
    """First tile of a program: the first num_tiles % programs ones take a tile more than the others."""
    return gl.minimum(program * (num_tiles // programs) + gl.minimum(program, num_tiles % programs), num_tiles)


@gluon.jit
def owner_of(tile, programs, num_tiles):
    """The program that has a tile."""
    each = num_tiles // programs
    longer = num_tiles % programs
    border = longer * (each + 1)
    return gl.where(tile < border, tile // (each + 1), longer + (tile - border) // each)


@gluon.jit
def _next_page(pages_ptr, lengths_ptr, num_reqs, max_pages, pages_row, blocks, request, block, tile, num_pages):
    """(page of the tile that the cursor is at, and the cursor behind it): it runs ahead of the products, over all requests."""
    page = gl.load(pages_ptr + request.to(gl.int64) * pages_row + tile, mask=tile < num_pages, other=-1)
    tile += 1
    if tile >= num_pages:
        tile = tile * 0
        block += 1
        if block == blocks:
            block = block * 0
            request += 1
            length = gl.load(lengths_ptr + request, mask=request < num_reqs, other=0)
            num_pages = (gl.minimum(length, max_pages * _PAGE) + _PAGE - 1) // _PAGE
    return page, request, block, tile, num_pages


@gluon.jit
def _bring_pages(
    latent_desc, rope_desc, latents, ropes, landed, freed, pages_ptr, lengths_ptr, request, block, tile, length, count, blocks,
    num_reqs, num_pages, max_pages, pages_row, page_rows,
):  # fmt: skip
    """What one warp does meanwhile: bring this program's tiles, one after the other, as places become free.

    A warp of its own, because a thread's fence before the products of weights waits for all that it has asked for, copies too.
    """
    request_pages = (gl.minimum(length, max_pages * _PAGE) + _PAGE - 1) // _PAGE
    for slot in range(count):
        page, request, block, tile, request_pages = _next_page(
            pages_ptr, lengths_ptr, num_reqs, max_pages, pages_row, blocks, request, block, tile, request_pages
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
    latent_desc, rope_desc, q_ptr, out_ptr, lse_ptr, pages_ptr, lengths_ptr, parts_ptr, stats_ptr, ends, begin, end,
    program, blocks, num_reqs, num_pages, max_pages, q_len, scale,
    q_req, q_token, q_head, out_req, out_token, out_head, pages_row, page_rows,
    HEADS: gl.constexpr, ROWS: gl.constexpr, SWAP: gl.constexpr, CAUSAL: gl.constexpr, LSE: gl.constexpr,
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
    # The item (block of rows of a request) that tile `begin` is of, and the tile's place in it.
    request, request_tile, item_tiles = _request_of(ends * blocks, begin)
    item_tiles = item_tiles // blocks
    block = (begin - request_tile) // item_tiles
    tile = (begin - request_tile) % item_tiles
    length = gl.load(lengths_ptr + request, mask=request < num_reqs, other=0)
    gl.warp_specialize(
        [
            (
                _multiply,
                (
                    q_ptr, out_ptr, lse_ptr, pages_ptr, lengths_ptr, parts_ptr, stats_ptr, latents, ropes, landed, freed,
                    request, block, tile, length, begin, end, program, blocks, num_reqs, num_pages, max_pages, q_len, scale,
                    q_req, q_token, q_head, out_req, out_token, out_head, pages_row, HEADS, ROWS, SWAP, CAUSAL, LSE,
                ),
            ),
            (
                _bring_pages,
                (
                    latent_desc, rope_desc, latents, ropes, landed, freed, pages_ptr, lengths_ptr, request, block, tile, length,
                    end - begin, blocks, num_reqs, num_pages, max_pages, pages_row, page_rows,
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
    q_ptr, out_ptr, lse_ptr, pages_ptr, lengths_ptr, parts_ptr, stats_ptr, latents, ropes, landed, freed,
    request, block, first_tile, length, begin, end, program, blocks, num_reqs, num_pages, max_pages, q_len, scale,
    q_req, q_token, q_head, out_req, out_token, out_head, pages_row,
    HEADS: gl.constexpr, ROWS: gl.constexpr, SWAP: gl.constexpr, CAUSAL: gl.constexpr, LSE: gl.constexpr,
):  # fmt: skip
    """Attend to tiles [begin, end) as they come, and write the results, or parts of those that others share."""
    WARPS: gl.constexpr = gl.num_warps()
    GROUPS: gl.constexpr = WARPS // 4
    KEYS: gl.constexpr = 0 if SWAP else 1  # the axis of keys in the scores, and of latent elements in the result
    SCORES: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, GROUPS], instr_shape=[16, (ROWS if SWAP else _PAGE) // GROUPS, 16]
    )
    RESULT: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0],
        warps_per_cta=[WARPS, 1] if SWAP else [4, GROUPS],
        instr_shape=[16, ROWS if SWAP else _LATENT // GROUPS, 16],
    )
    SCORE_SHAPE: gl.constexpr = [_PAGE, ROWS] if SWAP else [ROWS, _PAGE]
    RESULT_SHAPE: gl.constexpr = [_LATENT, ROWS] if SWAP else [ROWS, _LATENT]
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [WARPS, 1], [1, 0])
    NARROW: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    Q_SHARED: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    q_latent = gl.allocate_shared_memory(gl.bfloat16, [ROWS, _LATENT], Q_SHARED)
    q_rope = gl.allocate_shared_memory(gl.bfloat16, [ROWS, _ROPE], Q_SHARED)
    WEIGHTS: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=min(128, 2 * SCORE_SHAPE[1]), element_bitwidth=16, rank=2)
    weights = gl.allocate_shared_memory(gl.bfloat16, SCORE_SHAPE, WEIGHTS)
    keys = gl.expand_dims(gl.arange(0, _PAGE, gl.SliceLayout(1 - KEYS, SCORES)), 1 - KEYS)
    dims = gl.expand_dims(gl.arange(0, _LATENT, gl.SliceLayout(1 - KEYS, RESULT)), 1 - KEYS)
    rows = gl.arange(0, ROWS, gl.SliceLayout(KEYS, SCORES))
    out_rows = gl.arange(0, ROWS, gl.SliceLayout(KEYS, RESULT))
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
        # Keys that each row sees: all before this one.
        limit = gl.zeros([ROWS], gl.int32, gl.SliceLayout(KEYS, SCORES)) + last_key
        if CAUSAL:
            limit = gl.minimum(limit, length - q_len + 1 + (block * ROWS + rows) // HEADS)
        top = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(KEYS, SCORES))
        total = gl.zeros(SCORE_SHAPE, gl.float32, SCORES)  # of each place in a tile: summed up when all tiles are done
        acc = gl.zeros(RESULT_SHAPE, gl.float32, RESULT)
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
            scores = gl.zeros(SCORE_SHAPE, gl.float32, SCORES)
            if SWAP:
                scores = warpgroup_mma(latent, q_latent.permute((1, 0)), scores, use_acc=False, is_async=True)
                scores = warpgroup_mma(rope, q_rope.permute((1, 0)), scores, is_async=True)
            else:
                scores = warpgroup_mma(q_latent, latent.permute((1, 0)), scores, use_acc=False, is_async=True)
                scores = warpgroup_mma(q_rope, rope.permute((1, 0)), scores, is_async=True)
            found = warpgroup_mma_wait(0, deps=(scores,))
            seen = keys < gl.expand_dims(gl.where(there, limit - start, 0), KEYS)
            found = gl.where(seen, found * scale, float("-inf"))
            new_top = gl.maximum(top, gl.max(found, KEYS))
            base = exp_base(new_top)
            shrink = gl.exp2(top - base)
            parts = gl.exp2(found - gl.expand_dims(base, KEYS))
            top = new_top
            weights.store(parts.to(gl.bfloat16))
            fence_async_shared()
            block_barrier()
            total = total * gl.expand_dims(shrink, KEYS) + parts
            acc = acc * gl.expand_dims(gl.convert_layout(shrink, gl.SliceLayout(KEYS, RESULT)), KEYS)
            if SWAP:
                adding = warpgroup_mma(latent.permute((1, 0)), weights, acc, is_async=True)
            else:
                adding = warpgroup_mma(weights, latent, acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=(adding,))
            block_barrier()  # every warp has read the tile: its place may take another
            mbarrier.arrive(freed.index(slot % _STAGES), count=1)
            start += _PAGE
            slot += 1
            page = next_page
        row_total = gl.sum(total, KEYS)
        if count == item_tiles:
            row = block * ROWS + out_rows
            safe = gl.where(row_total == 0.0, 1.0, row_total)
            inverse = gl.convert_layout(1.0 / safe, gl.SliceLayout(KEYS, RESULT))
            to = out_ptr + request.to(gl.int64) * out_req + row // HEADS * out_token + row % HEADS * out_head
            live = gl.expand_dims(row < q_len * HEADS, KEYS) & (dims >= 0)
            gl.store(gl.expand_dims(to, KEYS) + dims, (acc * gl.expand_dims(inverse, KEYS)).to(gl.bfloat16), mask=live)
            if LSE:
                row = block * ROWS + rows
                lse = gl.where(row_total == 0.0, float("-inf"), (top + gl.log2(safe)) * _LN2)
                gl.store(lse_ptr + request.to(gl.int64) * q_len * HEADS + row, lse, mask=row < q_len * HEADS)
        else:
            # A program shares at most the first and the last of its items with others: two places are enough.
            place = 2 * program + gl.where(at == begin, 0, 1)
            gl.store(gl.expand_dims(parts_ptr + (place * ROWS + out_rows) * _LATENT, KEYS) + dims, acc)
            gl.store(stats_ptr + (place * ROWS + rows) * 2, top)
            gl.store(stats_ptr + (place * ROWS + rows) * 2 + 1, row_total)
        at += count
        first_tile = first_tile * 0
        block += 1
        if block == blocks:
            block = block * 0
            request += 1
            length = gl.load(lengths_ptr + request, mask=request < num_reqs, other=0)


@gluon.jit(do_not_specialize=["num_reqs", "num_pages", "max_pages", "q_len", "pages_row", "page_rows"])
def latent_stream_kernel(
    latent_desc, rope_desc, q_ptr, out_ptr, lse_ptr, pages_ptr, lengths_ptr, parts_ptr, stats_ptr,
    num_reqs, num_pages, max_pages, q_len, scale,
    q_req, q_token, q_head, out_req, out_token, out_head, pages_row, page_rows,
    REQS: gl.constexpr, HEADS: gl.constexpr, ROWS: gl.constexpr, SWAP: gl.constexpr, CAUSAL: gl.constexpr, LSE: gl.constexpr,
):  # fmt: skip
    program = gl.program_id(0)
    blocks = (q_len * HEADS + ROWS - 1) // ROWS
    ends = request_tiles(lengths_ptr, num_reqs, max_pages, REQS)
    num_tiles = gl.max(ends, 0) * blocks
    programs = gl.minimum(gl.num_programs(0), num_tiles)
    begin = begin_of(program, programs, num_tiles)
    end = begin_of(program + 1, programs, num_tiles)
    if begin < end:
        _attend(
            latent_desc, rope_desc, q_ptr, out_ptr, lse_ptr, pages_ptr, lengths_ptr, parts_ptr, stats_ptr, ends, begin, end,
            program, blocks, num_reqs, num_pages, max_pages, q_len, scale,
            q_req, q_token, q_head, out_req, out_token, out_head, pages_row, page_rows, HEADS, ROWS, SWAP, CAUSAL, LSE,
        )  # fmt: skip
