"""Sampling parameters of all requests as arrays, so that a step's batch is one gather for each parameter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tokenspeed_engine.sampling.history import TokenHistory
from tokenspeed_engine.sampling.transfer import upload
from tokenspeed_engine.types import SamplingParams

# What a row needs beyond an argmax.
DRAWN = 1
PENALISED = 2
BIASED = 4
MIN_TOKENS = 8
LOGPROBS = 16

_FLOATS = ("temperature", "top_p", "min_p", "presence", "frequency", "repetition")
_COLUMNS: dict[str, Any] = {
    **dict.fromkeys(_FLOATS, np.float32),
    "top_k": np.int32,
    "seed": np.int64,
    "min_tokens": np.int64,
    "work": np.uint8,
}
_FIRST_CAPACITY = 64
_INT32_MAX = 2**31 - 1


@dataclass(slots=True)
class RequestState:
    """One request's parts that are not numbers.

    Attributes:
        slot: its row in the arrays.
        top_logprobs: alternatives to report.
        history: for penalties, else None.
        bias_ids, bias_values: logit_bias.
        early_ids, early_values: the same, with the tokens that may not come before min_tokens at -inf.
    """

    slot: int
    top_logprobs: int
    history: TokenHistory | None
    bias_ids: NDArray[np.int32]
    bias_values: NDArray[np.float32]
    early_ids: NDArray[np.int32]
    early_values: NDArray[np.float32]


class ParameterTable:
    """Arrays by slot. A slot is reused after its request is removed."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._columns = {name: np.zeros(_FIRST_CAPACITY, dtype=dtype) for name, dtype in _COLUMNS.items()}
        self._free = list(range(_FIRST_CAPACITY - 1, -1, -1))
        self._cached_slots: NDArray[np.int64] | None = None
        self._cache: dict[str, Tensor] = {}

    def take(self, params: SamplingParams, work: int) -> int:
        """Write the parameters into a free slot, and return it."""
        if not self._free:
            self._grow()
        slot = self._free.pop()
        values: dict[str, float] = {
            "temperature": params.temperature,
            "top_p": params.top_p,
            "min_p": params.min_p,
            "presence": params.presence_penalty,
            "frequency": params.frequency_penalty,
            "repetition": params.repetition_penalty,
            "top_k": min(max(params.top_k, 0), _INT32_MAX),
            "seed": (params.seed + 2**63) % 2**64 - 2**63,
            "min_tokens": params.min_tokens,
            "work": work,
        }
        for name, value in values.items():
            self._columns[name][slot] = value
        self._cached_slots = None
        return slot

    def release(self, slot: int) -> None:
        """Make a slot free."""
        self._free.append(slot)

    def host(self, name: str, slots: NDArray[np.int64]) -> NDArray[Any]:
        """One parameter of some slots, on the host; a copy."""
        return self._columns[name][slots]

    def select(self, slots: NDArray[np.int64]) -> None:
        """Name the slots whose parameters `device` gives; nothing is copied while they stay the same from step to step."""
        if self._cached_slots is None or not np.array_equal(self._cached_slots, slots):
            self._cached_slots = slots.copy()
            self._cache.clear()

    def device(self, name: str) -> Tensor:
        """One parameter of the selected slots, on the device."""
        found = self._cache.get(name)
        if found is None:
            assert self._cached_slots is not None
            found = self._cache[name] = upload(self._columns[name][self._cached_slots], self._device)
        return found

    def _grow(self) -> None:
        size = len(self._columns["work"])
        for name, column in self._columns.items():
            self._columns[name] = np.concatenate((column, np.zeros_like(column)))
        self._free = list(range(2 * size - 1, size - 1, -1))
