"""Agentic traces: conversations whose first turn is long, whose later turns add little, and that pause while tools run."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

FIRST_TURN_TOKENS = (50_000, 63_000)
LATER_TURN_TOKENS = (600, 1000)
OUTPUT_TOKENS = (300, 700)
NUM_TURNS = (10, 15)
MEDIAN_GAP_S = 8.0
GAP_SPREAD = 1.0  # sigma of the logarithm: one gap in twenty is longer than 40 s


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a conversation.

    Attributes:
        num_new: prompt tokens beyond all that the conversation holds already.
        num_output: tokens that it generates.
        gap_s: time from the end of the turn before (from the start of the trace for the first) to its arrival.
    """

    num_new: int
    num_output: int
    gap_s: float


@dataclass(slots=True)
class Session:
    """A conversation: its turns, and all tokens of its prompts; those of answers come in between as they are sampled."""

    turns: list[Turn]
    prompt_tokens: NDArray[np.int32]

    @property
    def final_tokens(self) -> int:
        """Tokens of the last turn's prompt and answer together."""
        return sum(turn.num_new + turn.num_output for turn in self.turns)


def agentic(num_sessions: int, *, scale: float = 1.0, seed: int = 0, ramp_s: float = 2.0) -> list[Session]:
    """Sessions that start `ramp_s` apart on average.

    Args:
        num_sessions: conversations.
        scale: of all lengths in tokens, for a quick look.
        seed: of the generator; equal arguments give equal traces.
        ramp_s: mean time between two first turns.
    """
    source = np.random.default_rng(seed)

    def length(bounds: tuple[int, int]) -> int:
        return max(1, int(source.integers(bounds[0], bounds[1] + 1) * scale))

    sessions, start_s = [], 0.0
    for _ in range(num_sessions):
        turns = []
        for index in range(int(source.integers(NUM_TURNS[0], NUM_TURNS[1] + 1))):
            gap_s = start_s if index == 0 else float(MEDIAN_GAP_S * np.exp(GAP_SPREAD * source.standard_normal()))
            turns.append(Turn(length(FIRST_TURN_TOKENS if index == 0 else LATER_TURN_TOKENS), length(OUTPUT_TOKENS), gap_s))
        start_s += float(source.exponential(ramp_s))
        num_prompt = sum(turn.num_new for turn in turns)
        sessions.append(Session(turns, source.integers(0, 100_000, num_prompt).astype(np.int32)))
    return sessions
