"""Ranges of sampling parameters: one place for the engine core, `generate` and whoever calls the sampler directly."""

from __future__ import annotations

import math

from tokenspeed_engine.types import SamplingParams

MAX_LOGPROBS = 20
MAX_PENALTY = 2.0
MAX_LOGIT_BIAS = 100.0
# Beyond these, a logit divided or multiplied by it may no longer be a finite float32, and no token could be drawn.
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 0.01, 100.0
_MIN_SEED, _MAX_SEED = -(2**63), 2**64 - 1  # signed or unsigned: the 64 bits count


class SamplingParamsError(ValueError):
    """A sampling parameter is out of range.

    Attributes:
        param: name of the field of `SamplingParams`.
        expected: what would have been accepted.
    """

    def __init__(self, param: str, *, expected: str, got: object) -> None:
        self.param = param
        self.expected = expected
        shown = repr(got)
        shown = shown if len(shown) <= 64 else shown[:64] + "..."
        super().__init__(f"{param}: expected {expected}, got {shown}")


def validate_sampling_params(params: SamplingParams, vocab_size: int, max_model_len: int | None = None) -> None:
    """Check every field that the engine core uses.

    Args:
        params: what the request asks for. A temperature has no upper bound here (the OpenAI server refuses more than 2); top_p 0
            keeps the most likely token alone.
        vocab_size: bound of token ids.
        max_model_len: bound of max_tokens; None leaves it out.
    Raises:
        SamplingParamsError: the first field out of range; `param` names it.
    """
    _number("temperature", params.temperature, 0.0, math.inf)
    _number("top_p", params.top_p, 0.0, 1.0)
    _number("min_p", params.min_p, 0.0, 1.0)
    if params.top_k < -1:
        raise SamplingParamsError("top_k", expected="-1 or 0 (off), or a number of tokens", got=params.top_k)
    _number("presence_penalty", params.presence_penalty, -MAX_PENALTY, MAX_PENALTY)
    _number("frequency_penalty", params.frequency_penalty, -MAX_PENALTY, MAX_PENALTY)
    _number("repetition_penalty", params.repetition_penalty, MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY)
    if not _MIN_SEED <= params.seed <= _MAX_SEED:
        raise SamplingParamsError("seed", expected="a 64-bit integer", got=params.seed)
    for token_id, bias in params.logit_bias.items():
        _token_id("logit_bias", token_id, vocab_size)
        _number("logit_bias", bias, -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS)
    for token_id in params.stop_token_ids:
        _token_id("stop_token_ids", token_id, vocab_size)
    for text in params.stop:
        if not text:
            raise SamplingParamsError("stop", expected="strings that are not empty", got=text)
    for name, count in (("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
        if count is not None and not 0 <= count <= min(MAX_LOGPROBS, vocab_size):
            raise SamplingParamsError(name, expected=f"0 to {min(MAX_LOGPROBS, vocab_size)}", got=count)
    if params.max_tokens < 1:
        raise SamplingParamsError("max_tokens", expected="1 or more", got=params.max_tokens)
    if max_model_len is not None and params.max_tokens > max_model_len:
        expected = f"at most the model's length, {max_model_len}"
        raise SamplingParamsError("max_tokens", expected=expected, got=params.max_tokens)
    if not 0 <= params.min_tokens <= params.max_tokens:
        raise SamplingParamsError("min_tokens", expected=f"0 to max_tokens, {params.max_tokens}", got=params.min_tokens)


def _number(param: str, value: float, low: float, high: float) -> None:
    if not (math.isfinite(value) and low <= value <= high):
        bounds = f"a finite number, {low:g} or more" if high == math.inf else f"{low:g} to {high:g}"
        raise SamplingParamsError(param, expected=bounds, got=value)


def _token_id(param: str, token_id: int, vocab_size: int) -> None:
    if not 0 <= token_id < vocab_size:
        raise SamplingParamsError(param, expected=f"token ids in 0..{vocab_size - 1}", got=token_id)
