"""The family's ops in `torch.library`, for torch.compile and export. They call the public ops, which check and choose."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tokenspeed_kernel.dispatch import register_library_op

_FILTERS = "Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p"
_LISTS = "Tensor row_offsets, Tensor token_ids"
_FOUR = tuple[Tensor, Tensor, Tensor, Tensor]


def into(out: Tensor | None, result: Tensor) -> Tensor:
    """Give the caller of a compiled op its own `out`."""
    return result if out is None else out.copy_(result)


def _api() -> Any:
    from tokenspeed_kernel.ops.sampling import api  # the api module imports this one

    return api


def _argmax(logits: Tensor, solution: str | None = None) -> Tensor:
    result: Tensor = _api().argmax(logits, solution=solution)
    return result


def _sample(
    logits: Tensor,
    uniform: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    solution: str | None = None,
) -> Tensor:
    result: Tensor = _api().sample(logits, uniform, temperature, top_k, top_p, min_p, solution=solution)
    return result


def _sampling_probs(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, solution: str | None = None
) -> Tensor:
    result: Tensor = _api().sampling_probs(logits, temperature, top_k, top_p, min_p, solution=solution)
    return result


def _philox_uniform(seeds: Tensor, counters: Tensor, stream: int = 0, solution: str | None = None) -> Tensor:
    result: Tensor = _api().philox_uniform(seeds, counters, stream=stream, solution=solution)
    return result


def _apply_penalties(
    logits: Tensor,
    row_offsets: Tensor,
    token_ids: Tensor,
    output_counts: Tensor,
    presence: Tensor,
    frequency: Tensor,
    repetition: Tensor,
    pending: Tensor | None = None,
    solution: str | None = None,
) -> Tensor:
    lists = (row_offsets, token_ids, output_counts)
    result: Tensor = _api().apply_penalties(logits, *lists, presence, frequency, repetition, pending=pending, solution=solution)
    return result


def _apply_logit_bias(logits: Tensor, row_offsets: Tensor, token_ids: Tensor, bias: Tensor, solution: str | None = None) -> Tensor:
    result: Tensor = _api().apply_logit_bias(logits, row_offsets, token_ids, bias, solution=solution)
    return result


def _log_probs(logits: Tensor, token_ids: Tensor, top_n: int = 0, solution: str | None = None) -> _FOUR:
    result: _FOUR = _api().log_probs(logits, token_ids, top_n=top_n, solution=solution)
    return result


def _fake_tokens(logits: Tensor, *_: object, **__: object) -> Tensor:
    return logits.new_empty(logits.shape[0], dtype=torch.int32)


def _fake_probs(logits: Tensor, *_: object, **__: object) -> Tensor:
    return logits.new_empty(logits.shape, dtype=torch.float32)


def _fake_uniform(seeds: Tensor, *_: object, **__: object) -> Tensor:
    return seeds.new_empty(seeds.shape, dtype=torch.float64)


def _fake_like(logits: Tensor, *_: object, **__: object) -> Tensor:
    return torch.empty_like(logits)


def _fake_log_probs(logits: Tensor, token_ids: Tensor, top_n: int = 0, solution: str | None = None) -> _FOUR:
    rows = logits.shape[0]
    return (
        logits.new_empty(rows, dtype=torch.float32),
        logits.new_empty(rows, dtype=torch.int32),
        logits.new_empty((rows, top_n), dtype=torch.int32),
        logits.new_empty((rows, top_n), dtype=torch.float32),
    )


argmax = register_library_op("argmax(Tensor logits, str? solution=None) -> Tensor", _argmax, _fake_tokens)
sample = register_library_op(
    f"sample(Tensor logits, Tensor uniform, {_FILTERS}, str? solution=None) -> Tensor", _sample, _fake_tokens
)
sampling_probs = register_library_op(
    f"sampling_probs(Tensor logits, {_FILTERS}, str? solution=None) -> Tensor", _sampling_probs, _fake_probs
)
philox_uniform = register_library_op(
    "philox_uniform(Tensor seeds, Tensor counters, int stream=0, str? solution=None) -> Tensor",
    _philox_uniform,
    _fake_uniform,
)
apply_penalties = register_library_op(
    f"apply_penalties(Tensor logits, {_LISTS}, Tensor output_counts, Tensor presence, Tensor frequency, Tensor repetition, "
    "Tensor? pending=None, str? solution=None) -> Tensor",
    _apply_penalties,
    _fake_like,
)
apply_logit_bias = register_library_op(
    f"apply_logit_bias(Tensor logits, {_LISTS}, Tensor bias, str? solution=None) -> Tensor",
    _apply_logit_bias,
    _fake_like,
)
log_probs = register_library_op(
    "log_probs(Tensor logits, Tensor token_ids, int top_n=0, str? solution=None) -> (Tensor, Tensor, Tensor, Tensor)",
    _log_probs,
    _fake_log_probs,
)
