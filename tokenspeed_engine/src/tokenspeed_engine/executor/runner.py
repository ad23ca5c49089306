"""Runs the model on a batch."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tokenspeed_engine.kvcache import KVPool
from tokenspeed_engine.layers import ExtendRows, ForwardBatch
from tokenspeed_engine.models import CausalLM

# A step should stay well under the quarter of a second in which a client that left must be noticed; the deepest chunks of a long
# prompt take up to half more than the linear model of their cost says.
_TARGET_STEP_S = 0.15
_PROBED_CONTEXT = 4096
_MOST_SHRINKAGE = 6  # of a chunk after that context; attention alone made it 2 to 3 where it was measured
_CANDIDATES = (32, 64, 128, 256, 512, 1024, 2048)


@dataclass(frozen=True, slots=True)
class StepLimits:
    """How large a step may be.

    Attributes:
        num_tokens: prompt tokens without context.
        context_cost_scale: a token after p others costs 1 + p / context_cost_scale tokens without context; 0: one.
    """

    num_tokens: int
    context_cost_scale: int


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

    def measure_step_limits(self, max_tokens: int, max_context: int) -> StepLimits:
        """Find how many prompt tokens a step may hold so that it takes less than a fifth of a second on this device.

        It is measured at the start of a prompt and after a long context, where attention adds to each token's cost. Nothing may run
        meanwhile; slots are masked, so the cache stays as it is.

        Args:
            max_tokens: the largest number of tokens that makes sense.
            max_context: most tokens that can precede a chunk.
        Returns:
            A number of tokens in 32..2048, at most `max_tokens`, and how it must shrink with the context.
        """
        num_tokens = self._most_tokens(max_tokens)
        num_cached = min(_PROBED_CONTEXT, max_context - num_tokens, self._kv.num_pages * self._kv.layout.page_size - num_tokens)
        if num_cached < num_tokens:
            return StepLimits(num_tokens, 0)
        affordable = float(num_tokens)
        for _ in range(3):  # a shorter chunk uses the machine less well: look again at what was found
            batch = self._probe(round(affordable), num_cached)
            elapsed_s = min(self._timed(batch) for _ in range(3))
            if elapsed_s <= _TARGET_STEP_S * 1.1:
                break
            # A host that is busy with something else must not leave prompts to crawl for as long as the engine lives.
            affordable = max(affordable * _TARGET_STEP_S / elapsed_s, num_tokens / _MOST_SHRINKAGE)
        # At this context a token costs as much as `num_tokens / affordable` at the start.
        added_cost = num_tokens / affordable - 1
        return StepLimits(num_tokens, 0 if added_cost < 0.01 else max(1, round(num_cached / added_cost)))

    def _most_tokens(self, max_tokens: int) -> int:
        best = min(_CANDIDATES[0], max_tokens)
        for num_tokens in _CANDIDATES:
            if num_tokens > max_tokens:
                break
            batch = self._probe(num_tokens, 0)
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

    def _probe(self, num_tokens: int, num_cached: int) -> ForwardBatch:
        page_size = self._kv.layout.page_size
        seq_len = num_cached + num_tokens
        # Real pages, though what they hold means nothing: masked ones would not be read.
        pages = torch.arange(-(-seq_len // page_size), dtype=torch.int32)[None, :]
        extend = ExtendRows(
            1,
            num_tokens,
            pages.to(self._device),
            torch.tensor([0, num_tokens], dtype=torch.int32, device=self._device),
            torch.tensor([seq_len], dtype=torch.int32, device=self._device),
            num_tokens,
            seq_len,
            page_size,
        )
        positions = torch.from_numpy(np.arange(num_cached, seq_len, dtype=np.int32)).to(self._device)
        return ForwardBatch(
            num_tokens=num_tokens,
            token_ids=torch.zeros(num_tokens, dtype=torch.int32, device=self._device),
            positions=positions,
            slot_mapping=torch.full((num_tokens,), -1, dtype=torch.int64, device=self._device),
            output_rows=torch.tensor([num_tokens - 1], device=self._device),
            decode=None,
            extend=extend,
        )
