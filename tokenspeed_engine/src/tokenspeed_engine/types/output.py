"""What comes back: sampled tokens from the core, text deltas for the server."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class FinishReason(enum.IntEnum):
    """Why a sequence ended. RUNNING: it has not."""

    RUNNING = 0
    STOP = 1
    LENGTH = 2
    ABORT = 3
    ERROR = 4


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position, natural logarithm, of the model's own distribution.

    That is before temperature, penalties and bias.

    Attributes:
        token_id: the token at this position.
        logprob: its log-probability.
        rank: 1 for the most likely token.
        top_token_ids: the most likely ids, best first, ties to the lower id.
        top_logprobs: their log-probabilities, in the same order.
    """

    token_id: int
    logprob: float
    rank: int
    top_token_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """New tokens of one request from one engine step.

    Attributes:
        request_id: the request.
        token_ids: new ids, in order; the last may be a stop token.
        logprobs: one entry for each id, or empty when not asked for.
        prompt_logprobs: entries for prompt positions 1..n-1 (position 0 has none), sent once, when complete.
        finish_reason: RUNNING until the last message of the request.
        num_prompt_tokens: length of the prompt.
        num_cached_tokens: prompt tokens that came from the prefix cache.
        num_host_cached_tokens: of these, those that had to be brought from the host's memory.
        num_external_cached_tokens: of these, those that had to be brought from outside of the engine.
        error: what went wrong, when finish_reason is ERROR.
    """

    request_id: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason = FinishReason.RUNNING
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    error: str = ""
    num_host_cached_tokens: int = 0
    num_external_cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class TextDelta:
    """New text of one request, for the server.

    Attributes:
        request_id: the request.
        text: new text, never half a character; may be empty.
        token_ids: ids that this delta covers, stop tokens included (counted in usage).
        logprobs: one entry for each id, or empty.
        prompt_logprobs: see SampledTokens.
        finish_reason: RUNNING until the last delta.
        stop_reason: the stop string or stop token id that ended the text, when one of the request's own did.
        num_prompt_tokens: length of the prompt.
        num_cached_tokens: prompt tokens that came from the prefix cache.
        num_host_cached_tokens: of these, those that had to be brought from the host's memory.
        num_external_cached_tokens: of these, those that had to be brought from outside of the engine.
        error: what went wrong, when finish_reason is ERROR.
    """

    request_id: str
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason = FinishReason.RUNNING
    stop_reason: str | int | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    error: str = ""
    num_host_cached_tokens: int = 0
    num_external_cached_tokens: int = 0
