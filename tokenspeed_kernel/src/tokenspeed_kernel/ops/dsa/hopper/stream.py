"""Device code of attention to given slots on Hopper, in Gluon: the warps of a program have three roles.

A program takes 64 heads of one token and a run of its slots, KEYS at a time. One group of warps gathers: each row of the cache goes
by asynchronous copies to one of STAGES places in shared memory, where it is key and value at once. One group multiplies the queries
with the keys, and leaves the softmax's weights where the tile's rope part was, which nobody needs any more. Two groups add up the
values of the tile before meanwhile, half of the latent elements each. So the matrix units have work while a role waits.

The roles meet at barriers of each place: `landed` (the rows are there), `weighed` (so are the weights, and by how much earlier sums
shrink), `freed` (the values are added: the place, or with PARTS 2 each half of it, may take other rows).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tokenspeed_kernel.ops.gluon_names import block_barrier, copy_async, view_as

__all__ = ["sparse_stream_kernel"]

_LN2 = gl.constexpr(0.6931471805599453)
_LATENT = gl.constexpr(512)
_ROPE = gl.constexpr(64)
_ROWS = gl.constexpr(64)
_GATHERERS = gl.constexpr(128)  # threads, each of which announces its copies


@gluon.jit
def _exp_base(top):
    """What is subtracted from logits: their maximum, or 0 where nothing was seen, because -inf - -inf is NaN."""
    return gl.where(top == float("-inf"), 0.0, top)


@gluon.jit
def _row_of(slot, page_size, kv_page, kv_token, FLAT: gl.constexpr):
    """Where a slot's row begins, in elements: 64-bit, because a pool passes 2**31 of them."""
    wide = slot.to(gl.int64)
    if FLAT:
        return wide * kv_token
    page = slot // page_size
    return page.to(gl.int64) * kv_page + (slot - page * page_size).to(gl.int64) * kv_token


@gluon.jit
def _rows_of(slots_ptr, keys, end, cache_slots, page_size, kv_page, kv_token, FLAT: gl.constexpr):
    """(where the rows of some slots begin, which of them are there)."""
    slot = gl.load(slots_ptr + keys, mask=keys < end, other=-1)
    there = (slot >= 0) & (slot < cache_slots)
    return _row_of(gl.where(there, slot, 0), page_size, kv_page, kv_token, FLAT), there


@gluon.jit
def _copy_rows(target, first, rows, there, START: gl.constexpr, WIDTH: gl.constexpr, LAYOUT: gl.constexpr):
    """Ask for elements START to START + WIDTH of some rows; one that is not there becomes zeros: 0 times NaN would be NaN."""
    dims = gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT))
    copy_async(target, (first + rows)[:, None] + (START + dims)[None, :], mask=there[:, None] & (dims >= 0)[None, :])


