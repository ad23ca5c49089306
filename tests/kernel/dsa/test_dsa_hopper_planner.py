"""How attention to given slots is shared on Hopper: every slot once, evenly, and the same each time; and where it is chosen."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenspeed_kernel import selection
from tokenspeed_kernel.ops.dsa.hopper.planner import ROWS, plan_sparse, run_of
from tokenspeed_kernel.platform import parse_platform
from tokenspeed_kernel.registry import collect_builtin
from tokenspeed_kernel.selection import Request
from tokenspeed_kernel.signature import Signature


@settings(deadline=None, max_examples=200)
@given(st.integers(1, 5000), st.integers(1, 300), st.integers(0, 5000), st.integers(1, 200))
def test_every_slot_is_taken_once_and_evenly(num_tokens: int, num_heads: int, num_slots: int, processors: int) -> None:
    plan = plan_sparse(num_tokens, num_heads, num_slots, processors)
    runs = [run_of(split, plan, num_slots) for split in range(plan.splits)]
    taken = Counter(slot for begin, count, _ in runs for slot in range(begin, begin + count))
    assert set(taken) == set(range(num_slots))
    assert set(taken.values()) <= {1}
    for begin, count, tiles in runs:
        assert tiles >= 1
        assert count <= tiles * plan.keys
        assert begin % plan.keys == 0
    # No run is longer than its share, rounded up to whole tiles.
    assert max(count for _, count, _ in runs) <= -(-num_slots // (plan.splits * plan.keys)) * plan.keys
    programs = num_tokens * -(-num_heads // ROWS)
    assert plan.splits == 1 or programs * plan.splits <= processors, "split only where processors would be idle"
    assert plan == plan_sparse(num_tokens, num_heads, num_slots, processors)


@pytest.mark.parametrize("op", ["sparse_decode", "sparse_prefill"])
@pytest.mark.parametrize(
    ("platform", "dtype", "changes", "expected"),
    [
        ("sm_90", "bf16", {}, "gluon_{}_sm90"),
        ("sm_90", "bf16", {"return_lse": True}, "gluon_{}_sm90"),
        ("sm_90", "fp16", {}, "triton_{}"),
        ("sm_90", "bf16", {"latent_dim": 256}, "triton_{}"),
        ("sm_90", "bf16", {"rope_dim": 32}, "triton_{}"),
        ("sm_100", "bf16", {}, "triton_{}"),
        ("sm_80", "bf16", {}, "triton_{}"),
    ],
)
def test_chosen(
    op: str, platform: str, dtype: str, changes: dict[str, int], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selection, "library_problem", lambda library: None)
    traits = {"latent_dim": 512, "rope_dim": 64, "return_lse": False, **changes}
    request = Request(f"dsa.{op}", parse_platform(platform), signature=Signature.of(q=dtype, kv_cache=dtype), traits=traits)
    assert selection.select(collect_builtin().freeze(), request).name == expected.format(op)
