"""The sampler: turns a step's logits into tokens, each row by its own request's parameters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tokenspeed_engine.sampling.feedback import Feedback, InFlight
from tokenspeed_engine.sampling.history import TokenHistory
from tokenspeed_engine.sampling.logprobs import LogprobTensors, SamplerOutput
from tokenspeed_engine.sampling.slots import (
    BIASED,
    DRAWN,
    LOGPROBS,
    MIN_TOKENS,
    PENALISED,
    ParameterTable,
    RequestState,
)
from tokenspeed_engine.sampling.transfer import upload
from tokenspeed_engine.sampling.validate import validate_sampling_params
from tokenspeed_engine.types import SamplingParams
from tokenspeed_kernel.ops import sampling as ops

_NO_IDS = np.empty(0, dtype=np.int32)
_NO_VALUES = np.empty(0, dtype=np.float32)


class Sampler:
    """State and batching of sampling. One thread uses it.

    A request's token depends on its logits, its parameters, its seed and the token's position in the output alone: not on the
    batch, its row, or whether it was retracted and came back.
    """

    def __init__(self, vocab_size: int, device: torch.device | str = "cpu", *, eos_token_ids: Iterable[int] = ()) -> None:
        """Args:
        vocab_size: columns of the logits.
        device: where the logits are.
        eos_token_ids: the model's own end-of-sequence ids; min_tokens holds them back, unless a request ignores them.
        """
        self.vocab_size = vocab_size
        self.device = torch.device(device)
        self._eos_token_ids = tuple(eos_token_ids)
        self._states: dict[int, RequestState] = {}
        self._table = ParameterTable(self.device)
        self._feedback = Feedback()

    def add(self, request_id: int, params: SamplingParams, prompt_token_ids: Sequence[int] | NDArray[np.int32]) -> None:
        """Prepare a request's state.

        Args:
            request_id: as in `sample`.
            params: its parameters.
            prompt_token_ids: its prompt, for the repetition penalty.
        Raises:
            SamplingParamsError: a parameter is out of range.
            ValueError: the id is in use.
        """
        if request_id in self._states:
            raise ValueError(f"sampler: request {request_id} was added already; remove it first")
        validate_sampling_params(params, self.vocab_size)
        repeats = params.repetition_penalty != 1
        penalised = repeats or params.presence_penalty != 0 or params.frequency_penalty != 0
        stops = () if params.ignore_eos else self._eos_token_ids
        held_back = dict.fromkeys((*params.stop_token_ids, *stops), float("-inf")) if params.min_tokens else {}
        work = (
            DRAWN * (params.temperature > ops.GREEDY_TEMPERATURE and params.top_k != 1 and params.top_p > 0)
            | PENALISED * penalised
            | BIASED * bool(params.logit_bias)
            | MIN_TOKENS * bool(held_back)
            | LOGPROBS * (params.logprobs is not None)
        )
        # Without a repetition penalty the prompt's tokens change nothing, and stay off the list.
        history = TokenHistory(prompt_token_ids if repeats else ()) if penalised else None
        bias = dict(params.logit_bias)
        self._states[request_id] = RequestState(
            self._table.take(params, work), params.logprobs or 0, history, *_arrays(bias), *_arrays(bias | held_back)
        )

    def remove(self, request_id: int) -> None:
        """Forget a request; one that is not known is ignored."""
        state = self._states.pop(request_id, None)
        if state is not None:
            self._table.release(state.slot)

    def __len__(self) -> int:
        """Number of requests with state."""
        return len(self._states)

    @torch.inference_mode()
    def sample(
        self,
        logits: Tensor,
        request_ids: Sequence[int] | NDArray[np.int64],
        output_index: Sequence[int] | NDArray[np.int32],
    ) -> SamplerOutput:
        """Choose one token for each row.

        Args:
            logits: [S, vocab_size] fp32, bf16 or fp16; fp32 ones are overwritten where penalties or biases apply.
            request_ids: [S] the row's request.
            output_index: [S] how many tokens the request has sampled before: the counter of the draw, and the position for
                min_tokens. A position that comes again takes back what was counted at and after it.
        Returns:
            The tokens, on the device: nothing here waits for it.
        Raises:
            ValueError: the shape does not fit.
            KeyError: a request is not known.
        """
        num_rows = len(request_ids)
        if logits.shape != (num_rows, self.vocab_size):
            raise ValueError(f"sampler: expected logits [{num_rows}, {self.vocab_size}], got {list(logits.shape)}")
        ids = request_ids.tolist() if isinstance(request_ids, np.ndarray) else request_ids
        states = [self._states[one] for one in ids]
        slots = np.fromiter((state.slot for state in states), dtype=np.int64, count=num_rows)
        index = np.asarray(output_index, dtype=np.int64)
        work: NDArray[np.uint8] = self._table.host("work", slots)
        work[index >= self._table.host("min_tokens", slots)] &= 0xFF ^ MIN_TOKENS
        needs = int(np.bitwise_or.reduce(work)) if num_rows else 0
        if not needs:
            return SamplerOutput(ops.argmax(logits))

        self._table.select(slots)
        raw, reported = logits, np.flatnonzero(work & LOGPROBS)
        if needs & (PENALISED | BIASED | MIN_TOKENS):
            if len(reported):  # log-probabilities are those of the model's own distribution
                raw, logits = logits[upload(reported, self.device)], logits.float()
            else:
                logits = logits.float()
            self._apply_lists(logits, states, work, index)
        elif 0 < len(reported) < num_rows:
            raw = logits[upload(reported, self.device)]
        tokens = self._choose(logits, index) if needs & DRAWN else ops.argmax(logits)
        if needs & PENALISED:
            rows, histories = _penalised(states, work)
            self._feedback.push(InFlight.of(histories, rows, index[rows].tolist(), tokens))
        if not len(reported):
            return SamplerOutput(tokens)
        chosen = tokens if len(reported) == num_rows else tokens[upload(reported, self.device)]
        counts = [states[row].top_logprobs for row in reported.tolist()]
        values = ops.log_probs(raw, chosen, top_n=max(counts))
        return SamplerOutput(tokens, LogprobTensors(reported, counts, chosen, values))

    def _choose(self, logits: Tensor, index: NDArray[np.int64]) -> Tensor:
        get = self._table.device
        uniform = ops.philox_uniform(get("seed"), upload(index, self.device))
        return ops.sample(logits, uniform, get("temperature"), get("top_k"), get("top_p"), get("min_p"))

    def _apply_lists(self, logits: Tensor, states: list[RequestState], work: NDArray[np.uint8], index: NDArray[np.int64]) -> None:
        """Penalties, then biases and held-back tokens, in place."""
        if (work & PENALISED).any():
            self._feedback.settle(keep_last=True)
            rows, histories = _penalised(states, work)
            positions = index[rows].tolist()
            pending = self._feedback.pending(histories, rows, positions, len(states))
            for history, position in zip(histories, positions, strict=True):
                history.rewind(position)
            offsets = _offsets(len(states), rows, [len(one.token_ids) for one in histories])
            get = self._table.device
            ops.apply_penalties(
                logits,
                upload(offsets, self.device),
                upload(np.concatenate([one.token_ids for one in histories]), self.device),
                upload(np.concatenate([one.output_counts for one in histories]), self.device),
                get("presence"),
                get("frequency"),
                get("repetition"),
                pending=pending,
                out=logits,
            )
        biased = np.flatnonzero(work & (BIASED | MIN_TOKENS)).tolist()
        if biased:
            held = (work & MIN_TOKENS).tolist()
            lists = [
                (state.early_ids, state.early_values) if held[row] else (state.bias_ids, state.bias_values)
                for row, state in ((row, states[row]) for row in biased)
            ]
            ops.apply_logit_bias(
                logits,
                upload(_offsets(len(states), biased, [len(ids) for ids, _ in lists]), self.device),
                upload(np.concatenate([ids for ids, _ in lists]), self.device),
                upload(np.concatenate([values for _, values in lists]), self.device),
                out=logits,
            )


def _arrays(bias: dict[int, float]) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    if not bias:
        return _NO_IDS, _NO_VALUES
    return np.array(list(bias), dtype=np.int32), np.array(list(bias.values()), dtype=np.float32)


def _penalised(states: list[RequestState], work: NDArray[np.uint8]) -> tuple[list[int], list[TokenHistory]]:
    rows = np.flatnonzero(work & PENALISED).tolist()
    return rows, [history for row in rows if (history := states[row].history) is not None]


def _offsets(num_rows: int, rows: list[int], lengths: list[int]) -> NDArray[np.int32]:
    """Row offsets of lists that only some rows have."""
    offsets = np.zeros(num_rows + 1, dtype=np.int32)
    offsets[np.array(rows) + 1] = lengths
    return np.cumsum(offsets, dtype=np.int32)