@gluon.jit
def _gather(
    q_rows_ptr, kv_ptr, slots_ptr, q_latent, q_rope, latents, ropes, tile_slots, queries, landed, freed, live, q_head, begin, end,
    tiles, cache_slots, page_size, kv_page, kv_token,
    KEYS: gl.constexpr, STAGES: gl.constexpr, PARTS: gl.constexpr, FLAT: gl.constexpr,
):  # fmt: skip
    """Bring the queries, and then tile after tile as places become free."""
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    NARROW: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    wide_heads = gl.arange(0, _ROWS, gl.SliceLayout(1, WIDE))
    narrow_heads = gl.arange(0, _ROWS, gl.SliceLayout(1, NARROW))
    _copy_rows(q_latent, q_rows_ptr, wide_heads * q_head, wide_heads < live, 0, _LATENT, WIDE)
    _copy_rows(q_rope, q_rows_ptr, narrow_heads * q_head, narrow_heads < live, _LATENT, _ROPE, NARROW)
    async_copy.mbarrier_arrive(queries, increment_count=False)
    PART: gl.constexpr = KEYS // PARTS
    wide_keys = gl.arange(0, PART, gl.SliceLayout(1, WIDE))
    narrow_keys = gl.arange(0, KEYS, gl.SliceLayout(1, NARROW))
    line_keys = gl.arange(0, KEYS, LINE)
    at = begin
    for tile in range(tiles):
        stage = tile % STAGES
        narrow_rows, narrow_there = _rows_of(slots_ptr, at + narrow_keys, end, cache_slots, page_size, kv_page, kv_token, FLAT)
        for part in gl.static_range(PARTS):
            keys = at + part * PART + wide_keys
            rows, there = _rows_of(slots_ptr, keys, end, cache_slots, page_size, kv_page, kv_token, FLAT)
            # The first round of a barrier counts as over: the places are free.
            mbarrier.wait(freed.index(stage * PARTS + part), (tile // STAGES & 1) ^ 1)
            target = latents.index(stage) if PARTS == 1 else latents.index(stage).slice(part * PART, PART, dim=0)
            _copy_rows(target, kv_ptr, rows, there, 0, _LATENT, WIDE)
        # The weights, which lie there, are read until the last part is free.
        _copy_rows(ropes.index(stage), kv_ptr, narrow_rows, narrow_there, _LATENT, _ROPE, NARROW)
        copy_async(tile_slots.index(stage), slots_ptr + at + line_keys, mask=at + line_keys < end)
        async_copy.mbarrier_arrive(landed.index(stage), increment_count=False)
        at += KEYS


@gluon.jit
def _weigh(
    lse_ptr, q_latent, q_rope, latents, ropes, tile_slots, shrinks, queries, landed, weighed, finished, live, lse_row, begin, end,
    tiles, cache_slots, scale, KEYS: gl.constexpr, STAGES: gl.constexpr, LSE: gl.constexpr, WEIGHTS: gl.constexpr,
):  # fmt: skip
    """Multiply queries and keys, and leave the softmax's weights."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, KEYS, 16])
    keys = begin + gl.arange(0, KEYS, gl.SliceLayout(0, SCORES))
    top = gl.full([_ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
    total = gl.zeros([_ROWS], gl.float32, gl.SliceLayout(1, SCORES))
    mbarrier.wait(queries, 0)
    for tile in range(tiles):
        stage = tile % STAGES
        mbarrier.wait(landed.index(stage), tile // STAGES & 1)
        fence_async_shared()
        asked = gl.zeros([_ROWS, KEYS], gl.float32, SCORES)
        asked = warpgroup_mma(q_latent, latents.index(stage).permute((1, 0)), asked, use_acc=False, is_async=True)
        asked = warpgroup_mma(q_rope, ropes.index(stage).permute((1, 0)), asked, is_async=True)
        # Slots come with the rows: a load of our own would be waited for by the fences.
        slot = tile_slots.index(stage).load(gl.SliceLayout(0, SCORES))
        there = (slot >= 0) & (slot < cache_slots) & (keys < end)
        keys += KEYS
        scores = warpgroup_mma_wait(0, deps=(asked,))
        found = gl.where(there[None, :], scores * scale, float("-inf"))
        new_top = gl.maximum(top, gl.max(found, 1))
        base = _exp_base(new_top)
        shrink = gl.exp2(top - base)
        parts = gl.exp2(found - base[:, None])
        top = new_top
        view_as(ropes.index(stage), gl.bfloat16, [_ROWS, KEYS], WEIGHTS).store(parts.to(gl.bfloat16))
        shrinks.index(stage).store(shrink)
        fence_async_shared()
        block_barrier()
        mbarrier.arrive(weighed.index(stage), count=1)
        total = total * shrink + gl.sum(parts, 1)
    safe = gl.where(total == 0.0, 1.0, total)
    shrinks.index(STAGES).store(1.0 / safe)
    block_barrier()
    mbarrier.arrive(finished, count=1)
    if LSE:
        rows = gl.arange(0, _ROWS, gl.SliceLayout(1, SCORES))
        lse = gl.where(total == 0.0, float("-inf"), (top + gl.log2(safe)) * _LN2)
        gl.store(lse_ptr + rows * lse_row, lse, mask=rows < live)


@gluon.jit
def _add_values(
    out_rows_ptr, latents, ropes, shrinks, weighed, freed, finished, live, out_head, tiles,
    KEYS: gl.constexpr, STAGES: gl.constexpr, PARTS: gl.constexpr, WEIGHTS: gl.constexpr,
):  # fmt: skip
    """Add up the weighted values, and write the result."""
    RESULT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 2], instr_shape=[16, 128, 16])
    acc = gl.zeros([_ROWS, _LATENT], gl.float32, RESULT)
    for tile in range(tiles):
        stage = tile % STAGES
        mbarrier.wait(weighed.index(stage), tile // STAGES & 1)
        shrink = shrinks.index(stage).load(gl.SliceLayout(1, RESULT))
        acc = acc * shrink[:, None]
        weights = view_as(ropes.index(stage), gl.bfloat16, [_ROWS, KEYS], WEIGHTS)
        values = latents.index(stage)
        if PARTS == 1:
            adding = warpgroup_mma(weights, values, acc, is_async=True)
        else:
            PART: gl.constexpr = KEYS // PARTS
            first_weights, first_values = weights.slice(0, PART, dim=1), values.slice(0, PART, dim=0)
            adding = warpgroup_mma(first_weights, first_values, acc, is_async=True)
            adding = warpgroup_mma(weights.slice(PART, PART, dim=1), values.slice(PART, PART, dim=0), adding, is_async=True)
            adding = warpgroup_mma_wait(1, deps=(adding,))
            block_barrier()
            mbarrier.arrive(freed.index(stage * PARTS), count=1)
        acc = warpgroup_mma_wait(0, deps=(adding,))
        block_barrier()  # every warp has read the tile: its place may take another
        mbarrier.arrive(freed.index(stage * PARTS + PARTS - 1), count=1)
    mbarrier.wait(finished, 0)
    inverse = shrinks.index(STAGES).load(gl.SliceLayout(1, RESULT))
    rows = gl.arange(0, _ROWS, gl.SliceLayout(1, RESULT))
    dims = gl.arange(0, _LATENT, gl.SliceLayout(0, RESULT))
    target = out_rows_ptr + rows[:, None] * out_head + dims[None, :]
    gl.store(target, (acc * inverse[:, None]).to(out_rows_ptr.dtype.element_ty), mask=(rows < live)[:, None] & (dims >= 0)[None, :])


@gluon.jit(do_not_specialize=["num_slots", "cache_slots", "page_size", "splits", "q_len", "lse_row"])
def sparse_stream_kernel(
    q_ptr, kv_ptr, out_ptr, lse_ptr, slots_ptr, num_slots, cache_slots, page_size, scale, splits, q_len,
    q_req, q_token, q_head, kv_page, kv_token, slots_req, slots_token, out_req, out_token, out_head, out_split, lse_row,
    HEADS: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr, PARTS: gl.constexpr, FLAT: gl.constexpr, LSE: gl.constexpr,
    GATHER_REGISTERS: gl.constexpr, WEIGH_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Program ((token, block of heads), split): blocks of a token lie beside each other, because they read the same rows."""
    BLOCKS: gl.constexpr = (HEADS + _ROWS - 1) // _ROWS
    token = (gl.program_id(0) // BLOCKS).to(gl.int64)
    first_head = gl.program_id(0) % BLOCKS * _ROWS
    split = gl.program_id(1)
    request, query = token // q_len, token % q_len
    q_rows_ptr = q_ptr + request * q_req + query * q_token + first_head * q_head
    slots_ptr += request * slots_req + query * slots_token
    out_rows_ptr = out_ptr + request * out_req + query * out_token + first_head * out_head + split * out_split
    lse_ptr += (token * HEADS + first_head) * lse_row + split
    all_tiles = (num_slots + KEYS - 1) // KEYS
    each = (all_tiles + splits - 1) // splits
    first = gl.minimum(split * each, all_tiles)
    # One tile at least: a run without slots has the weights of none.
    tiles = gl.maximum(gl.minimum(first + each, all_tiles) - first, 1)
    begin = first * KEYS
    end = gl.minimum(num_slots, begin + tiles * KEYS)
    live = HEADS - first_head
    SWIZZLED: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    WEIGHTS: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=min(128, 2 * KEYS), element_bitwidth=16, rank=2)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(vec=1, per_phase=1, max_phase=1, order=[0])
    q_latent = gl.allocate_shared_memory(gl.bfloat16, [_ROWS, _LATENT], SWIZZLED)
    q_rope = gl.allocate_shared_memory(gl.bfloat16, [_ROWS, _ROPE], SWIZZLED)
    latents = gl.allocate_shared_memory(gl.bfloat16, [STAGES, KEYS, _LATENT], SWIZZLED)
    ropes = gl.allocate_shared_memory(gl.bfloat16, [STAGES, KEYS, _ROPE], SWIZZLED)
    tile_slots = gl.allocate_shared_memory(gl.int32, [STAGES, KEYS], PLAIN)
    shrinks = gl.allocate_shared_memory(gl.float32, [STAGES + 1, _ROWS], PLAIN)
    queries = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    finished = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    landed = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    weighed = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    freed = gl.allocate_shared_memory(gl.int64, [STAGES * PARTS, 1], mbarrier.MBarrierLayout())
    mbarrier.init(queries, count=_GATHERERS)
    mbarrier.init(finished, count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(landed.index(stage), count=_GATHERERS)
        mbarrier.init(weighed.index(stage), count=1)
    for place in gl.static_range(STAGES * PARTS):
        mbarrier.init(freed.index(place), count=1)
    fence_async_shared()
    block_barrier()
    gl.warp_specialize(
        [
            (
                _add_values,
                (
                    out_rows_ptr, latents, ropes, shrinks, weighed, freed, finished, live, out_head, tiles,
                    KEYS, STAGES, PARTS, WEIGHTS,
                ),
            ),
            (
                _weigh,
                (
                    lse_ptr, q_latent, q_rope, latents, ropes, tile_slots, shrinks, queries, landed, weighed, finished,
                    live, lse_row, begin, end, tiles, cache_slots, scale, KEYS, STAGES, LSE, WEIGHTS,
                ),
            ),
            (
                _gather,
                (
                    q_rows_ptr, kv_ptr, slots_ptr, q_latent, q_rope, latents, ropes, tile_slots, queries, landed, freed,
                    live, q_head, begin, end, tiles, cache_slots, page_size, kv_page, kv_token, KEYS, STAGES, PARTS, FLAT,
                ),
            ),
        ],
        [4, 4],
        [WEIGH_REGISTERS, GATHER_REGISTERS],
    )  # fmt: skip
