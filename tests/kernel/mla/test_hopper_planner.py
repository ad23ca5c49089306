"""How latent decoding is shared on Hopper: every tile once, evenly, and the same each time."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenspeed_kernel.ops.mla.hopper.planner import (
    FEW_ROWS,
    LATENT_DIM,
    MANY_ROWS,
    MERGE_WARPS,
    PAGE_SIZE,
    LatentPlan,
    begin_of,
    item_tiles,
    num_sharers,
    owner_of,
    plan_latent,
    shares,
)

H200_PROCESSORS = 132
LENGTHS = st.lists(st.integers(0, 5000), min_size=1, max_size=9)


def _plan(lengths: list[int], query_rows: int, processors: int) -> LatentPlan:
    return plan_latent(len(lengths), query_rows, -(-max(lengths) // PAGE_SIZE), processors)


@settings(deadline=None, max_examples=200)
@given(LENGTHS, st.integers(1, 40), st.sampled_from((1, 16, 64, 200)))
def test_every_tile_is_taken_once_and_evenly(lengths: list[int], processors: int, query_rows: int) -> None:
    plan = _plan(lengths, query_rows, processors)
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
    assert max(loads.values()) == -(-sum(tiles) // min(plan.groups, sum(tiles))), "as even as with all programs"
    assert len(loads) == num_sharers(plan.groups, sum(tiles)) * plan.blocks
    assert found == list(shares(plan, lengths, max_keys=8192))


@settings(deadline=None, max_examples=100)
@given(LENGTHS, st.sampled_from((132, 40)), st.sampled_from((100, 512)))
def test_blocks_of_a_request_read_the_same_keys_at_the_same_time(lengths: list[int], processors: int, query_rows: int) -> None:
    plan = _plan(lengths, query_rows, processors)
    runs: dict[int, list[tuple[int, int, int]]] = {}
    for one in shares(plan, lengths, max_keys=8192):
        assert one.block == one.program % plan.blocks
        runs.setdefault(one.program, []).append((one.request, one.first_tile, one.num_tiles))
    for program, run in runs.items():
        assert run == runs[program - program % plan.blocks]


@settings(deadline=None, max_examples=200)
@given(LENGTHS, st.integers(1, 40), st.sampled_from((1, 64, 200)))
def test_the_notes_say_which_parts_there_are(lengths: list[int], processors: int, query_rows: int) -> None:
    """What a program notes of a block whose first tile it has agrees with who took what, and two places for parts are enough."""
    plan = _plan(lengths, query_rows, processors)
    found = list(shares(plan, lengths, max_keys=8192))
    total = sum(item_tiles(length, 8192) for length in lengths)
    groups = num_sharers(plan.groups, total)
    by_item: dict[tuple[int, int], list[int]] = {}
    for one in found:
        by_item.setdefault((one.request, one.block), []).append(one.program)
    starts = [sum(item_tiles(length, 8192) for length in lengths[:request]) for request in range(len(lengths))]
    noted = Counter[int]()
    for (request, block), who in by_item.items():
        last = starts[request] + item_tiles(lengths[request], 8192) - 1
        assert owner_of(starts[request], groups, total) == who[0] // plan.blocks
        assert owner_of(last, groups, total) == who[-1] // plan.blocks
        assert who == list(range(who[0], who[-1] + 1, plan.blocks))
        assert {program % plan.blocks for program in who} == {block}
        noted[request * plan.blocks + block if plan.by_request else who[0]] += len(who) > 1
    assert max(noted.values()) <= 1, "one note has room for it"
    assert max(noted) < plan.notes
    for program in range(plan.programs):
        own = [one for one in found if one.program == program]
        assert all(one.whole for one in own[1:-1]), "only the first and the last request of a program may be shared"


@given(st.integers(1, 300), st.integers(0, 100000))
def test_owners_are_the_inverse_of_begins(groups: int, extra: int) -> None:
    total = groups + extra
    assert begin_of(0, groups, total) == 0
    assert begin_of(groups, groups, total) == total
    for group in (0, groups // 2, groups - 1):
        begin, end = begin_of(group, groups, total), begin_of(group + 1, groups, total)
        assert end > begin
        assert owner_of(begin, groups, total) == owner_of(end - 1, groups, total) == group
    fewer = num_sharers(groups, total)
    assert 0.9 * groups <= fewer <= groups
    assert -(-total // fewer) == -(-total // groups)


@pytest.mark.parametrize("query_rows", [1, 9, 16, 17, 64, 128, 512, 20000])
@pytest.mark.parametrize("num_reqs", [1, 4, 16, 64, 128, 300])
@pytest.mark.parametrize("max_tiles", [0, 1, 16, 1024])
def test_plans_fit_the_chip(num_reqs: int, query_rows: int, max_tiles: int) -> None:
    plan = plan_latent(num_reqs, query_rows, max_tiles, H200_PROCESSORS)
    assert plan.blocks * plan.rows >= query_rows > (plan.blocks - 1) * plan.rows
    assert plan.rows in (FEW_ROWS, MANY_ROWS)
    assert plan.programs == plan.groups * plan.blocks
    assert 1 <= plan.programs <= max(H200_PROCESSORS, plan.blocks)
    assert plan.notes == (num_reqs * plan.blocks if plan.by_request else plan.programs)
    assert plan.notes <= 2 * plan.programs
    assert LATENT_DIM % plan.merge_slice == plan.rows % plan.merge_rows == 0
    assert plan.merge_parts * plan.merge_rows * plan.merge_slice <= 64 * 32 * MERGE_WARPS
    # Parts of requests that are as long as each other are merged at once, up to 128.
    lengths = [max(1, max_tiles) * PAGE_SIZE] * num_reqs
    sharers = Counter((one.request, one.block) for one in shares(plan, lengths, max_keys=lengths[0]) if not one.whole)
    assert min(128, max(sharers.values(), default=0)) <= plan.merge_parts
    assert plan == plan_latent(num_reqs, query_rows, max_tiles, H200_PROCESSORS)


def test_one_round_number_of_programs() -> None:
    # 1024 tiles are 8 for each of 128 programs, as for the longest of 132; 256 tiles are 2, and no program has two requests.
    assert num_sharers(132, 1024) == 128
    assert num_sharers(132, 256) == 128
    plan = plan_latent(16, 16, 16, H200_PROCESSORS)
    assert all(one.num_tiles == 2 for one in shares(plan, [1024] * 16, max_keys=1024))
    assert num_sharers(132, 133) == 132  # half as many would read at half the rate


def test_tiles_of_a_request() -> None:
    assert item_tiles(0, 4096) == 1  # its result is written, too
    assert item_tiles(64, 4096) == 1
    assert item_tiles(65, 4096) == 2
    assert item_tiles(5000, 4096) == 64  # no further than the page table goes
