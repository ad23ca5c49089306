"""Constraints on traits."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenspeed_kernel.traits import Constraint, Multiple, OneOf, PowerOfTwo, Range

CONSTRAINTS = (OneOf(16, 64), OneOf(3), PowerOfTwo(), PowerOfTwo(8, 64), Range(8, 20), Range(100), Multiple(16), Multiple(7))


@pytest.mark.parametrize(
    ("constraint", "good", "bad", "text"),
    [
        (OneOf(16, 64), (16, 64), (48, "16", True), "page_size in {16, 64}"),
        (OneOf(False), (False,), (True, 0), "page_size=False"),
        (PowerOfTwo(), (1, 64), (0, 48, -2, 2.5), "page_size must be a power of two"),
        (PowerOfTwo(8, 64), (8, 64), (4, 128), "page_size must be a power of two from 8 to 64"),
        (Range(1, 8), (1, 8, 2.5), (0, 9, "1"), "1 <= page_size <= 8"),
        (Range(32), (32, 10**9), (31,), "page_size >= 32"),
        (Multiple(16), (0, 48), (17, None), "page_size must be a multiple of 16"),
    ],
)
def test_constraint(constraint: Constraint, good: tuple[object, ...], bad: tuple[object, ...], text: str) -> None:
    assert all(constraint.accepts(value) for value in good)  # type: ignore[arg-type]
    assert not any(constraint.accepts(value) for value in bad)  # type: ignore[arg-type]
    assert constraint.describe("page_size") == text


@given(st.sampled_from(CONSTRAINTS), st.sampled_from(CONSTRAINTS), st.integers(0, 300))
def test_overlap_is_never_missed(first: Constraint, second: Constraint, value: int) -> None:
    if first.accepts(value) and second.accepts(value):
        assert first.overlaps(second)
        assert second.overlaps(first)


def test_disjoint_constraints_do_not_overlap() -> None:
    assert not OneOf(16, 64).overlaps(OneOf(32))
    assert not Range(1, 8).overlaps(Range(9, 16))
    assert not PowerOfTwo().overlaps(OneOf(48))


@given(st.sampled_from(CONSTRAINTS), st.integers(1, 300))
def test_the_remedy_is_a_value_that_is_taken(constraint: Constraint, value: int) -> None:
    assert constraint.accepts(constraint.nearest(value))
