"""Device code of prefill on Hopper: what a program works on, and the warp that brings it to shared memory.

A block is 128 rows: QUERIES queries of each of PACK heads that share a key head, one head after the other, so that a request with
few queries does not leave most rows idle. Blocks are dealt over the requests without any host knowledge of their lengths: request r
owns the places from cu_seqlens_q[r] // QUERIES + r on, which leaves at most one place idle for each request. The last of a request
comes first: under a causal mask it is the longest.

Programs are resident, and each takes the next block when it is done with one: dealt beforehand, some would have a ninth more than
others. The warp that brings tiles takes blocks ahead of the others and tells them. The last program to end sets the counters to 0
again, so that the next launch finds them as this one did.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from tokenspeed_kernel.ops.gluon_names import block_barrier, load_tile, view_as

__all__ = ["block_at", "bring_tiles", "taken_block"]

_ROWS = gl.constexpr(128)  # of a block: 64 for each of two groups of warps
_NOWHERE = gl.constexpr(1 << 30)  # a row behind the last of any cache: the copy engine brings zeros


@gluon.jit
def _request_at(place, cu_q_ptr, num_reqs, QUERIES: gl.constexpr):
    """The request that owns a place."""
    request = place * 0
    high = num_reqs
    while high - request > 1:
        middle = (request + high) // 2
        below = gl.load(cu_q_ptr + middle) // QUERIES + middle <= place
        request = gl.where(below, middle, request)
        high = gl.where(below, high, middle)
    return request


@gluon.jit
def _tell_block(taken, bars, turn, item, request):
    """Leave a block for the groups that multiply: its number and its request."""
    full, free = bars
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    place = turn & 1
    mbarrier.wait(free.index(place), turn // 2 & 1 ^ 1)
    taken.index(2 * place).store(gl.full([1], item, gl.int32, LINE))
    taken.index(2 * place + 1).store(gl.full([1], request, gl.int32, LINE))
    block_barrier()
    mbarrier.arrive(full.index(place), count=1)


@gluon.jit
def taken_block(taken, bars, turn):
    """The block that `bring_tiles` took: its number and its request."""
    full, free = bars
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    place = turn & 1
    mbarrier.wait(full.index(place), turn // 2 & 1)
    item = gl.max(taken.index(2 * place).load(LINE), 0)
    request = gl.max(taken.index(2 * place + 1).load(LINE), 0)
    block_barrier()
    mbarrier.arrive(free.index(place), count=1)
    return item, request


@gluon.jit
def block_at(
    item, request, num_places, cu_q_ptr, lengths_ptr, max_keys, window,
    HEADS: gl.constexpr, PACK: gl.constexpr, BLOCK_N: gl.constexpr, PAGED: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr,
):  # fmt: skip
    """Where a block lies, and which tiles of keys it sees.

    Returns:
        first head, the request's first row of all queries, its number of rows, the block's first among those (behind the
        last: there is nothing to do), the request's first key, the position of its first query, its number of keys; then tiles:
        [begin, end) are seen by some row, of which [full_begin, full_end) by all rows wholly. There is at least one,
        for the results'
        sake, and the last one is never among the full ones.
    """
    QUERIES: gl.constexpr = _ROWS // PACK
    head = item % (HEADS // PACK) * PACK
    place = num_places - 1 - item // (HEADS // PACK)
    first_row = gl.load(cu_q_ptr + request)
    num_rows = gl.load(cu_q_ptr + request + 1) - first_row
    row = (place - first_row // QUERIES - request) * QUERIES
    if PAGED:
        first_key = request * 0
        length = gl.load(lengths_ptr + request)
    else:
        first_key = gl.load(lengths_ptr + request)
        length = gl.load(lengths_ptr + request + 1) - first_key
    offset = length - num_rows
    stop = gl.minimum(length, max_keys)
    last = stop
    full = stop
    if CAUSAL:
        last = gl.minimum(stop, offset + gl.minimum(row + QUERIES, num_rows))
        full = gl.minimum(stop, offset + row + 1)
    first = length * 0
    full_first = length * 0
    if WINDOW:
        first = gl.maximum(0, offset + row - window + 1)
        full_first = gl.maximum(0, offset + row + QUERIES - window)
    begin = first // BLOCK_N
    end = gl.maximum((last + BLOCK_N - 1) // BLOCK_N, begin + 1)
    full_end = gl.minimum(gl.maximum(gl.maximum(full, 0) // BLOCK_N, begin), end - 1)
    full_begin = gl.minimum((full_first + BLOCK_N - 1) // BLOCK_N, full_end)
    return head, first_row, num_rows, row, first_key, offset, stop, begin, end, full_begin, full_end


@gluon.jit
def _pages_of(
    pages, tile, stop, num_pages, BLOCK_N: gl.constexpr, BOX: gl.constexpr, PAGE_SIZE: gl.constexpr, PAGED: gl.constexpr
):  # fmt: skip
    """Lane i's is the page of box i of a tile of keys; -1 where there is none, or none of the cache.

    They are asked for together, one tile ahead: one after the other they would take as long as the products.
    """
    boxes = gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))
    if PAGED:
        key = tile * BLOCK_N + boxes * BOX
        there = (boxes < BLOCK_N // BOX) & (key >= 0) & (key < stop)
        page = gl.load(pages + key // PAGE_SIZE, mask=there, other=-1)
        boxes = gl.where((page >= 0) & (page < num_pages), page, -1)
    return boxes


@gluon.jit
def _load_boxes(
    desc, boxes, landed, found, first, column, stage, page_rows,
    PARTS: gl.constexpr, BOX: gl.constexpr, BOXES: gl.constexpr, PAGE_SIZE: gl.constexpr, PAGED: gl.constexpr,
):  # fmt: skip
    """Bring a tile from key `first` on (ragged: row) in boxes of BOX rows and 64 elements.

    Shared memory holds all rows of 64 elements, then those of the next.
    """
    lanes = gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))
    for box in gl.static_range(BOXES):
        source = first + box * BOX
        if PAGED:
            page = gl.max(gl.where(lanes == box, found, -1), 0)
            # No page, or none of the cache: zeros, because NaN may lie in any other.
            source = gl.where(page >= 0, page * page_rows + source % PAGE_SIZE, _NOWHERE)
        for part in gl.static_range(PARTS):
            load_tile(desc, [source, column + part * 64], landed, boxes.index((stage * PARTS + part) * BOXES + box))


@gluon.jit
def _clear_rows(chunks, stage, valid, BLOCK_N: gl.constexpr, PARTS: gl.constexpr):
    """Zero rows from `valid` on of a tile of values: a weight of 0 times NaN would be NaN."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0])
    CHUNKS: gl.constexpr = BLOCK_N // 8
    rows = gl.arange(0, 8, gl.SliceLayout(1, LAYOUT))
    for chunk in range(valid // 8, CHUNKS):
        keep = (rows + chunk * 8 < valid)[:, None]
        for part in gl.static_range(PARTS):
            place = chunks.index((stage * PARTS + part) * CHUNKS + chunk)
            values = place.load(LAYOUT)
            place.store(gl.where(keep, values, gl.zeros_like(values)))
    fence_async_shared()


@gluon.jit
def bring_tiles(
    q_desc, k_desc, v_desc, q_tiles, k_tiles, v_tiles, taken, q_free, bars, v_raw, taken_bars,
    cu_q_ptr, lengths_ptr, pages_ptr, counters_ptr, num_places, num_reqs, num_pages, max_pages, window,
    q_head, k_head, v_head, pages_row, k_page_rows, v_page_rows,
    HEADS: gl.constexpr, GROUP: gl.constexpr, PACK: gl.constexpr, HEAD_DIM: gl.constexpr, REST: gl.constexpr,
    VALUE_DIM: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, PAGED: gl.constexpr, PAGE_SIZE: gl.constexpr,
    CAUSAL: gl.constexpr,
    WINDOW: gl.constexpr,
):  # fmt: skip
    """What one warp does: bring queries, keys and values, in the order in which they are used, as places become free.

    A round of `free` ends when both groups have done with a tile's keys and with the values of the tile before.
    """
    BOX: gl.constexpr = min(PAGE_SIZE, BLOCK_N) if PAGED else BLOCK_N
    BOXES: gl.constexpr = BLOCK_N // BOX
    PARTS: gl.constexpr = HEAD_DIM // 64
    V_PARTS: gl.constexpr = VALUE_DIM // 64
    DTYPE: gl.constexpr = k_desc.dtype
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    q_full, k_full, v_full, free = bars
    q_main, q_rest = q_tiles
    k_main, k_rest = k_tiles
    QUERIES: gl.constexpr = _ROWS // PACK
    Q_BOX: gl.constexpr = min(QUERIES, 64)
    IN_GROUP: gl.constexpr = 64 // Q_BOX
    q_boxes = view_as(q_main, DTYPE, [2 * PARTS * IN_GROUP, Q_BOX, 64], LAYOUT)
    k_boxes = view_as(k_main, DTYPE, [STAGES * PARTS * BOXES, BOX, 64], LAYOUT)
    v_boxes = view_as(v_tiles, DTYPE, [STAGES * V_PARTS * BOXES, BOX, 64], LAYOUT)
    v_chunks = view_as(v_tiles, DTYPE, [STAGES * V_PARTS * (BLOCK_N // 8), 8, 64], LAYOUT)
    if REST:
        q_rest_boxes = view_as(q_rest, DTYPE, [2 * IN_GROUP, Q_BOX, 64], LAYOUT)
        k_rest_boxes = view_as(k_rest, DTYPE, [STAGES * BOXES, BOX, 64], LAYOUT)
    slot = num_reqs * 0
    turn = num_reqs * 0
    cleared = num_reqs * 0
    item = gl.program_id(0)
    count = num_reqs * 0
    while item < num_places * (HEADS // PACK):
        # Asked for now, it is there when it is needed.
        next_item = gl.atomic_add(counters_ptr, 1, sem="relaxed") + gl.num_programs(0)
        request = _request_at(num_places - 1 - item // (HEADS // PACK), cu_q_ptr, num_reqs, QUERIES)
        _tell_block(taken, taken_bars, count, item, request)
        count += 1
        head, first_row, num_rows, row, first_key, _offset, stop, begin, end, _full_begin, _full_end = block_at(
            item, request, num_places, cu_q_ptr, lengths_ptr, max_pages * PAGE_SIZE, window,
            HEADS, PACK, BLOCK_N, PAGED, CAUSAL, WINDOW,
        )  # fmt: skip
        if row < num_rows:
            pages = pages_ptr + request.to(gl.int64) * pages_row
            k_column = head // GROUP * k_head
            v_column = head // GROUP * v_head
            coming = _pages_of(pages, end - 1, stop, num_pages, BLOCK_N, BOX, PAGE_SIZE, PAGED)
            mbarrier.wait(q_free, turn & 1 ^ 1)
            mbarrier.expect(q_full, _ROWS * (HEAD_DIM + REST) * 2)
            for box in gl.static_range(_ROWS // Q_BOX):
                source = first_row + row + box * Q_BOX % QUERIES
                column = (head + box * Q_BOX // QUERIES) * q_head
                for part in gl.static_range(PARTS):
                    place = q_boxes.index((box // IN_GROUP * PARTS + part) * IN_GROUP + box % IN_GROUP)
                    load_tile(q_desc, [source, column + part * 64], q_full, place)
                if REST:
                    load_tile(q_desc, [source, column + HEAD_DIM], q_full, q_rest_boxes.index(box))
            turn += 1
            for back in range(end - begin):
                tile = end - 1 - back
                stage = slot % STAGES
                found = coming
                coming = _pages_of(pages, tile - 1, stop, num_pages, BLOCK_N, BOX, PAGE_SIZE, PAGED)
                # The first round of a barrier counts as over: the places are free.
                mbarrier.wait(free.index(stage), slot // STAGES & 1 ^ 1)
                mbarrier.expect(k_full.index(stage), BLOCK_N * (HEAD_DIM + REST) * 2)
                _load_boxes(
                    k_desc, k_boxes, k_full.index(stage), found, first_key + tile * BLOCK_N, k_column, stage, k_page_rows,
                    PARTS, BOX, BOXES, PAGE_SIZE, PAGED,
                )  # fmt: skip
                if REST:
                    _load_boxes(
                        k_desc, k_rest_boxes, k_full.index(stage), found, first_key + tile * BLOCK_N, k_column + HEAD_DIM, stage,
                        k_page_rows, 1, BOX, BOXES, PAGE_SIZE, PAGED,
                    )  # fmt: skip
                valid = stop - tile * BLOCK_N
                mbarrier.wait(free.index((slot + 1) % STAGES), (slot + 1) // STAGES & 1 ^ 1)
                if valid >= BLOCK_N:
                    mbarrier.expect(v_full.index(stage), BLOCK_N * VALUE_DIM * 2)
                    _load_boxes(
                        v_desc, v_boxes, v_full.index(stage), found, first_key + tile * BLOCK_N, v_column, stage, v_page_rows,
                        V_PARTS, BOX, BOXES, PAGE_SIZE, PAGED,
                    )  # fmt: skip
                else:
                    # Rows that are no keys of this request: whatever lies there is replaced before the others see the tile.
                    mbarrier.expect(v_raw, BLOCK_N * VALUE_DIM * 2)
                    _load_boxes(
                        v_desc, v_boxes, v_raw, found, first_key + tile * BLOCK_N, v_column, stage, v_page_rows,
                        V_PARTS, BOX, BOXES, PAGE_SIZE, PAGED,
                    )  # fmt: skip
                    mbarrier.wait(v_raw, cleared & 1)
                    cleared += 1
                    _clear_rows(v_chunks, stage, gl.maximum(valid, 0), BLOCK_N, V_PARTS)
                    block_barrier()
                    mbarrier.arrive(v_full.index(stage), count=1)
                slot += 1
        item = next_item
    _tell_block(taken, taken_bars, count, item, item)
    if gl.atomic_add(counters_ptr + 1, 1) == gl.num_programs(0) - 1:
        gl.store(counters_ptr, 0)
        gl.store(counters_ptr + 1, 0)
