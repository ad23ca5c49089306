"""What a request's penalties must know: which tokens it has seen, and how often it generated each."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_FIRST_CAPACITY = 64


class TokenHistory:
    """Distinct tokens with output counts, in the form that `apply_penalties` takes.

    The position of a token in the output makes updates idempotent: what was recorded at or after a position that is sampled
    again is taken back first.
    """

    def __init__(self, prompt_token_ids: Sequence[int] | NDArray[np.int32]) -> None:
        """Args: prompt_token_ids: tokens that count as seen, not as generated; any order, repeats allowed."""
        seen = np.unique(np.asarray(prompt_token_ids, dtype=np.int32))
        self._size = self._num_prompt = len(seen)
        self._token_ids = np.empty(max(_FIRST_CAPACITY, 2 * self._size), dtype=np.int32)
        self._token_ids[: self._size] = seen
        self._counts = np.zeros_like(self._token_ids)
        self._place = dict(zip(seen.tolist(), range(self._size), strict=True))
        self._outputs: list[int] = []

    @property
    def token_ids(self) -> NDArray[np.int32]:
        """Distinct tokens seen so far; a view."""
        return self._token_ids[: self._size]

    @property
    def output_counts(self) -> NDArray[np.int32]:
        """How often each of `token_ids` was generated; a view."""
        return self._counts[: self._size]

    @property
    def num_outputs(self) -> int:
        """Generated tokens that are counted."""
        return len(self._outputs)

    def rewind(self, output_index: int) -> None:
        """Take back everything generated at `output_index` or later."""
        for token_id in self._outputs[output_index:]:
            self._counts[self._place[token_id]] -= 1
        del self._outputs[output_index:]
        # New tokens were appended as they first came, so those that are gone altogether stand at the end. Left on the list, they
        # would pass for tokens of the prompt.
        while self._size > self._num_prompt and not self._counts[self._size - 1]:
            self._size -= 1
            del self._place[int(self._token_ids[self._size])]

    def record(self, output_index: int, token_id: int) -> None:
        """Count the token generated at `output_index`.

        Raises:
            RuntimeError: a position before it was never recorded.
        """
        if output_index > len(self._outputs):
            raise RuntimeError(
                f"sampling: token {output_index} of a request was recorded, but only {len(self._outputs)} came before it"
            )
        self.rewind(output_index)
        place = self._place.get(token_id)
        if place is None:
            place = self._append(token_id)
        self._counts[place] += 1
        self._outputs.append(token_id)

    def _append(self, token_id: int) -> int:
        place = self._size
        if place == len(self._token_ids):
            self._token_ids = np.concatenate((self._token_ids, np.empty_like(self._token_ids)))
            self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
        self._token_ids[place] = token_id
        self._place[token_id] = place
        self._size += 1
        return place
