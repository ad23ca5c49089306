"""Log-probabilities of prompts, chunk by chunk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from tokenspeed_engine.sampling import prompt_logprobs
from tokenspeed_engine.scheduler import Plan
from tokenspeed_engine.types import TokenLogprobs

# Logits of one block of rows: 64 x 150,000 x 4 bytes = 38 MB at the most, where a whole chunk of 4,096 rows would be 2.4 GB.
_BLOCK_ROWS = 64


@dataclass(slots=True)
class _Wanted:
    prompt: NDArray[np.int32]
    top_n: int
    done: int = 1  # positions below this one have been reported; position 0 has no log-probability


@dataclass(frozen=True, slots=True)
class PromptRows:
    """Rows of one step's batch whose next prompt token is scored.

    Attributes:
        rows: [N] int64, token rows of the batch.
        parts: (request id, first position, number of rows), in the order of `rows`.
    """

    rows: NDArray[np.int64]
    parts: tuple[tuple[int, int, int], ...]


class PromptLogprobs:
    """Keeps what was asked for, finds the rows, scores them."""

    def __init__(self) -> None:
        self._wanted: dict[int, _Wanted] = {}

    def add(self, request_id: int, prompt_token_ids: Sequence[int], top_n: int) -> None:
        """Ask for a prompt's log-probabilities, each with the `top_n` most likely alternatives."""
        self._wanted[request_id] = _Wanted(np.asarray(prompt_token_ids, dtype=np.int32), top_n)

    def remove(self, request_id: int) -> None:
        """Forget a request; one that never asked is fine."""
        self._wanted.pop(request_id, None)

    def rows_of(self, plan: Plan) -> PromptRows | None:
        """The rows of a plan that predict a prompt token which was not reported yet; None when there are none."""
        if not self._wanted:
            return None
        rows: list[NDArray[np.int64]] = []
        parts: list[tuple[int, int, int]] = []
        for index, request_id in enumerate(plan.request_ids.tolist()):
            wanted = self._wanted.get(request_id)
            if wanted is None:
                continue
            first_row, end_row = int(plan.cu_query_lens[index]), int(plan.cu_query_lens[index + 1])
            first_position = int(plan.positions[first_row])
            # Row at position p scores the token at p + 1. A retracted request computes its prompt again: skip what was reported.
            skipped = max(0, wanted.done - 1 - first_position)
            count = min(end_row - first_row, len(wanted.prompt) - 1 - first_position) - skipped
            if count > 0:
                rows.append(np.arange(first_row + skipped, first_row + skipped + count, dtype=np.int64))
                parts.append((request_id, first_position + skipped, count))
        return PromptRows(np.concatenate(rows), tuple(parts)) if parts else None

    def score(self, found: PromptRows, hidden: Tensor, logits: Callable[[Tensor], Tensor]) -> dict[int, list[TokenLogprobs]]:
        """Score the rows.

        Args:
            found: from `rows_of`.
            hidden: [N, H] hidden states of its rows.
            logits: [n, H] -> [n, V].
        Returns:
            Request id to its new entries, in order of position.
        """
        result: dict[int, list[TokenLogprobs]] = {}
        start = 0
        for request_id, position, count in found.parts:
            wanted = self._wanted[request_id]
            entries: list[TokenLogprobs] = []
            for first in range(0, count, _BLOCK_ROWS):
                size = min(_BLOCK_ROWS, count - first)
                targets = wanted.prompt[position + first + 1 : position + first + 1 + size]
                block = logits(hidden[start + first : start + first + size])
                entries += prompt_logprobs(block, targets, wanted.top_n)
            start += count
            wanted.done = position + count + 1
            result[request_id] = entries
        return result
