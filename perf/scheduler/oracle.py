"""Belady's rule over pages: what a cache of the same size could have kept, had it known the future."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from perf.scheduler.simulator import TurnRecord


def belady_hit_rate(turns: Sequence[TurnRecord], num_pages: int, page_size: int) -> float:
    """Prompt tokens found by the best eviction for these turns, of all prompt tokens.

    Each page of a conversation is next read by its next turn, so the page that is needed last is one of the conversation whose next
    turn is furthest away; of equals the last one in the conversation goes first, because only what stands before it can be found
    without it. Pages of running turns cannot go. Arrivals and ends are those of the replay that is compared.

    Args:
        turns: the turns of a replay.
        num_pages: capacity, all tiers together.
        page_size: tokens of a page.
    """
    ordered = sorted(turns, key=lambda turn: (turn.session, turn.turn))
    next_us: dict[tuple[int, int], int] = {}
    for turn, after in pairwise(ordered):
        if after.session == turn.session:
            next_us[(turn.session, turn.turn)] = after.arrived_us
    events = sorted(
        [(turn.first_token_us, 1, turn.session, turn) for turn in turns]
        + [(turn.ended_us, 0, turn.session, turn) for turn in turns],
        key=lambda event: event[:3],
    )
    held: dict[int, int] = {}  # pages of each conversation
    due_us: dict[int, int] = {}  # next turn of those that do not run
    used = hits = 0
    for _, is_start, session, turn in events:
        if is_start:
            # At least one token of a prompt is always computed.
            hits += min(held.get(session, 0), (turn.num_prompt - 1) // page_size) * page_size
            wanted = -(-(turn.num_prompt + turn.num_output) // page_size)
            due_us.pop(session, None)
            used += wanted - held.get(session, 0)
            held[session] = wanted
            while used > num_pages and due_us:
                furthest = max(due_us, key=lambda one: (due_us[one], one))
                gone = min(used - num_pages, held[furthest])
                used -= gone
                held[furthest] -= gone
                if held[furthest] == 0:
                    del held[furthest], due_us[furthest]
        elif (session, turn.turn) in next_us:
            due_us[session] = next_us[(session, turn.turn)]
            # The last token is never computed, and only full pages are kept.
            kept = (turn.num_prompt + turn.num_output - 1) // page_size
            used -= held[session] - kept
            held[session] = kept
        else:
            used -= held.pop(session)
    return hits / sum(turn.num_prompt for turn in turns)
