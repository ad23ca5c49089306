"""The inline detokenizer: new token ids of many requests to text deltas, in the front end's own process.

For each request, the deltas joined are the text of all its tokens, cut at the first stop string: byte for byte what decoding
the whole output at the end gives, however the tokens were cut into steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from tokenspeed_engine.tokenizer.encode import Tokenizer
from tokenspeed_engine.tokenizer.errors import DetokenizerError, DetokenizerFullError, UnknownRequestError
from tokenspeed_engine.tokenizer.stop import StopMatch, StopMatcher
from tokenspeed_engine.tokenizer.streams import ByteStream, OffsetStream
from tokenspeed_engine.types import FinishReason, SamplingParams

MAX_STATES: Final = 65_536

NewTokens = tuple[str, Sequence[int], FinishReason]


class TextUpdate(NamedTuple):
    """New text of one request. A tuple, because one is made for every request in every step.

    Attributes:
        request_id: the request.
        text: new text; whole characters only, nothing that may still become a stop string.
        token_ids: the new ids that count: a stop token does, tokens after a stop string do not.
        finish_reason: as the core said, or STOP when a stop string ended the text here: then the core must be told to abort.
        stop_reason: the stop string, or the id of `stop_token_ids`, that ended the text; None for the model's own end.
        token_texts: for requests with logprobs, one text for each of token_ids: what the token added to the text, before
            stop strings are cut and held back. Joined over a request they are its whole text. Else empty.
    """

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_reason: str | int | None = None
    token_texts: tuple[str, ...] = ()


class _State:
    """What is kept of one request: a few ids or bytes, and the text that is held back for stop strings."""

    __slots__ = ("finished", "is_plain", "is_quick", "matcher", "num_tokens", "params", "stream")

    def __init__(self, stream: ByteStream | OffsetStream, params: SamplingParams) -> None:
        self.stream = stream
        self.params = params
        self.matcher = StopMatcher(params.stop) if params.stop else None
        self.num_tokens = 0
        self.finished = False
        # A plain request's text goes out as it comes: nothing is matched, held back or told apart by token.
        self.is_plain = self.matcher is None and params.logprobs is None
        # A quick one has stop strings at most: no token is counted before its end.
        self.is_quick = self.is_plain or (params.logprobs is None and params.min_tokens == 0)


class IncrementalDetokenizer:
    """Text deltas for many requests at once. Not for use by several threads at a time.

    Args:
        tokenizer: the model's tokenizer.
        max_states: most requests at one time.
    """

    def __init__(self, tokenizer: Tokenizer, max_states: int = MAX_STATES) -> None:
        if max_states < 1:
            raise ValueError(f"detokenizer max_states: expected at least 1, got {max_states}")
        self._tokenizer = tokenizer
        self._max_states = max_states
        self._states: dict[str, _State] = {}

    def __len__(self) -> int:
        return len(self._states)

    def add(self, request_id: str, params: SamplingParams, prompt_token_ids: Sequence[int]) -> None:
        """Begin a request. Its state stays until remove().

        Args:
            request_id: unique among the requests that were added and not removed.
            params: read are stop, include_stop_str_in_output, stop_token_ids, min_tokens, skip_special_tokens and
                logprobs.
            prompt_token_ids: the prompt; only its end is read.
        Raises:
            DetokenizerFullError: max_states requests are held.  DetokenizerError: the id is in use.
            ValueError: a stop string is empty.
        """
        if request_id in self._states:
            raise DetokenizerError(f"detokenizer add: request {request_id!r} was added before. Fix: remove() it first.")
        if len(self._states) >= self._max_states:
            raise DetokenizerFullError(
                f"detokenizer add: {len(self._states)} requests are held, expected fewer than max_states={self._max_states}. "
                "Fix: remove() finished requests, lower the number of concurrent requests, or raise max_states."
            )
        pieces = self._tokenizer.pieces
        stream: ByteStream | OffsetStream
        if pieces is not None:
            stream = ByteStream(pieces, params.skip_special_tokens, prompt_token_ids)
        else:
            stream = OffsetStream(self._tokenizer, params.skip_special_tokens, prompt_token_ids)
        self._states[request_id] = _State(stream, params)

    def remove(self, request_id: str) -> None:
        """Forget a request; one that is not held is no error."""
        self._states.pop(request_id, None)

    def step(self, new_tokens: Sequence[NewTokens]) -> list[TextUpdate]:
        """Take the new tokens of one engine step.

        Args:
            new_tokens: (request_id, ids, finish_reason) for each request; a request appears at most once. With
                FinishReason.STOP the last id is the stop token. ids may be empty.
        Returns:
            one update for each entry, in order; none for a request whose text has already ended (its core was slower than
            its stop string).
        Raises:
            UnknownRequestError: a request was never added, or was removed. Nothing was taken from any entry then.
        """
        try:
            states = [self._states[entry[0]] for entry in new_tokens]
        except KeyError as error:
            raise UnknownRequestError(
                f"detokenizer step: request {error.args[0]!r} is not held. "
                "Fix: add() each request before its tokens come, and drop tokens of requests that were removed."
            ) from error
        if self._tokenizer.pieces is None:
            pairs = zip(new_tokens, states, strict=True)
            return self._step_offsets([(entry, state) for entry, state in pairs if not state.finished])
        updates: list[TextUpdate] = []
        for entry, state in zip(new_tokens, states, strict=True):
            if state.finished:
                continue
            stream = state.stream
            assert isinstance(stream, ByteStream)
            request_id, token_ids, finish_reason = entry
            if state.is_quick and len(token_ids) == 1 and finish_reason is FinishReason.RUNNING:
                # Nearly every entry of nearly every step. The general way below gives the same.
                text = stream.feed(token_ids[0])
                match = None
                if text and state.matcher is not None:
                    text, match = _show(state.matcher, text, state.params)
                if match is None:
                    updates.append(TextUpdate(request_id, text, tuple(token_ids), finish_reason))
                else:
                    state.finished = True
                    updates.append(TextUpdate(request_id, text, tuple(token_ids), FinishReason.STOP, match.stop))
                continue
            pieces = [stream.feed(token_id) for token_id in token_ids[: _num_visible(entry, state)]]
            tail = stream.flush() if finish_reason is not FinishReason.RUNNING else ""
            updates.append(_update(entry, state, pieces, tail))
        return updates

    def _step_offsets(self, live: list[tuple[NewTokens, _State]]) -> list[TextUpdate]:
        """All requests together: round n decodes the n-th new token of each, where single tokens matter."""
        visible = [list(entry[1][: _num_visible(entry, state)]) for entry, state in live]
        chunks = [
            [[token_id] for token_id in ids] if not state.is_plain else [ids][: len(ids)]
            for ids, (_, state) in zip(visible, live, strict=True)
        ]
        pieces: list[list[str]] = [[] for _ in live]
        for turn in range(max((len(parts) for parts in chunks), default=0)):
            rows = [row for row, parts in enumerate(chunks) if turn < len(parts)]
            streams = [_offset_stream(live[row][1]) for row in rows]
            for row, stream in zip(rows, streams, strict=True):
                stream.add(chunks[row][turn])
            for row, text in zip(rows, self._decode_windows(rows, live, final=False), strict=True):
                pieces[row].append(text)
        ended = [row for row, (entry, _) in enumerate(live) if entry[2] is not FinishReason.RUNNING]
        tails = dict(zip(ended, self._decode_windows(ended, live, final=True), strict=True))
        return [_update(entry, state, pieces[row], tails.get(row, "")) for row, (entry, state) in enumerate(live)]

    def _decode_windows(self, rows: list[int], live: list[tuple[NewTokens, _State]], final: bool) -> list[str]:
        """Decode the windows of these rows with one call to the library for each value of skip_special_tokens."""
        texts: dict[int, str] = {}
        for skip in (True, False):
            group = [row for row in rows if live[row][1].params.skip_special_tokens is skip]
            if not group:
                continue
            streams = [_offset_stream(live[row][1]) for row in group]
            windows = [window for stream in streams for window in stream.windows()]
            decoded = self._tokenizer.decode_batch(windows, skip_special_tokens=skip)
            for index, (row, stream) in enumerate(zip(group, streams, strict=True)):
                texts[row] = stream.accept(decoded[2 * index], decoded[2 * index + 1], final=final)
        return [texts[row] for row in rows]


def _offset_stream(state: _State) -> OffsetStream:
    assert isinstance(state.stream, OffsetStream)
    return state.stream


def _num_visible(entry: NewTokens, state: _State) -> int:
    """How many of the new tokens have text: a stop token is hidden unless the request wants to see what stopped it."""
    _, token_ids, finish_reason = entry
    hidden = finish_reason is FinishReason.STOP and not state.params.include_stop_str_in_output
    return max(0, len(token_ids) - 1) if hidden else len(token_ids)


def _update(entry: NewTokens, state: _State, pieces: list[str], tail: str) -> TextUpdate:
    """Texts of the new tokens, and of the end, to what may be shown."""
    request_id, token_ids, finish_reason = entry
    params = state.params
    ended = finish_reason is not FinishReason.RUNNING
    stop_reason: str | int | None = None
    num_counted = len(token_ids)
    if state.matcher is None:
        text = "".join(pieces) + tail
    else:
        text, match, num_matched = _match(state, state.matcher, pieces, tail, ended)
        if match is not None:
            finish_reason, ended = FinishReason.STOP, True
            stop_reason = match.stop
            num_counted = min(num_matched, len(token_ids))
    if finish_reason is FinishReason.STOP and stop_reason is None and token_ids and token_ids[-1] in params.stop_token_ids:
        stop_reason = token_ids[-1]
    state.num_tokens += num_counted
    state.finished = ended
    counted = tuple(token_ids[:num_counted])
    texts = _token_texts(pieces, tail, num_counted) if params.logprobs is not None else ()
    return TextUpdate(request_id, text, counted, finish_reason, stop_reason, texts)


def _show(matcher: StopMatcher, text: str, params: SamplingParams) -> tuple[str, StopMatch | None]:
    """The part of new text that may be shown, and the match that ends it."""
    found = matcher.feed(text)
    if isinstance(found, str):
        return found, None
    return (found.text_before + found.stop if params.include_stop_str_in_output else found.text_before), found


def _match(state: _State, matcher: StopMatcher, pieces: list[str], tail: str, ended: bool) -> tuple[str, StopMatch | None, int]:
    """Returns the text to show, the match if there is one, and how many tokens it took to get there."""
    shown: list[str] = []
    num_free = state.params.min_tokens - state.num_tokens  # tokens whose text may not stop anything yet
    for index, piece in enumerate([*pieces, tail] if ended else pieces):
        if not piece:
            continue
        if index < num_free:
            shown.append(piece)
            continue
        text, match = _show(matcher, piece, state.params)
        shown.append(text)
        if match is not None:
            return "".join(shown), match, index + 1
    if ended:
        shown.append(matcher.release())
    return "".join(shown), None, 0


def _token_texts(pieces: list[str], tail: str, num_tokens: int) -> tuple[str, ...]:
    texts = [*pieces[:num_tokens], *[""] * (num_tokens - len(pieces))]
    if tail and texts:
        texts[-1] += tail
    return tuple(texts)
