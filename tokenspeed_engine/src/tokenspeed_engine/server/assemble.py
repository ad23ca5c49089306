"""From the engine's deltas to the pieces of one choice, the same for streams and whole answers."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from tokenspeed_engine.server.engine_client import EngineClientError, EngineDeadError, TextCodec
from tokenspeed_engine.server.prompts import Prompt
from tokenspeed_engine.server.token_text import (
    counter_after,
    id_prompt_offsets,
    text_prompt_offsets,
)
from tokenspeed_engine.types import FinishReason, TextDelta, TokenizedRequest, TokenLogprobs

_FINISH_NAMES = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}


class TokenEntry(NamedTuple):
    """One token with what is reported of it.

    Attributes:
        token_id: the token.
        start: index of its first character in the choice's text.
        logprobs: None for the first token of a prompt, which nothing predicts.
    """

    token_id: int
    start: int
    logprobs: TokenLogprobs | None


class Piece(NamedTuple):
    """What one delta adds to a choice.

    Attributes:
        text: new text.
        entries: tokens whose text is in what was sent so far; empty when no logprobs were asked for.
        finish_reason: as the API spells it; None while the choice runs.
        stop_reason: with a finish_reason, the request's own stop string or stop token id, or None if none of them ended it.
    """

    text: str
    entries: tuple[TokenEntry, ...] = ()
    finish_reason: str | None = None
    stop_reason: str | int | msgspec.UnsetType | None = msgspec.UNSET

    @property
    def is_empty(self) -> bool:
        """True when there is nothing to send."""
        return not self.text and not self.entries and self.finish_reason is None


@dataclass(slots=True)
class SequenceUsage:
    """Token counts of one sequence."""

    num_completion_tokens: int = 0
    num_cached_tokens: int = 0
    num_host_cached_tokens: int = 0
    num_external_cached_tokens: int = 0


class ChoiceAssembler:
    """State of one choice between its first and its last delta.

    Log-probabilities of a token leave only when text beyond the token's beginning has left. A stop string that is cut away, or a
    stop token, therefore never shows up in them, and a stream joins to exactly the whole answer.

    Args:
        request: what was sent to the engine.
        codec: the tokenizer.
        prompt: the prompt of this choice.
        echo: begin with the prompt.
        echo_only: drop what is generated (max_tokens=0).
    """

    def __init__(
        self,
        request: TokenizedRequest,
        codec: TextCodec,
        prompt: Prompt,
        *,
        echo: bool = False,
        echo_only: bool = False,
    ) -> None:
        params = request.params
        self.usage = SequenceUsage()
        self.is_finished = False
        self._prompt = prompt
        self._codec = codec
        self._params = params
        self._echo = echo
        self._echo_only = echo_only
        self._begun = False
        self._echo_text = prompt.echo_text(codec, params.skip_special_tokens) if echo else ""
        self._num_chars = 0
        self._held: deque[TokenEntry] = deque()
        self._counter = (
            counter_after(request.prompt_token_ids, codec, params.skip_special_tokens) if params.logprobs is not None else None
        )

    def feed(self, delta: TextDelta) -> Piece:
        """Take the next delta.

        Raises:
            EngineClientError: the engine gave the sequence up.
        """
        _raise_failure(delta)
        if delta.num_cached_tokens >= self.usage.num_cached_tokens:
            self.usage.num_cached_tokens = delta.num_cached_tokens
            self.usage.num_host_cached_tokens = delta.num_host_cached_tokens
            self.usage.num_external_cached_tokens = delta.num_external_cached_tokens
        if not self._echo_only:
            self.usage.num_completion_tokens += len(delta.token_ids)
        self.is_finished = delta.finish_reason is not FinishReason.RUNNING
        begin = self._begin(delta)
        piece = self._generated(delta)
        if begin is None:
            return piece
        return Piece(begin.text + piece.text, begin.entries + piece.entries, piece.finish_reason, piece.stop_reason)

    def _begin(self, delta: TextDelta) -> Piece | None:
        if self._begun or not self._echo:
            return None
        self._begun = True
        entries: tuple[TokenEntry, ...] = ()
        if self._counter is not None:
            ids = self._prompt.token_ids
            if self._prompt.text is not None:
                starts = text_prompt_offsets(self._echo_text, ids, self._codec)
            else:
                starts = id_prompt_offsets(self._echo_text, ids, self._codec, self._params.skip_special_tokens)
            if len(delta.prompt_logprobs) != len(ids) - 1:
                raise EngineClientError(
                    f"expected log-probabilities of {len(ids) - 1} prompt tokens with the first delta, "
                    f"got {len(delta.prompt_logprobs)}"
                )
            entries = tuple(map(TokenEntry, ids, starts, (None, *delta.prompt_logprobs)))
        return Piece(self._echo_text, entries)

    def _generated(self, delta: TextDelta) -> Piece:
        finish_reason = _FINISH_NAMES.get(delta.finish_reason)
        stop_reason = delta.stop_reason if finish_reason else msgspec.UNSET
        if self._echo_only:
            return Piece("", (), "length", None) if finish_reason else Piece("")
        self._num_chars += len(delta.text)
        if self._counter is None:
            return Piece(delta.text, (), finish_reason, stop_reason)
        base = len(self._echo_text)
        for token_id, logprobs in zip(delta.token_ids, delta.logprobs, strict=True):
            self._held.append(TokenEntry(token_id, base + self._counter.advance(token_id), logprobs))
        return Piece(delta.text, self._release(base + self._num_chars, delta, finish_reason), finish_reason, stop_reason)

    def _release(self, num_chars: int, delta: TextDelta, finish_reason: str | None) -> tuple[TokenEntry, ...]:
        held = self._held
        if finish_reason == "length":
            keep = 0
        elif finish_reason is None or isinstance(delta.stop_reason, str):
            keep = sum(entry.start >= num_chars for entry in held)
        else:
            # The last token is a stop token; it is reported only where the detokenizer shows its text.
            keep = int(bool(held) and not self._shows(held[-1].token_id))
        return tuple(held.popleft() for _ in range(len(held) - keep))

    def _shows(self, stop_token_id: int) -> bool:
        params = self._params
        hidden = params.skip_special_tokens and stop_token_id in self._codec.special_token_ids
        return params.include_stop_str_in_output and not hidden


def _raise_failure(delta: TextDelta) -> None:
    if delta.finish_reason is FinishReason.ERROR:
        raise EngineClientError(delta.error or "the engine gave this request up without a reason")
    if delta.finish_reason is FinishReason.ABORT:
        raise EngineDeadError(delta.error or "the server ended this request before it was complete")
