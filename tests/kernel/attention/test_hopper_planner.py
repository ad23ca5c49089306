"""How paged decoding is shared on Hopper: every tile once, evenly, and the same each time."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenspeed_kernel.ops.attention.hopper.planner import StreamPlan, item_tiles, plan_stream, sharers, shares, stream_plan

H200_PROCESSORS = 132
SHARED_BYTES = 232448
"""Shared memory that a block may use on sm_90. Source: CUDA programming guide, "Compute Capabilities"."""
LENGTHS = st.lists(st.integers(0, 3000), min_size=1, max_size=9)


def _plan(programs: int, heads: int = 2, kv_heads: int = 4, min_tiles: int = 1) -> StreamPlan:
    return stream_plan(4 * kv_heads, kv_heads, 64, programs, heads=heads, num_warps=4, num_stages=3, min_tiles=min_tiles)


@settings(deadline=None, max_examples=200)
@given(LENGTHS, st.integers(1, 40), st.sampled_from((1, 2, 4)), st.sampled_from((None, 1, 37, 500)), st.integers(1, 5))
def test_every_tile_is_taken_once_and_evenly(
    lengths: list[int], programs: int, heads: int, window: int | None, min_tiles: int
) -> None:
    plan = _plan(programs, heads, min_tiles=min_tiles)
    found = list(shares(plan, lengths, max_keys=4096, window=window))
    taken = Counter(
        (one.request, one.block, tile) for one in found for tile in range(one.first_tile, one.first_tile + one.num_tiles)
    )
    tiles = [item_tiles(length, plan.tile, 4096, window) for length in lengths]
    wanted = {(r, b, t) for r, count in enumerate(tiles) for b in range(plan.blocks) for t in range(count)}
    assert set(taken) == wanted
    assert set(taken.values()) == {1}
    loads = Counter[int]()
    for one in found:
        loads[one.program] += one.num_tiles
        assert one.whole == (one.num_tiles == tiles[one.request])
    assert max(loads.values()) - min(loads.values()) <= 1
    assert len(loads) == max(1, min(programs, len(wanted) // min_tiles))
    assert found == list(shares(plan, lengths, max_keys=4096, window=window))


@settings(deadline=None, max_examples=200)
@given(LENGTHS, st.integers(1, 40), st.integers(1, 5))
def test_parts_find_each_other(lengths: list[int], programs: int, min_tiles: int) -> None:
    """What `stream` derives on the device from a tile's place agrees with who took what, and two places for parts are enough."""
    plan = _plan(programs, min_tiles=min_tiles)
    found = list(shares(plan, lengths, max_keys=4096))
    used = len({one.program for one in found})
    total = sum(one.num_tiles for one in found)
    start = 0
    by_item: dict[tuple[int, int], list[int]] = {}
    for one in found:
        by_item.setdefault((one.request, one.block), []).append(one.program)
    for item, who in by_item.items():
        count = sum(one.num_tiles for one in found if (one.request, one.block) == item)
        assert sharers(start, count, used, total) == (who[0], who[-1])
        assert who == list(range(who[0], who[-1] + 1))
        start += count
    for program in range(used):
        own = [one for one in found if one.program == program]
        assert all(one.whole for one in own[1:-1]), "only the first and the last item of a program may be shared"


def test_tiles_of_an_item() -> None:
    assert item_tiles(0, 64, 4096, None) == 1  # its result is written, too
    assert item_tiles(64, 64, 4096, None) == 1
    assert item_tiles(65, 64, 4096, None) == 2
    assert item_tiles(5000, 64, 4096, None) == 64  # no further than the page table goes
    assert item_tiles(129, 64, 4096, 2) == 2  # keys 127 and 128
    assert item_tiles(200, 64, 4096, 128) == 3  # keys 72..199


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim"), [(32, 8, 128), (64, 8, 64), (9, 3, 64), (32, 32, 128), (16, 1, 128)]
)
@pytest.mark.parametrize("num_reqs", [1, 4, 16, 64, 128, 300])
def test_plans_fit_the_chip(num_reqs: int, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    plan = plan_stream(num_reqs, num_heads, num_kv_heads, head_dim, H200_PROCESSORS)
    assert num_kv_heads % plan.heads == 0
    assert plan.blocks == num_kv_heads // plan.heads
    resident = -(-plan.programs // H200_PROCESSORS)
    assert resident in (1, 2)
    assert plan.programs >= 0.8 * resident * H200_PROCESSORS
    queries = plan.num_warps * plan.block_m * head_dim * 2
    tiles = (plan.num_stages - 1) * 2 * plan.num_warps * plan.block_n * head_dim * 2
    assert resident * (queries + tiles + 1024) <= SHARED_BYTES
    assert (plan.num_stages - 2) * tiles // (plan.num_stages - 1) * resident >= 32 << 10, "bytes in flight on a multiprocessor"
    assert plan == plan_stream(num_reqs, num_heads, num_kv_heads, head_dim, H200_PROCESSORS)


@pytest.mark.parametrize(("num_reqs", "length"), [(1, 65536), (4, 8192), (16, 1024), (64, 8192), (128, 1024), (256, 700)])
def test_equal_requests_are_shared_without_odd_ends(num_reqs: int, length: int) -> None:
    """No program has the end of one item and the beginning of another, and all have the same to do but for a tile."""
    plan = plan_stream(num_reqs, 32, 8, 128, H200_PROCESSORS)
    found = list(shares(plan, [length] * num_reqs, max_keys=length))
    loads = Counter[int]()
    for one in found:
        loads[one.program] += one.num_tiles
        assert one.whole or sum(other.program == one.program for other in found) == 1
    assert len(loads) == plan.programs
    assert max(loads.values()) - min(loads.values()) <= 1


def test_requests_that_fit_no_multiple_take_every_place() -> None:
    assert plan_stream(7, 32, 8, 128, H200_PROCESSORS).programs == 112
    assert plan_stream(6, 32, 8, 128, H200_PROCESSORS).programs == H200_PROCESSORS
    assert plan_stream(100, 32, 8, 128, H200_PROCESSORS).programs == 2 * H200_PROCESSORS


def test_groups_of_more_rows_than_a_tile_take_several_items() -> None:
    plan = stream_plan(40, 2, 64, 8, heads=2, num_warps=4, num_stages=3, min_tiles=1)
    assert plan.blocks == 2  # 20 rows in blocks of 16
    assert plan.rows == 16
