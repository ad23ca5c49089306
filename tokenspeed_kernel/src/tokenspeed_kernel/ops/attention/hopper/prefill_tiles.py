"""Device code of prefill on Hopper, in Gluon: two groups of four warps multiply what a warp of its own brings (`prefill_work`).

Each group attends 64 of a block's 128 rows. The scores of a tile of keys go through the matrix units together with the values of
the tile before, whose products run on while the softmax is computed; the groups drift apart by themselves until one multiplies
while the other does not. Weights stay in registers from one product to the next. A program takes its blocks one after the other:
the first tiles of the next are in shared memory by the time that the results of the last are written.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait

from tokenspeed_kernel.ops.attention.hopper.prefill_work import block_at, bring_tiles, taken_block
from tokenspeed_kernel.ops.gluon_names import block_barrier, store_tile, view_as, wait_stores

__all__ = ["prefill_kernel"]

_LOG2E = gl.constexpr(1.4426950408889634)
_LN2 = gl.constexpr(0.6931471805599453)


@gluon.jit
def _exp_base(top):
    """What is subtracted from logits: their maximum, or 0 where nothing was seen, because -inf - -inf is NaN."""
    return gl.where(top == float("-inf"), 0.0, top)


@gluon.jit
def _has_holes(pages, num_pages, begin, end):
    """Whether some page is none of the cache: its keys are masked, and then those of every tile are looked at."""
    LINE: gl.constexpr = gl.BlockedLayout([2], [32], [gl.num_warps()], [0])
    places = gl.arange(0, 256, LINE)
    bad = gl.zeros([256], gl.int32, LINE)
    for start in range(begin, end, 256):
        page = gl.load(pages + start + places, mask=start + places < end, other=0)
        bad = bad | ((page < 0) | (page >= num_pages)).to(gl.int32)
    return gl.max(bad, 0) > 0


@gluon.jit
def _logits(
    scores, start, positions, stop, pages, num_pages, scale, cap, window,
    PAGED: gl.constexpr, PAGE_SIZE: gl.constexpr, BLOCK_N: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr,
    CAP: gl.constexpr, MASK: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Cap and mask a tile of scores."""
    if CAP:
        # tanh(x) = 2 / (1 + exp(-2x)) - 1, which saturates without overflow.
        scores = cap * (2.0 / (1.0 + gl.exp2(scores * (-2.0 * _LOG2E / cap * scale))) - 1.0) * _LOG2E
    if MASK:
        keys = start + gl.arange(0, BLOCK_N, gl.SliceLayout(0, LAYOUT))
        seen = (keys < stop)[None, :]
        if PAGED:
            page = gl.load(pages + keys // PAGE_SIZE, mask=keys < stop, other=-1)
            seen = seen & ((page >= 0) & (page < num_pages))[None, :]
        if CAUSAL:
            seen = seen & (keys[None, :] <= positions[:, None])
        if WINDOW:
            seen = seen & (keys[None, :] > positions[:, None] - window)
        scores = gl.where(seen, scores, float("-inf"))
    return scores


@gluon.jit
def _softmax(scores, top, total, scale, MASK: gl.constexpr):
    """Weights of a tile, by how much earlier results shrink, and the running maximum and denominator."""
    new_top = gl.maximum(top, gl.max(scores, 1))
    base = _exp_base(new_top) if MASK else new_top
    shrink = gl.exp2((top - base) * scale)
    weights = gl.exp2(scores * scale - (base * scale)[:, None])
    return weights, shrink, new_top, total * shrink + gl.sum(weights, 1)


@gluon.jit
def _score(q_tiles, k_tiles, stage, BLOCK_N: gl.constexpr, REST: gl.constexpr, LAYOUT: gl.constexpr):
    """Start the products of queries and keys."""
    q, q_rest = q_tiles
    k, k_rest = k_tiles
    scores = gl.zeros([64, BLOCK_N], gl.float32, LAYOUT)
    scoring = warpgroup_mma(q, k.index(stage).permute((1, 0)), scores, use_acc=False, is_async=True)
    if REST:
        scoring = warpgroup_mma(q_rest, k_rest.index(stage).permute((1, 0)), scoring, is_async=True)
    return scoring


@gluon.jit
def _first_tile(
    q_tiles, k_tiles, bars, slot, start, positions, stop, pages, num_pages, scale, cap, window,
    REST: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, PAGED: gl.constexpr, PAGE_SIZE: gl.constexpr,
    CAUSAL: gl.constexpr, WINDOW: gl.constexpr, CAP: gl.constexpr, LATE: gl.constexpr, SCORES: gl.constexpr, WEIGHTS: gl.constexpr,
):  # fmt: skip
    """Weights, maximum and denominator of a block's first tile, which is the last one that it sees."""
    _q_full, k_full, _v_full, free = bars
    q, _q_rest = q_tiles
    stage = slot % STAGES
    mbarrier.wait(k_full.index(stage), slot // STAGES & 1)
    scoring = _score(q_tiles, k_tiles, stage, BLOCK_N, REST, SCORES)
    scores = warpgroup_mma_wait(0, deps=(scoring,))
    block_barrier()
    mbarrier.arrive(free.index(stage), count=1)
    scores = _logits(
        scores, start, positions, stop, pages, num_pages, scale, cap, window,
        PAGED, PAGE_SIZE, BLOCK_N, CAUSAL, WINDOW, CAP, True, SCORES,
    )  # fmt: skip
    top = gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
    total = gl.zeros([64], gl.float32, gl.SliceLayout(1, SCORES))
    parts, _shrink, top, total = _softmax(scores, top, total, 1.0 if CAP else scale, True)
    return parts if LATE else gl.convert_layout(parts.to(q.dtype), WEIGHTS), top, total


@gluon.jit
def _more_tiles(
    q_tiles, k_tiles, v_tiles, bars, turn, weights, top, total, acc, slot, tile, final,
    positions, stop, pages, num_pages, scale, cap, window,
    GROUP_ID: gl.constexpr, REST: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, PAGED: gl.constexpr,
    PAGE_SIZE: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr, CAP: gl.constexpr, MASK: gl.constexpr,
    LATE: gl.constexpr, SCORES: gl.constexpr, RESULT: gl.constexpr, WEIGHTS: gl.constexpr,
):  # fmt: skip
    """Tiles from `tile` down to `final`: scores of one while the weights of the one before it meet its values."""
    q, _q_rest = q_tiles
    q_full, k_full, v_full, free = bars
    for back in range(tile + 1 - final):
        stage = slot % STAGES
        before = (slot + STAGES - 1) % STAGES
        mbarrier.wait(k_full.index(stage), slot // STAGES & 1)
        scoring = _score(q_tiles, k_tiles, stage, BLOCK_N, REST, SCORES)
        mbarrier.wait(v_full.index(before), (slot - 1) // STAGES & 1)
        narrow = gl.convert_layout(weights.to(q.dtype), WEIGHTS) if LATE else weights
        adding = warpgroup_mma(narrow, v_tiles.index(before), acc, is_async=True)
        scores = warpgroup_mma_wait(1, deps=(scoring,))
        scores = _logits(
            scores, (tile - back) * BLOCK_N, positions, stop, pages, num_pages, scale, cap, window,
            PAGED, PAGE_SIZE, BLOCK_N, CAUSAL, WINDOW, CAP, MASK, SCORES,
        )  # fmt: skip
        parts, shrink, top, total = _softmax(scores, top, total, 1.0 if CAP else scale, MASK)
        # Passed already: it keeps the assembler from waiting for the products before it computes the softmax.
        mbarrier.wait(q_full, turn & 1)
        acc = warpgroup_mma_wait(0, deps=(adding,))
        block_barrier()  # every warp has read these keys, and the values before: their places may take others
        mbarrier.arrive(free.index(stage), count=1)
        acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, RESULT))[:, None]
        weights = parts if LATE else gl.convert_layout(parts.to(q.dtype), WEIGHTS)
        slot += 1
    return weights, top, total, acc, slot


@gluon.jit
def _store(
    out_ptr, values, first_row, row, num_rows, head, out_token, out_head,
    GROUP_ID: gl.constexpr, QUERIES: gl.constexpr, VALUE_DIM: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    rows = GROUP_ID * 64 + gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
    dims = gl.arange(0, VALUE_DIM, gl.SliceLayout(0, LAYOUT))
    query = row + rows % QUERIES
    target = (first_row + query).to(gl.int64) * out_token + (head + rows // QUERIES) * out_head
    gl.store(out_ptr + target[:, None] + dims[None, :], values, mask=(query < num_rows)[:, None] & (dims >= 0)[None, :])


@gluon.jit
def _multiply(
    q_tiles, k_tiles, v_tiles, out_tiles, taken, q_free, bars, taken_bars,
    out_desc, out_ptr, lse_ptr, sinks_ptr, cu_q_ptr, lengths_ptr, pages_ptr, num_places, num_pages, max_pages, scale, cap, window,
    out_token, out_head, pages_row,
    GROUP_ID: gl.constexpr, HEADS: gl.constexpr, PACK: gl.constexpr, REST: gl.constexpr, VALUE_DIM: gl.constexpr,
    STAGED: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, PAGED: gl.constexpr, PAGE_SIZE: gl.constexpr,
    CAUSAL: gl.constexpr, WINDOW: gl.constexpr, CAP: gl.constexpr, SINKS: gl.constexpr, LSE: gl.constexpr, LATE: gl.constexpr,
):  # fmt: skip
    """What a group of four warps does: attend 64 rows of each block to the tiles as they come, and write the results."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 16])
    RESULT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, VALUE_DIM, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=RESULT, k_width=2)
    ROW_WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // VALUE_DIM, VALUE_DIM // 8], [4, 1], [1, 0])
    q_full, _k_full, v_full, _free = bars
    q_main, q_rest = q_tiles
    q_both = (q_main.index(GROUP_ID), q_rest.index(GROUP_ID))
    DTYPE: gl.constexpr = q_main.dtype
    SWIZZLED: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    QUERIES: gl.constexpr = 128 // PACK
    BOX: gl.constexpr = min(QUERIES, 64)
    rows = GROUP_ID * 64 + gl.arange(0, 64, gl.SliceLayout(1, SCORES))
    slot = num_places * 0
    turn = num_places * 0
    count = num_places * 0
    item, request = taken_block(taken, taken_bars, count)
    while item < num_places * (HEADS // PACK):
        head, first_row, num_rows, row, _first_key, offset, stop, begin, end, full_begin, full_end = block_at(
            item, request, num_places, cu_q_ptr, lengths_ptr, max_pages * PAGE_SIZE, window,
            HEADS, PACK, BLOCK_N, PAGED, CAUSAL, WINDOW,
        )  # fmt: skip
        if row < num_rows:
            pages = pages_ptr + request.to(gl.int64) * pages_row
            query = row + rows % QUERIES
            positions = offset + query
            if PAGED:
                keys_end = gl.minimum(stop, end * BLOCK_N)
                holes = _has_holes(pages, num_pages, begin * BLOCK_N // PAGE_SIZE, (keys_end + PAGE_SIZE - 1) // PAGE_SIZE)
                full_end = gl.where(holes, full_begin, full_end)
            mbarrier.wait(q_full, turn & 1)
            weights, top, total = _first_tile(
                q_both, k_tiles, bars, slot, (end - 1) * BLOCK_N, positions, stop, pages, num_pages, scale, cap, window,
                REST, BLOCK_N, STAGES, PAGED, PAGE_SIZE, CAUSAL, WINDOW, CAP, LATE, SCORES, WEIGHTS,
            )  # fmt: skip
            acc = gl.zeros([64, VALUE_DIM], gl.float32, RESULT)
            slot += 1
            weights, top, total, acc, slot = _more_tiles(
                q_both, k_tiles, v_tiles, bars, turn, weights, top, total, acc, slot, end - 2, full_end,
                positions, stop, pages, num_pages, scale, cap, window, GROUP_ID, REST, BLOCK_N, STAGES, PAGED, PAGE_SIZE,
                CAUSAL, WINDOW, CAP, True, LATE, SCORES, RESULT, WEIGHTS,
            )  # fmt: skip
            weights, top, total, acc, slot = _more_tiles(
                q_both, k_tiles, v_tiles, bars, turn, weights, top, total, acc, slot, full_end - 1, full_begin,
                positions, stop, pages, num_pages, scale, cap, window, GROUP_ID, REST, BLOCK_N, STAGES, PAGED, PAGE_SIZE,
                CAUSAL, WINDOW, CAP, False, LATE, SCORES, RESULT, WEIGHTS,
            )  # fmt: skip
            if WINDOW:
                weights, top, total, acc, slot = _more_tiles(
                    q_both, k_tiles, v_tiles, bars, turn, weights, top, total, acc, slot, full_begin - 1, begin,
                    positions, stop, pages, num_pages, scale, cap, window, GROUP_ID, REST, BLOCK_N, STAGES, PAGED, PAGE_SIZE,
                    CAUSAL, WINDOW, CAP, True, LATE, SCORES, RESULT, WEIGHTS,
                )  # fmt: skip
            if STAGED < 2:
                mbarrier.arrive(q_free, count=1)
            turn += 1
            stage = (slot + STAGES - 1) % STAGES
            mbarrier.wait(v_full.index(stage), (slot - 1) // STAGES & 1)
            narrow = gl.convert_layout(weights.to(DTYPE), WEIGHTS) if LATE else weights
            adding = warpgroup_mma(narrow, v_tiles.index(stage), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=(adding,))
            # These values' place is given up together with the next keys: of the next block, or nobody waits for it.
            if not CAP:
                top = top * scale
            if SINKS:
                sink = gl.load(sinks_ptr + head + rows // QUERIES).to(gl.float32) * _LOG2E
                new_top = gl.maximum(top, sink)
                base = _exp_base(new_top)
                shrink = gl.exp2(top - base)
                total = total * shrink + gl.exp2(sink - base)
                acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, RESULT))[:, None]
                top = new_top
            safe = gl.where(total == 0.0, 1.0, total)
            result = (acc * gl.convert_layout(1.0 / safe, gl.SliceLayout(1, RESULT))[:, None]).to(DTYPE)
            if STAGED:
                # By way of shared memory, so that whole rows are written: by the copy engine, or by us where not all are ours.
                staged = out_tiles.index(GROUP_ID)
                if STAGED == 1:
                    wait_stores(0)
                    block_barrier()
                staged.store(result)
                fence_async_shared()
                block_barrier()
                if row + min(QUERIES, GROUP_ID * 64 + 64) <= num_rows:
                    PARTS: gl.constexpr = VALUE_DIM // 64
                    boxes = view_as(out_tiles, DTYPE, [2 * PARTS * (64 // BOX), BOX, 64], SWIZZLED)
                    for box in gl.static_range(64 // BOX):
                        first = GROUP_ID * 64 + box * BOX
                        column = (head + first // QUERIES) * out_head
                        for part in gl.static_range(PARTS):
                            source = boxes.index((GROUP_ID * PARTS + part) * (64 // BOX) + box)
                            store_tile(out_desc, [first_row + row + first % QUERIES, column + part * 64], source)
                else:
                    values = staged.load(ROW_WIDE)
                    _store(
                        out_ptr, values, first_row, row, num_rows, head, out_token, out_head, GROUP_ID, QUERIES, VALUE_DIM, ROW_WIDE
                    )  # fmt: skip
                if STAGED == 2:
                    wait_stores(0)
                    block_barrier()
                    mbarrier.arrive(q_free, count=1)
            else:
                _store(
                    out_ptr, result, first_row, row, num_rows, head, out_token, out_head, GROUP_ID, QUERIES, VALUE_DIM, RESULT
                )  # fmt: skip
            if LSE:
                lse = gl.where(total == 0.0, float("-inf"), (top + gl.log2(safe)) * _LN2)
                target = (first_row + query).to(gl.int64) * HEADS + head + rows // QUERIES
                gl.store(lse_ptr + target, lse, mask=query < num_rows)
        count += 1
        item, request = taken_block(taken, taken_bars, count)
    if STAGED:
        wait_stores(0)


@gluon.jit(
    do_not_specialize=["num_places", "num_reqs", "num_pages", "max_pages", "window", "pages_row", "k_page_rows", "v_page_rows"]
)
def prefill_kernel(
    q_desc, k_desc, v_desc, out_desc, out_ptr, lse_ptr, sinks_ptr, cu_q_ptr, lengths_ptr, pages_ptr, counters_ptr,
    num_places, num_reqs, num_pages, max_pages, scale, cap, window,
    q_head, k_head, v_head, out_token, out_head, pages_row, k_page_rows, v_page_rows,
    HEADS: gl.constexpr, GROUP: gl.constexpr, PACK: gl.constexpr, HEAD_DIM: gl.constexpr, REST: gl.constexpr,
    VALUE_DIM: gl.constexpr, STAGED: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, PAGED: gl.constexpr, PAGE_SIZE: gl.constexpr,
    CAUSAL: gl.constexpr, WINDOW: gl.constexpr, CAP: gl.constexpr, SINKS: gl.constexpr, LSE: gl.constexpr,
    LATE: gl.constexpr, REGISTERS: gl.constexpr, BRING_REGISTERS: gl.constexpr,
):  # fmt: skip
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    DTYPE: gl.constexpr = k_desc.dtype
    q_main = gl.allocate_shared_memory(DTYPE, [2, 64, HEAD_DIM], LAYOUT)
    k_main = gl.allocate_shared_memory(DTYPE, [STAGES, BLOCK_N, HEAD_DIM], LAYOUT)
    v_tiles = gl.allocate_shared_memory(DTYPE, [STAGES, BLOCK_N, VALUE_DIM], LAYOUT)
    q_rest = q_main
    k_rest = k_main
    if REST:
        q_rest = gl.allocate_shared_memory(DTYPE, [2, 64, REST], LAYOUT)
        k_rest = gl.allocate_shared_memory(DTYPE, [STAGES, BLOCK_N, REST], LAYOUT)
    out_tiles = q_main
    if STAGED == 1:
        out_tiles = gl.allocate_shared_memory(DTYPE, [2, 64, VALUE_DIM], LAYOUT)
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    q_free = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    v_raw = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    taken = gl.allocate_shared_memory(gl.int32, [4, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    taken_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    taken_free = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full, count=1)
    mbarrier.init(q_free, count=2)
    mbarrier.init(v_raw, count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(free.index(stage), count=2)
    for group in gl.static_range(2):
        mbarrier.init(taken_full.index(group), count=1)
        mbarrier.init(taken_free.index(group), count=2)
    fence_async_shared()
    block_barrier()
    q_tiles = (q_main, q_rest)
    k_tiles = (k_main, k_rest)
    bars = (q_full, k_full, v_full, free)
    taken_bars = (taken_full, taken_free)
    gl.warp_specialize(
        [
            (
                _multiply,
                (
                    q_tiles, k_tiles, v_tiles, out_tiles, taken, q_free, bars, taken_bars,
                    out_desc, out_ptr, lse_ptr, sinks_ptr, cu_q_ptr, lengths_ptr, pages_ptr, num_places, num_pages, max_pages,
                    scale, cap, window, out_token, out_head, pages_row,
                    0, HEADS, PACK, REST, VALUE_DIM, STAGED, BLOCK_N, STAGES, PAGED, PAGE_SIZE, CAUSAL, WINDOW, CAP, SINKS, LSE,
                    LATE,
                ),
            ),
            (
                _multiply,
                (
                    q_tiles, k_tiles, v_tiles, out_tiles, taken, q_free, bars, taken_bars,
                    out_desc, out_ptr, lse_ptr, sinks_ptr, cu_q_ptr, lengths_ptr, pages_ptr, num_places, num_pages, max_pages,
                    scale, cap, window, out_token, out_head, pages_row,
                    1, HEADS, PACK, REST, VALUE_DIM, STAGED, BLOCK_N, STAGES, PAGED, PAGE_SIZE, CAUSAL, WINDOW, CAP, SINKS, LSE,
                    LATE,
                ),
            ),
            (
                bring_tiles,
                (
                    q_desc, k_desc, v_desc, q_tiles, k_tiles, v_tiles, taken, q_free, bars, v_raw, taken_bars,
                    cu_q_ptr, lengths_ptr, pages_ptr, counters_ptr, num_places, num_reqs, num_pages, max_pages, window,
                    q_head, k_head, v_head, pages_row, k_page_rows, v_page_rows,
                    HEADS, GROUP, PACK, HEAD_DIM, REST, VALUE_DIM, BLOCK_N, STAGES, PAGED, PAGE_SIZE, CAUSAL, WINDOW,
                ),
            ),
        ],
        [4, 1],
        [REGISTERS, BRING_REGISTERS],
    )  # fmt: skip
