"""How latent decoding is shared on Hopper: every tile once, evenly, and the same each time."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenspeed_kernel.ops.mla.hopper.planner import (
    LATENT_DIM,
    MERGE_WARPS,
    PAGE_SIZE,
    begin_of,
    item_tiles,
    owner_of,
    plan_latent,
    shares,
)

H200_PROCESSORS = 132
SHARED_BYTES = 232448
"""Shared memory that a block may use on sm_90. Source: CUDA programming guide, "Compute Capabilities"."""
LENGTHS = st.lists(st.integers(0, 5000), min_size=1, max_size=9)


@settings(deadline=None, max_examples=200)
@given(LENGTHS, st.integers(1, 40), st.sampled_from((1, 16, 64, 200)))
def test_every_tile_is_taken_once_and_evenly(lengths: list[int], processors: int, query_rows: int) -> None:
    plan = plan_latent(len(lengths), query_rows, -(-max(lengths) // PAGE_SIZE), processors)
    found = list(shares(plan, lengths, max_keys=8192))
    taken = Counter(
        (one.request, one.block, tile) for one in found for tile in range(one.first_tile, one.first_tile + one.num_tiles)
    )
    tiles = [item_tiles(length, 8192) for length in lengths]
    wanted = {(r, b, t) for r, count in enumerate(tiles) for b in range(plan.blocks) for t in range(count)}
    assert set(taken) == wanted
    assert set(taken.values()) == {1}
    loads = Counter[int]()
    for one in found:
        loads[one.program] += one.num_tiles
        assert one.whole == (one.num_tiles == tiles[one.request])
    assert max(loads.values()) - min(loads.values()) <= 1
    assert len(loads) == min(plan.programs, len(wanted))
    assert found == list(shares(plan, lengths, max_keys=8192))


@settings(deadline=None, max_examples=200)
@given(LENGTHS, st.integers(1, 40), st.sampled_from((1, 64, 200)))
def test_the_merge_finds_the_parts(lengths: list[int], processors: int, query_rows: int) -> None:
    """What `merge` derives on the device from a block's place agrees with who took what, and two places for parts are enough."""
    plan = plan_latent(len(lengths), query_rows, -(-max(lengths) // PAGE_SIZE), processors)
    found = list(shares(plan, lengths, max_keys=8192))
    total = sum(one.num_tiles for one in found)
    programs = min(plan.programs, total)
    by_item: dict[tuple[int, int], list[int]] = {}
    for one in found:
        by_item.setdefault((one.request, one.block), []).append(one.program)
    start = 0
    for (request, _), who in by_item.items():
        count = item_tiles(lengths[request], 8192)
        assert owner_of(start, programs, total) == who[0]
        assert owner_of(start + count - 1, programs, total) == who[-1]
        assert who == list(range(who[0], who[-1] + 1))
        start += count
    for program in range(programs):
        own = [one for one in found if one.program == program]
        assert all(one.whole for one in own[1:-1]), "only the first and the last item of a program may be shared"


@given(st.integers(1, 300), st.integers(0, 100000))
def test_owners_are_the_inverse_of_begins(programs: int, extra: int) -> None:
    total = programs + extra
    assert begin_of(0, programs, total) == 0
    assert begin_of(programs, programs, total) == total
    for program in (0, programs // 2, programs - 1):
        begin, end = begin_of(program, programs, total), begin_of(program + 1, programs, total)
        assert end > begin
        assert owner_of(begin, programs, total) == owner_of(end - 1, programs, total) == program


@pytest.mark.parametrize("query_rows", [1, 9, 16, 17, 64, 128, 512])
@pytest.mark.parametrize("num_reqs", [1, 4, 16, 64, 128, 300])
@pytest.mark.parametrize("max_tiles", [0, 1, 16, 1024])
def test_plans_fit_the_chip(num_reqs: int, query_rows: int, max_tiles: int) -> None:
    plan = plan_latent(num_reqs, query_rows, max_tiles, H200_PROCESSORS)
    assert plan.blocks * plan.rows >= query_rows > (plan.blocks - 1) * plan.rows
    assert 1 <= plan.programs <= H200_PROCESSORS
    pages, queries, weights = 2 * PAGE_SIZE * 576 * 2, plan.rows * 576 * 2, plan.rows * PAGE_SIZE * 2
    assert pages + queries + weights + 1024 <= SHARED_BYTES
    assert LATENT_DIM % plan.merge_slice == 0
    assert plan.parts * plan.merge_slice <= 32 * 32 * MERGE_WARPS or plan.merge_slice == 32
    assert plan.one_row or plan.parts == plan.rows
    if plan.one_row:  # parts of requests that are as long as each other are merged at once
        lengths = [max(1, max_tiles) * PAGE_SIZE] * num_reqs
        sharers = Counter((one.request, one.block) for one in shares(plan, lengths, max_keys=lengths[0]) if not one.whole)
        assert max(sharers.values(), default=0) <= plan.parts
    assert plan == plan_latent(num_reqs, query_rows, max_tiles, H200_PROCESSORS)


def test_tiles_of_a_request() -> None:
    assert item_tiles(0, 4096) == 1  # its result is written, too
    assert item_tiles(64, 4096) == 1
    assert item_tiles(65, 4096) == 2
    assert item_tiles(5000, 4096) == 64  # no further than the page table goes
