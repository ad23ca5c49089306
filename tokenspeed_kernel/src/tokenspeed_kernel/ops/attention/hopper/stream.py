"""Device code of paged decoding on Hopper: one launch of resident programs that share all keys of the batch evenly.

The keys of the batch are one sequence of equal tiles: request after request, in each request one block of key heads after the
other. Program p takes tiles [p T / P, (p + 1) T / P) of it, whatever the lengths are; `planner.shares` is the same arithmetic in
Python. A program that has all tiles of an item (one block of heads of one request) writes its result. Of an item that several
programs share, each leaves a part in the work space, and the last one to arrive merges them: no second launch.

A tile is a batch of lanes, one for each warp: ``HEADS`` key heads times ``CHUNKS`` runs of ``BLOCK_N`` keys. A warp multiplies its
own keys with the rows of its own head and keeps its own softmax, so that no warp waits for another within a tile, and a lane's keys
lie in one page: one entry of the page table for all of them.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

__all__ = ["decode_stream_kernel"]

_LOG2E = tl.constexpr(1.4426950408889634)
_LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _exp_base(top):
    """What is subtracted from logits: their maximum, or 0 where nothing was seen, because -inf - -inf is NaN."""
    return tl.where(top == float("-inf"), 0.0, top)


@triton.jit
def _item_tiles(length, max_keys, window, TILE: tl.constexpr, WINDOW: tl.constexpr):
    """Tiles of each item of a request, as in `planner.item_tiles`."""
    tiles = tl.cdiv(tl.minimum(length, max_keys), TILE)
    if WINDOW:
        tiles -= tl.maximum(0, length - window) // TILE
    return tl.maximum(tiles, 1)


@triton.jit
def _attend_tile(
    q, top, total, acc, page, start, chunk, k_ptr, v_ptr, first_key, last_key, num_pages,
    k_page, k_token, v_page, v_token, scale, cap,
    PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """Add one tile to each lane's softmax. k_ptr and v_ptr point at the lane's head, page is the lane's."""
    first = start + chunk * BLOCK_N
    places = tl.arange(0, BLOCK_N)[None, :, None]
    dims = tl.arange(0, HEAD_DIM)[None, None, :]
    keys = first + places
    # What is not seen is not read: NaN may lie there, or no page at all.
    valid = (keys >= first_key) & (keys < tl.where((page >= 0) & (page < num_pages), last_key, 0))
    # A page or a token times its stride passes 2**31 elements in a large pool.
    page, in_page, places = page.to(tl.int64), (first % PAGE_SIZE).to(tl.int64), places.to(tl.int64)
    k = tl.load(k_ptr + (page * k_page + in_page * k_token) + places * k_token + dims, mask=valid, other=0.0)
    v = tl.load(v_ptr + (page * v_page + in_page * v_token) + places * v_token + dims, mask=valid, other=0.0)
    logits = tl.dot(q, tl.permute(k, (0, 2, 1)), input_precision="ieee") * scale
    if CAP:
        # tanh(x) = 2 / (1 + exp(-2x)) - 1, which saturates without overflow.
        logits = cap * (2.0 / (1.0 + tl.exp2(logits * (-2.0 * _LOG2E / cap))) - 1.0) * _LOG2E
    seen = tl.permute(valid, (0, 2, 1))
    logits = tl.where(seen, logits, float("-inf"))
    new_top = tl.maximum(top, tl.max(logits, 2))
    base = _exp_base(new_top)
    shrink = tl.exp2(top - base)
    weights = tl.exp2(logits - base[:, :, None])
    total = total * shrink + tl.sum(weights, 2)
    acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, :, None], input_precision="ieee")
    return new_top, total, acc


