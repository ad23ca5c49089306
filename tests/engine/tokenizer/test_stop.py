"""Stop strings over chunk borders."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenspeed_engine.tokenizer.stop import StopMatch, StopMatcher


def run(stops: list[str], chunks: list[str]) -> tuple[str, str | None, list[str]]:
    """Text that was shown in all, the stop string that ended it, and what was shown after each chunk."""
    matcher = StopMatcher(stops)
    shown: list[str] = []
    for chunk in chunks:
        found = matcher.feed(chunk)
        if isinstance(found, StopMatch):
            return "".join(shown) + found.text_before, found.stop, shown
        shown.append(found)
    return "".join(shown) + matcher.release(), None, shown


def first_stop(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The rule by the letter: first end, then longest."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end - len(stop)], stop
    return text, None


def splits(text: str) -> list[list[str]]:
    """Every way to cut a text into pieces."""
    cuts = itertools.product([False, True], repeat=max(0, len(text) - 1))
    out = []
    for choice in cuts:
        chunks = [text[:1]]
        for char, cut in zip(text[1:], choice, strict=True):
            if cut:
                chunks.append(char)
            else:
                chunks[-1] += char
        out.append(chunks)
    return out


def test_a_beginning_is_held_until_it_is_decided() -> None:
    assert run(["Observation"], ["abc", "Obser", "vation", "x"]) == ("abc", "Observation", ["abc", ""])
    assert run(["Observation"], ["abc", "Obser", "ver", "!"]) == ("abcObserver!", None, ["abc", "", "Observer", "!"])
    assert run(["\nUser:"], ["hi\n", "Us", "er", ": x"]) == ("hi", "\nUser:", ["hi", "", ""])
    assert run(["\nUser:"], ["hi\n", "Used"]) == ("hi\nUsed", None, ["hi", "\nUsed"])


def test_what_is_held_comes_out_at_the_end() -> None:
    assert run(["stop"], ["a sto"]) == ("a sto", None, ["a "])


@pytest.mark.parametrize(
    ("text", "stops", "before", "stop"),
    [
        ("ab", ["b", "a"], "", "a"),  # the first to complete, not the first in the list
        ("xabcd", ["abcd", "bc"], "xa", "bc"),  # "bc" is complete before "abcd", though it began later
        ("xabc", ["c", "bc", "abc"], "x", "abc"),  # at the same end the longest
        ("aaab", ["aab"], "a", "aab"),  # a false start overlaps the real one
        ("ababac", ["abac"], "ab", "abac"),
        ("end。。", ["。。"], "end", "。。"),
        ("x👩‍🚀y", ["👩‍🚀"], "x", "👩‍🚀"),
    ],
)
def test_which_stop_wins(text: str, stops: list[str], before: str, stop: str) -> None:
    for chunks in splits(text):
        assert run(stops, chunks)[:2] == (before, stop), chunks


@given(
    text=st.text(alphabet="ab\n", max_size=9),
    stops=st.lists(st.text(alphabet="ab\n", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_every_split_gives_the_same(text: str, stops: list[str]) -> None:
    expected = first_stop(text, stops)
    for chunks in splits(text):
        assert run(stops, chunks)[:2] == expected


@given(
    text=st.text(alphabet="abc", max_size=60),
    stops=st.lists(st.text(alphabet="abc", min_size=1, max_size=8), min_size=1, max_size=4),
)
def test_nothing_is_held_that_cannot_become_a_stop(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    shown = ""
    for end, char in enumerate(text, start=1):
        found = matcher.feed(char)
        if isinstance(found, StopMatch):
            return
        shown += found
        held = text[len(shown) : end]
        longest = max((size for stop in stops for size in range(1, len(stop)) if text[:end].endswith(stop[:size])), default=0)
        assert len(held) == longest


def test_an_empty_stop_is_refused() -> None:
    with pytest.raises(ValueError, match="non-empty"):
        StopMatcher(["a", ""])


def test_a_hostile_stop_string_costs_no_more_than_a_plain_one() -> None:
    # Naive matching compares 10,000 characters at each of 20,000 places here: it would not end within the test's time limit.
    text, stop, _ = run(["a" * 10_000 + "b"], ["a" * 100] * 200)
    assert stop is None
    assert text == "a" * 20_000
