"""Sampled tokens on their way back to the penalties' state, without making the device wait for the host.

On a GPU the next step may be launched before the host has the last step's tokens. Then the kernel gets them as `pending`, from
device memory; the host counts them when they have arrived, at the latest one step after that.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tokenspeed_engine.sampling.history import TokenHistory
from tokenspeed_engine.sampling.transfer import upload


@dataclass(slots=True)
class InFlight:
    """Tokens of one step that the host has not counted yet.

    Attributes:
        histories: of the rows with penalties.
        rows: their rows in the step.
        output_index: position of each one's token in its output.
        token_ids: [S] int32 on the device.
        host_token_ids: the same, in host memory once `event` has passed.
        event: a CUDA event; None where the tokens are already in host memory.
    """

    histories: list[TokenHistory]
    rows: list[int]
    output_index: list[int]
    token_ids: Tensor
    host_token_ids: Tensor
    event: Any

    @classmethod
    def of(cls, histories: list[TokenHistory], rows: list[int], output_index: list[int], token_ids: Tensor) -> InFlight:
        """Start the tokens' way to the host."""
        if token_ids.device.type != "cuda":
            return cls(histories, rows, output_index, token_ids, token_ids.cpu(), None)
        host = torch.empty(token_ids.shape, dtype=token_ids.dtype, pin_memory=True)
        host.copy_(token_ids, non_blocking=True)
        return cls(histories, rows, output_index, token_ids, host, torch.cuda.current_stream(token_ids.device).record_event())

    def has_arrived(self) -> bool:
        """Say whether the host has the tokens."""
        return self.event is None or bool(self.event.query())

    def count(self) -> None:
        """Count the tokens, waiting for them where they have not arrived."""
        if self.event is not None:
            self.event.synchronize()
        tokens = self.host_token_ids.tolist()
        for history, row, index in zip(self.histories, self.rows, self.output_index, strict=True):
            if tokens[row] >= 0:
                history.record(index, tokens[row])


class Feedback:
    """The steps in flight, oldest first; at most one stays uncounted while the next one is prepared."""

    def __init__(self) -> None:
        self._in_flight: list[InFlight] = []

    def push(self, step: InFlight) -> None:
        """Take a step; count its tokens at once where they are in host memory."""
        self._in_flight.append(step)
        self.settle(keep_last=True)

    def settle(self, *, keep_last: bool) -> None:
        """Count what has arrived; wait for every step but, with `keep_last`, the newest."""
        while self._in_flight:
            if keep_last and len(self._in_flight) == 1 and not self._in_flight[0].has_arrived():
                return
            self._in_flight.pop(0).count()

    def pending(self, histories: list[TokenHistory], rows: list[int], output_index: list[int], num_rows: int) -> Tensor | None:
        """Return [num_rows] int32 on the device: each row's token that is not counted yet, -1 for none; None when all are counted.

        Args:
            histories, rows, output_index: the rows with penalties of the step that is being prepared.
            num_rows: rows of that step.
        """
        if not self._in_flight:
            return None
        (last,) = self._in_flight
        source = {id(history): place for place, history in enumerate(last.histories)}
        columns = zip(rows, histories, output_index, strict=True)
        moves = [(row, source[id(one)], index) for row, one, index in columns if id(one) in source]
        if any(index <= last.output_index[place] for _, place, index in moves):
            # A position that is in flight is sampled again: its token must be taken back, so it must be here first.
            self.settle(keep_last=False)
            return None
        pending = last.token_ids.new_full((num_rows,), -1)
        to = upload(np.array([row for row, _, _ in moves], dtype=np.int64), pending.device)
        take = upload(np.array([last.rows[place] for _, place, _ in moves], dtype=np.int64), pending.device)
        pending[to] = last.token_ids[take]
        return pending
