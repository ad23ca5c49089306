"""Runs the model on a batch."""

from __future__ import annotations

import time

import numpy as np
import torch
from torch import Tensor

from tokenspeed_engine.kvcache import KVPool
from tokenspeed_engine.layers import ExtendRows, ForwardBatch
from tokenspeed_engine.models import CausalLM

# A step should stay well under the quarter of a second in which a client that left must be noticed.
_TARGET_STEP_S = 0.2
_CANDIDATES = (32, 64, 128, 256, 512, 1024, 2048)


class ModelRunner:
    """A model and its cache.

    Args:
        model: with weights.
        kv: the page pool.
        device: where both live.
    """

    def __init__(self, model: CausalLM, kv: KVPool, device: torch.device) -> None:
        self._model = model
        self._kv = kv
        self._device = device

    def hidden(self, batch: ForwardBatch) -> Tensor:
        """[S, H] hidden states of the batch's output rows; the batch's keys and values are in the cache afterwards."""
        return self._model.forward(batch, self._kv)

    def logits(self, hidden: Tensor) -> Tensor:
        """[S, H] -> [S, V]."""
        return self._model.logits(hidden)

    def measure_token_budget(self, max_tokens: int) -> int:
        """Find how many prompt tokens a step may hold so that it takes less than a fifth of a second on this device.

        Nothing may run meanwhile; slots are masked, so the cache stays as it is.

        Args:
            max_tokens: the largest budget that makes sense.
        Returns:
            A number of tokens in 32..2048, at most `max_tokens`.
        """
        best = min(_CANDIDATES[0], max_tokens)
        for num_tokens in _CANDIDATES:
            if num_tokens > max_tokens:
                break
            batch = self._probe(num_tokens)
            # The first run also allocates and generates code; the better of two, since the host may be busy with something else.
            elapsed_s = min(self._timed(batch) for _ in range(2))
            if elapsed_s > _TARGET_STEP_S:
                break
            best = num_tokens
            if 2 * elapsed_s > 1.5 * _TARGET_STEP_S:
                break  # the next candidate would take far too long: do not spend the start-up on it
        return best

    def _timed(self, batch: ForwardBatch) -> float:
        start = time.perf_counter()
        self.logits(self.hidden(batch))
        return time.perf_counter() - start

    def _probe(self, num_tokens: int) -> ForwardBatch:
        page_size = self._kv.layout.page_size
        num_pages = -(-num_tokens // page_size)
        pages = torch.full((1, num_pages), -1, dtype=torch.int32)
        extend = ExtendRows(
            1,
            num_tokens,
            pages.to(self._device),
            torch.tensor([0, num_tokens], dtype=torch.int32, device=self._device),
            torch.tensor([num_tokens], dtype=torch.int32, device=self._device),
            num_tokens,
            num_tokens,
            page_size,
        )
        positions = torch.from_numpy(np.arange(num_tokens, dtype=np.int32)).to(self._device)
        return ForwardBatch(
            num_tokens=num_tokens,
            token_ids=torch.zeros(num_tokens, dtype=torch.int32, device=self._device),
            positions=positions,
            slot_mapping=torch.full((num_tokens,), -1, dtype=torch.int64, device=self._device),
            output_rows=torch.tensor([num_tokens - 1], device=self._device),
            decode=None,
            extend=extend,
        )
