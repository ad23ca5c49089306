"""Log-probabilities of sampled tokens and of prompts, as the engine's types."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tokenspeed_engine.types import TokenLogprobs
from tokenspeed_kernel.ops import sampling as ops


@dataclass(frozen=True, slots=True)
class LogprobTensors:
    """Log-probabilities of some rows, still where they were computed.

    Attributes:
        rows: rows of the step that asked for them.
        top_counts: how many alternatives each of these asked for.
        token_ids: [N] int32.
        values: as returned by the kernel op `log_probs`.
    """

    rows: NDArray[np.int64]
    top_counts: Sequence[int]
    token_ids: Tensor
    values: tuple[Tensor, Tensor, Tensor, Tensor]

    def entries(self) -> list[TokenLogprobs]:
        """One entry for each of `rows`. Waits for the device."""
        chosen, ranks, top_ids, top_values = (one.tolist() for one in self.values)
        columns = zip(self.token_ids.tolist(), chosen, ranks, top_ids, top_values, self.top_counts, strict=True)
        return [
            TokenLogprobs(token_id, value, rank, tuple(ids[:count]), tuple(values[:count]))
            for token_id, value, rank, ids, values, count in columns
        ]


@dataclass(slots=True)
class SamplerOutput:
    """What one step sampled.

    Attributes:
        token_ids: [S] int32 on the sampler's device; -1 for a row whose logits hold a NaN or have no finite maximum: the request
            must be ended with an error.
    """

    token_ids: Tensor
    _tensors: LogprobTensors | None = None
    _logprobs: list[TokenLogprobs | None] | None = field(default=None, repr=False)

    @property
    def logprobs(self) -> list[TokenLogprobs | None] | None:
        """One entry for each row, None for a row that did not ask; None when no row did. The first access waits for the device."""
        if self._logprobs is None and self._tensors is not None:
            rows: list[TokenLogprobs | None] = [None] * len(self.token_ids)
            for row, entry in zip(self._tensors.rows.tolist(), self._tensors.entries(), strict=True):
                rows[row] = entry
            self._logprobs = rows
        return self._logprobs


@torch.inference_mode()
def prompt_logprobs(logits: Tensor, next_token_ids: Tensor | NDArray[np.int32] | Sequence[int], top_n: int) -> list[TokenLogprobs]:
    """Log-probabilities of prompt tokens, each under the logits of the position before it.

    Args:
        logits: [n, V] of n successive prompt positions, unchanged by penalties or bias; a chunk of a prompt will do.
        next_token_ids: [n] the token after each position: prompt tokens p+1..p+n for logits of p..p+n-1.
        top_n: number of alternatives for each, 0..20.
    Returns:
        n entries. The prompt's first token has none, so that a prompt of m tokens takes its m-1 from positions 0..m-2.
    Raises:
        ValueError: lengths differ.
    """
    chosen = torch.as_tensor(next_token_ids, dtype=torch.int32).to(logits.device)
    if len(chosen) != len(logits):
        raise ValueError(f"prompt_logprobs: expected one next token for each of {len(logits)} positions, got {len(chosen)}")
    values = ops.log_probs(logits, chosen, top_n=top_n)
    return LogprobTensors(np.arange(len(logits)), [top_n] * len(logits), chosen, values).entries()
