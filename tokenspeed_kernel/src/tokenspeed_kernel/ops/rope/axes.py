"""Which axis of a position each pair of elements follows."""

from __future__ import annotations

import functools

__all__ = ["axis_of_pairs"]


@functools.lru_cache(maxsize=64)
def axis_of_pairs(sections: tuple[int, ...], interleaved: bool) -> tuple[int, ...]:
    """Axis of each pair, sum(sections) of them.

    One axis after the other, each for its section; interleaved, the axes take turns until each has had its share, and what is left
    goes to the first.
    """
    if not interleaved:
        return tuple(axis for axis, pairs in enumerate(sections) for _ in range(pairs))
    turns = ((pair % len(sections), pair // len(sections)) for pair in range(sum(sections)))
    return tuple(axis if round_ < sections[axis] else 0 for axis, round_ in turns)
