"""Inputs other than tokens: options of a request, the clock, measured times, ends of transfers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tokenspeed_engine.scheduler import RequestOptions, Scheduler, SchedulerConfig

NOTHING = np.empty(0, dtype=np.int32)


def small() -> Scheduler:
    return Scheduler(SchedulerConfig(num_pages=8, page_size=4, max_num_seqs=2, max_num_batched_tokens=16, max_model_len=32))


def test_options_are_values() -> None:
    options = RequestOptions(session=3, salt="a", priority=-2, tenant=5, tenant_weight=4, deadline_us=10)
    assert (options.session, options.salt, options.priority) == (3, "a", -2)
    assert (options.tenant, options.tenant_weight, options.deadline_us) == (5, 4, 10)
    assert repr(RequestOptions(tenant=7, salt="hidden")) == "RequestOptions(salt=..., tenant=7)"
    with pytest.raises(AttributeError):
        options.session = 4  # type: ignore[misc]


@pytest.mark.parametrize(
    ("field", "value", "least"), [("session", -1, 0), ("tenant", -1, 0), ("tenant_weight", 0, 1), ("deadline_us", -2, -1)]
)
def test_options_out_of_range(field: str, value: int, least: int) -> None:
    values: dict[str, Any] = {field: value}
    with pytest.raises(ValueError, match=rf"RequestOptions.{field}: expected at least {least}, got {value}"):
        RequestOptions(**values)


def test_a_salt_is_bounded() -> None:
    assert RequestOptions(salt="é" * 128).salt == "é" * 128
    with pytest.raises(ValueError, match=r"RequestOptions.salt: expected at most 256 bytes of UTF-8, got 258"):
        RequestOptions(salt="é" * 129)


def test_the_clock_never_goes_backwards() -> None:
    scheduler = small()
    scheduler.advance_clock(5)
    scheduler.advance_clock(5)
    with pytest.raises(ValueError, match=r"advance_clock: expected at least 5 us.*got 4"):
        scheduler.advance_clock(4)


def test_a_measured_time_is_not_negative_and_a_bad_one_changes_nothing() -> None:
    scheduler = small()
    scheduler.submit(1, np.arange(3, dtype=np.int32), 2, NOTHING)
    plan = scheduler.plan()
    with pytest.raises(ValueError, match="step_time_us of at least 0, got -1"):
        scheduler.commit(plan.step, np.array([9], dtype=np.int32), step_time_us=-1)
    assert scheduler.commit(plan.step, np.array([9], dtype=np.int32), step_time_us=150).num_events == 1


def test_plans_without_copies_and_ends_of_unknown_transfers() -> None:
    scheduler = small()
    for plan in (scheduler.plan(), scheduler.submit(1, np.arange(3, dtype=np.int32), 2, NOTHING) and scheduler.plan()):
        assert plan.write_backs.shape == plan.load_backs.shape == (0, 2)
        assert plan.write_back_ids.dtype == plan.load_back_ids.dtype == np.int64
    before = scheduler.stats().num_in_flight_steps
    assert scheduler.complete_transfers(np.array([0, 7, -1], dtype=np.int64), np.array([True, True, False])) == 0
    with pytest.raises(ValueError, match="one entry of ok for each of 1 ids, got 0"):
        scheduler.complete_transfers(np.array([1], dtype=np.int64), np.empty(0, dtype=np.bool_))
    assert scheduler.stats().num_in_flight_steps == before
