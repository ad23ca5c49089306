"""Stop strings in a stream: find the first that completes, and hold back what may still become one.

Each stop string has its own automaton (Knuth, Morris and Pratt), so a character costs the same however long the strings are
and however the text is cut into pieces: the result is that of the whole text.

The rule: the stop string whose last character comes first wins; of those that end at the same character, the longest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopMatch:
    """The stop string that ended the text, and the text before it that was not out yet."""

    stop: str
    text_before: str


class StopMatcher:
    """Follows one text.

    Args:
        stops: the stop strings; empty ones are not allowed.
    Raises:
        ValueError: a stop string is empty.
    """

    __slots__ = ("_failures", "_first", "_held", "_states", "_stops")

    def __init__(self, stops: Sequence[str]) -> None:
        if not all(stops):
            raise ValueError("stop: expected non-empty strings, got an empty one. Fix: leave it out.")
        # Longest first, so that the first one found to end at a character is the one that began first.
        self._stops = sorted(set(stops), key=len, reverse=True)
        self._failures = [_failure_table(stop) for stop in self._stops]
        self._first = frozenset(stop[0] for stop in self._stops)
        self._states = [0] * len(self._stops)
        self._held = ""

    def feed(self, text: str) -> str | StopMatch:
        """Add text; returns what may be shown now, or the match that ends it."""
        if not self._held and self._first.isdisjoint(text):
            return text
        pending = self._held + text
        states, failures, stops = self._states, self._failures, self._stops
        for offset, char in enumerate(text):
            for index, stop in enumerate(stops):
                state = states[index]
                while state and stop[state] != char:
                    state = failures[index][state - 1]
                if stop[state] == char:
                    state += 1
                if state == len(stop):
                    end = len(self._held) + offset + 1
                    return StopMatch(stop, pending[: end - len(stop)])
                states[index] = state
        keep = max(states)
        self._held = pending[len(pending) - keep :]
        return pending[: len(pending) - keep]

    def release(self) -> str:
        """The text ends for another reason: what was held back."""
        held, self._held = self._held, ""
        self._states = [0] * len(self._stops)
        return held


def _failure_table(stop: str) -> list[int]:
    """For each prefix, the length of its longest proper prefix that is also its suffix."""
    table = [0] * len(stop)
    length = 0
    for index in range(1, len(stop)):
        while length and stop[index] != stop[length]:
            length = table[length - 1]
        if stop[index] == stop[length]:
            length += 1
        table[index] = length
    return table
