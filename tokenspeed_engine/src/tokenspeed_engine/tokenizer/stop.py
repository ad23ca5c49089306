"""Stop strings in a stream: find the first that completes, and hold back what may still become one.

Each stop string has its own automaton (Knuth, Morris and Pratt), so a character costs the same however long the strings are
and however the text is cut into pieces: the result is that of the whole text.

The rule: the stop string whose last character comes first wins; of those that end at the same character, the longest.
"""

from __future__ import annotations

import re
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

    __slots__ = ("_failures", "_find_first", "_held", "_states", "_stops")

    def __init__(self, stops: Sequence[str]) -> None:
        if not all(stops):
            raise ValueError("stop: expected non-empty strings, got an empty one. Fix: leave it out.")
        # Longest first, so that the first one found to end at a character is the one that began first.
        self._stops = sorted(set(stops), key=len, reverse=True)
        self._failures = [_failure_table(stop) for stop in self._stops]
        self._find_first = re.compile("|".join(sorted({re.escape(stop[0]) for stop in self._stops}))).search
        self._states = [0] * len(self._stops)
        self._held = ""

    def feed(self, text: str) -> str | StopMatch:
        """Add text; returns what may be shown now, or the match that ends it."""
        at, num_held = 0, len(self._held)
        if not num_held:
            found = self._find_first(text)
            if found is None:
                return text
            at = found.start()
        pending = self._held + text
        states, failures = self._states, self._failures
        keep = num_held
        while at < len(text):
            char = text[at]
            at += 1
            keep = 0
            for index, stop in enumerate(self._stops):
                state = states[index]
                while state and stop[state] != char:
                    state = failures[index][state - 1]
                if stop[state] == char:
                    state += 1
                    if state == len(stop):
                        return StopMatch(stop, pending[: num_held + at - state])
                states[index] = state
                keep = max(keep, state)
            if not keep:
                # Nothing is begun: go on where a stop string could begin.
                found = self._find_first(text, at)
                at = len(text) if found is None else found.start()
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