@triton.jit
def _store_rows(
    acc, top, total, head, live, request, out_ptr, lse_ptr, sinks_ptr, out_token, out_head, num_heads,
    HEAD_DIM: tl.constexpr, SINKS: tl.constexpr, LSE: tl.constexpr,
):  # fmt: skip
    """Divide rows [R, D] by their denominators [R, 1] and write them. A row without any term gives 0 and -inf."""
    if SINKS:
        sink = tl.load(sinks_ptr + head, mask=live, other=float("-inf")).to(tl.float32) * _LOG2E
        new_top = tl.maximum(top, sink)
        base = _exp_base(new_top)
        shrink = tl.exp2(top - base)
        total = total * shrink + tl.exp2(sink - base)
        acc = acc * shrink
        top = new_top
    empty = total == 0.0
    total = tl.where(empty, 1.0, total)
    rows = out_ptr + request * out_token + head * out_head + tl.arange(0, HEAD_DIM)[None, :]
    tl.store(rows, (acc / total).to(out_ptr.dtype.element_ty), mask=live)
    if LSE:
        lse = tl.where(empty, float("-inf"), (top + tl.log2(total)) * _LN2)
        tl.store(lse_ptr + request * num_heads + head, lse, mask=live)


@triton.jit(do_not_specialize=["num_reqs", "num_pages", "max_pages", "window", "pages_row", "min_tiles"])
def decode_stream_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, sinks_ptr, pages_ptr, lengths_ptr, parts_ptr, stats_ptr, arrivals_ptr,
    num_reqs, num_pages, max_pages, scale, cap, window, min_tiles,
    q_token, q_head, k_page, k_token, k_head, v_page, v_token, v_head, out_token, out_head, pages_row,
    REQS: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr,
    HEADS: tl.constexpr, CHUNKS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ROWS: tl.constexpr,
    PARTS: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, SINKS: tl.constexpr, LSE: tl.constexpr,
    WIDE: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    LANES: tl.constexpr = HEADS * CHUNKS
    TILE: tl.constexpr = CHUNKS * BLOCK_N
    ROW_BLOCKS: tl.constexpr = (GROUP + BLOCK_M - 1) // BLOCK_M
    BLOCKS: tl.constexpr = KV_HEADS // HEADS * ROW_BLOCKS
    KEPT: tl.constexpr = BLOCK_M if GROUP > BLOCK_M // 2 else BLOCK_M // 2  # rows of a lane after its last tile
    # This program's tiles. Every request has at least one, so that one without keys gets its result too.
    reqs = tl.arange(0, REQS)
    lengths = tl.load(lengths_ptr + reqs, mask=reqs < num_reqs, other=0)
    tiles = tl.where(reqs < num_reqs, _item_tiles(lengths, max_pages * PAGE_SIZE, window, TILE, WINDOW), 0)
    ends = tl.cumsum(tiles, 0)
    num_tiles = tl.sum(tiles, 0) * BLOCKS
    # 64-bit division takes long before the first key is asked for.
    program = tl.program_id(0)
    programs = tl.maximum(1, tl.minimum(tl.num_programs(0), num_tiles // min_tiles))
    if WIDE:
        num_tiles, program = num_tiles.to(tl.int64), program.to(tl.int64)
    begin = (program * num_tiles // programs).to(tl.int32)
    end = tl.where(program < programs, ((program + 1) * num_tiles // programs).to(tl.int32), begin)
    lane = tl.arange(0, LANES)
    chunk = (lane // HEADS)[:, None, None]
    dims = tl.arange(0, HEAD_DIM)
    at = begin
    while at < end:
        # The item that tile `at` is of, and the run of its tiles that is this program's. One sum tells how many requests lie before
        # it (in the upper half) and how many tiles they have.
        before = tl.sum(tl.where(ends * BLOCKS <= at, tiles.to(tl.int64) + 2**32, 0), 0)
        request = (before >> 32).to(tl.int32)
        length = tl.load(lengths_ptr + request)
        item_tiles = _item_tiles(length, max_pages * PAGE_SIZE, window, TILE, WINDOW)
        inside = at - before.to(tl.int32) * BLOCKS
        block = inside // item_tiles
        tile = inside % item_tiles
        count = tl.minimum(item_tiles - tile, end - at)
        first_key, last_key = 0, tl.minimum(length, max_pages * PAGE_SIZE)
        if WINDOW:
            first_key = tl.maximum(0, length - window)
        kv_first = (block // ROW_BLOCKS) * HEADS
        row_first = (block % ROW_BLOCKS) * BLOCK_M
        kv_head = (kv_first + lane % HEADS)[:, None, None]
        row = row_first + tl.arange(0, BLOCK_M)[None, :, None]
        request = request.to(tl.int64)
        row_pages = pages_ptr + request * pages_row
        start = (first_key // TILE + tile) * TILE
        stop = start + count * TILE
        # One entry for each lane, also where the tile lies in one page: a scalar address was 3 to 10% slower.
        where = start + chunk * BLOCK_N
        page = tl.load(row_pages + where // PAGE_SIZE, mask=where < last_key, other=-1)
        if CHAINED:
            # The programs of a launch start while those of the one before it still run, and wait here until its results are in
            # memory. Lengths and pages are read before that: they are a batch's, and nothing that signals its dependents before
            # its end writes them (what does not, ends before this launch begins).
            gdc_wait()
            gdc_launch_dependents()
        q_rows = q_ptr + request * q_token + (kv_head * GROUP + row) * q_head
        q = tl.load(q_rows + dims[None, None, :], mask=row < GROUP, other=0.0)
        top = tl.full([LANES, BLOCK_M], float("-inf"), dtype=tl.float32)
        total = tl.zeros([LANES, BLOCK_M], dtype=tl.float32)
        acc = tl.zeros([LANES, BLOCK_M, HEAD_DIM], dtype=tl.float32)
        k_head_ptr = k_ptr + kv_head.to(tl.int64) * k_head
        v_head_ptr = v_ptr + kv_head.to(tl.int64) * v_head
        for key in range(start, stop, TILE):
            # The next tile's page is read a tile ahead: the addresses of its keys wait for it.
            where += TILE
            next_page = tl.load(row_pages + where // PAGE_SIZE, mask=where < last_key, other=-1)
            top, total, acc = _attend_tile(
                q, top, total, acc, page, key, chunk, k_head_ptr, v_head_ptr, first_key, last_key, num_pages,
                k_page, k_token, v_page, v_token, scale, cap, PAGE_SIZE, BLOCK_N, HEAD_DIM, CAP,
            )  # fmt: skip
            page = next_page
        if KEPT < BLOCK_M:  # the upper half of the rows is empty
            acc, _ = tl.split(tl.permute(tl.reshape(acc, [LANES, 2, KEPT, HEAD_DIM]), (0, 2, 3, 1)))
            top, _ = tl.split(tl.permute(tl.reshape(top, [LANES, 2, KEPT]), (0, 2, 1)))
            total, _ = tl.split(tl.permute(tl.reshape(total, [LANES, 2, KEPT]), (0, 2, 1)))
        if CHUNKS > 1:  # lanes of one head become one
            tops = tl.reshape(top, [CHUNKS, HEADS, KEPT])
            head_top = tl.max(tops, 0)
            weight = tl.exp2(tops - _exp_base(head_top)[None, :, :])
            total = tl.sum(tl.reshape(total, [CHUNKS, HEADS, KEPT]) * weight, 0)
            weighted = acc * tl.reshape(weight, [LANES, KEPT])[:, :, None]
            acc = tl.sum(tl.reshape(weighted, [CHUNKS, HEADS, KEPT, HEAD_DIM]), 0)
            top = head_top
        acc = tl.reshape(acc, [HEADS * KEPT, HEAD_DIM])
        top = tl.reshape(top, [HEADS * KEPT, 1])
        total = tl.reshape(total, [HEADS * KEPT, 1])
        flat = tl.arange(0, HEADS * KEPT)[:, None]
        in_head = row_first + flat % KEPT
        if count == item_tiles:
            _store_rows(
                acc, top, total, (kv_first + flat // KEPT) * GROUP + in_head, in_head < GROUP, request,
                out_ptr, lse_ptr, sinks_ptr, out_token, out_head, KV_HEADS * GROUP, HEAD_DIM, SINKS, LSE,
            )  # fmt: skip
        else:
            # A program shares at most the first and the last of its items with others: two places are enough.
            place = 2 * tl.program_id(0) + tl.where(at == begin, 0, 1)
            to = place * (HEADS * ROWS) + flat // KEPT * ROWS + flat % KEPT
            kept = (flat % KEPT < ROWS) & (in_head < GROUP)
            tl.store(parts_ptr + to * HEAD_DIM + dims[None, :], acc, mask=kept)
            tl.store(stats_ptr + to * 2, top, mask=kept)
            tl.store(stats_ptr + to * 2 + 1, total, mask=kept)
            item_tile = at - tile
            if WIDE:
                item_tile = item_tile.to(tl.int64)
            first_program = (((item_tile + 1) * programs - 1) // num_tiles).to(tl.int32)
            last_program = (((item_tile + item_tiles) * programs - 1) // num_tiles).to(tl.int32)
            arrivals = arrivals_ptr + request * BLOCKS + block
            # All threads' parts are written before one thread says so, and are read only after all programs have said so.
            tl.debug_barrier()
            arrived = tl.atomic_add(arrivals, 1, sem="acq_rel", scope="gpu")
            if arrived == last_program - first_program:
                _merge_parts(
                    parts_ptr, stats_ptr, first_program, last_program, first_program * num_tiles // programs < item_tile,
                    kv_first, row_first, request, out_ptr, lse_ptr, sinks_ptr, out_token, out_head,
                    KV_HEADS * GROUP, GROUP, HEAD_DIM, HEADS, ROWS, PARTS, SINKS, LSE,
                )  # fmt: skip
                tl.store(arrivals, 0)  # the next launch starts from here
        at += count


@triton.jit
def _merge_parts(
    parts_ptr, stats_ptr, first_program, last_program, first_is_second, kv_first, row_first, request,
    out_ptr, lse_ptr, sinks_ptr, out_token, out_head, num_heads,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, HEADS: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr,
    SINKS: tl.constexpr, LSE: tl.constexpr,
):  # fmt: skip
    """Merge what programs [first_program, last_program] left of one item; of the first it may be the second place."""
    SIZE: tl.constexpr = HEADS * ROWS
    flat = tl.arange(0, SIZE)[:, None]
    in_head = row_first + flat % ROWS
    live = in_head < GROUP
    cells = flat * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :]
    top = tl.full([SIZE, 1], float("-inf"), dtype=tl.float32)
    total = tl.zeros([SIZE, 1], dtype=tl.float32)
    acc = tl.zeros([SIZE, HEAD_DIM], dtype=tl.float32)
    for first in range(first_program, last_program + 1, PARTS):
        # Unrolled, so that the loads of all parts are on their way together: this is latency and nothing else. They go past the
        # first-level cache, which knows nothing of other multiprocessors' stores.
        new_top = top
        for i in tl.static_range(PARTS):
            place = 2 * (first + i) + tl.where((first + i == first_program) & first_is_second, 1, 0)
            there = live & (flat < tl.where(first + i <= last_program, SIZE, 0))
            stats = stats_ptr + (place * SIZE + flat) * 2
            new_top = tl.maximum(new_top, tl.load(stats, mask=there, other=float("-inf"), cache_modifier=".cg"))
        base = _exp_base(new_top)
        shrink = tl.exp2(top - base)
        total, acc, top = total * shrink, acc * shrink, new_top
        for i in tl.static_range(PARTS):
            place = 2 * (first + i) + tl.where((first + i == first_program) & first_is_second, 1, 0)
            there = live & (flat < tl.where(first + i <= last_program, SIZE, 0))
            stats = stats_ptr + (place * SIZE + flat) * 2
            weight = tl.exp2(tl.load(stats, mask=there, other=float("-inf"), cache_modifier=".cg") - base)
            total += weight * tl.load(stats + 1, mask=there, other=0.0, cache_modifier=".cg")
            acc += weight * tl.load(parts_ptr + place * (SIZE * HEAD_DIM) + cells, mask=there, other=0.0, cache_modifier=".cg")
    _store_rows(
        acc, top, total, (kv_first + flat // ROWS) * GROUP + in_head, live, request,
        out_ptr, lse_ptr, sinks_ptr, out_token, out_head, num_heads, HEAD_DIM, SINKS, LSE,
    )  # fmt: skip
