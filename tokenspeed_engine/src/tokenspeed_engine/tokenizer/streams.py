"""One token at a time to text that is certain: what a stream may show now, and never has to take back.

Two ways, one behaviour. ByteStream works on the bytes of tokens and is exact at a constant cost for each token. OffsetStream
serves decoders that look at neighbouring tokens: it decodes a short window with and without the new tokens and takes the
difference (two offsets).

Both begin with the end of the prompt, so that a word's leading space is there and a character that the prompt began is
completed, and both leave the prompt's own text out.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Final

from tokenspeed_engine.tokenizer.encode import Tokenizer
from tokenspeed_engine.tokenizer.pieces import Piece, TokenPieces

REPLACEMENT: Final = "\ufffd"

# A UTF-8 character has at most 4 bytes, and a token at least one: the prompt's last 3 non-empty tokens can hold its beginning.
_MAX_PENDING_BYTES: Final = 3
# Tokens of the prompt that OffsetStream decodes for context. Two neighbours would do for the decoders that are known.
_SEED_TOKENS: Final = 6
# With no certain boundary for so many tokens the output is not text; the window moves on, so that its cost stays bounded.
_MAX_WINDOW_TOKENS: Final = 256


class ByteStream:
    """Incremental decoding for tokenizers whose tokens have bytes of their own.

    Args:
        pieces: the byte table.
        skip_special_tokens: leave special tokens out.
        prompt_token_ids: the prompt; only its end is read.
    """

    __slots__ = ("_at_start", "_pending", "_seed_bytes", "_table")

    def __init__(self, pieces: TokenPieces, skip_special_tokens: bool, prompt_token_ids: Sequence[int]) -> None:
        self._table: dict[int, Piece] = pieces.visible if skip_special_tokens else pieces.all
        self._pending, prompt_has_text = self._prompt_tail(prompt_token_ids)
        self._seed_bytes = len(self._pending)
        self._at_start = pieces.strips_first_space and not prompt_has_text

    def feed(self, token_id: int) -> str:
        """Add a token; returns the text that became certain."""
        piece = self._table[token_id]
        if isinstance(piece, str):
            if not self._pending and not self._at_start:
                return piece
            piece = piece.encode("utf-8")
        if not piece:
            return ""
        if self._seed_bytes or self._at_start:
            return self._first_text(piece, final=False)
        data = self._pending + piece
        text, used = codecs.utf_8_decode(data, "replace", False)
        self._pending = data[used:]
        return text

    def flush(self) -> str:
        """The end: bytes that never became a character come out as U+FFFD."""
        return self._first_text(b"", final=True)

    def _first_text(self, new: bytes, final: bool) -> str:
        """What feed() does, with what the beginning needs: the prompt's unfinished character, and no leading space."""
        data = self._pending + new
        text, used = codecs.utf_8_decode(data, "replace", final)
        self._pending = data[used:]
        if self._seed_bytes and used:
            text = self._without_prompt(data, text, final)
        if self._at_start and text:
            self._at_start = False
            text = text.removeprefix(" ")
        return text

    def _without_prompt(self, data: bytes, text: str, final: bool) -> str:
        """Drop a first U+FFFD when the bytes behind it are all the prompt's: the prompt's fault is not the output's text."""
        following = codecs.utf_8_decode(data[self._seed_bytes :], "replace", final)[0]
        self._seed_bytes = 0
        # Output bytes that belong to the faulty character would make `following` begin with faults of its own.
        return following if text == REPLACEMENT + following else text

    def _prompt_tail(self, prompt_token_ids: Sequence[int]) -> tuple[bytes, bool]:
        """The bytes of an unfinished character at the prompt's end, and whether the prompt has any text."""
        tail = b""
        for token_id in reversed(prompt_token_ids):
            piece = self._table[token_id]
            tail = (piece if isinstance(piece, bytes) else piece.encode("utf-8")) + tail
            if len(tail) > _MAX_PENDING_BYTES:
                break
        _, used = codecs.utf_8_decode(tail, "replace", False)
        return tail[used:], bool(tail)


class OffsetStream:
    """Incremental decoding through the library, by the difference of two decoded windows.

    The caller decodes, so that it can do so for many streams at once:
    `add(ids)`, then `text = accept(*decode_batch(windows()))`, and at the end `accept(..., final=True)`.

    Args:
        tokenizer: names of byte tokens and special ids are looked up here.
        skip_special_tokens: leave special tokens out.
        prompt_token_ids: the prompt; only its end is read.
    """

    __slots__ = ("_hidden", "_read", "_sent", "_tokenizer", "_window")

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool, prompt_token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._hidden = tokenizer.special_token_ids if skip_special_tokens else frozenset()
        self._window: list[int] = []
        for token_id in reversed(prompt_token_ids):
            if len(self._window) == _SEED_TOKENS:
                break
            if token_id not in self._hidden:
                self._window.append(token_id)
        self._window.reverse()
        self._read = len(self._window)  # tokens of the window whose text is out
        self._sent = 0  # characters of the text after them that are out as well

    def add(self, token_ids: Sequence[int]) -> None:
        """Take new tokens. Hidden ones leave no trace: decoders join or part words by the neighbours that they see."""
        self._window.extend(token_id for token_id in token_ids if token_id not in self._hidden)

    def windows(self) -> tuple[list[int], list[int]]:
        """The two sequences to decode: the tokens whose text is out, and all of the window."""
        return self._window[: self._read], self._window

    def accept(self, old_text: str, whole_text: str, final: bool = False) -> str:
        """Take the two decoded windows; returns the text that became certain, or with `final` all that is left."""
        new = whole_text[len(old_text) :]
        overlong = len(self._window) > _MAX_WINDOW_TOKENS
        if final or overlong:
            end = len(new)
        elif self._ends_in_byte_token():
            return ""
        else:
            faults = len(new) - len(new.rstrip(REPLACEMENT))
            end = len(new) - min(faults, _MAX_PENDING_BYTES)
        delta = new[self._sent : end]
        if overlong:
            del self._window[:-_SEED_TOKENS]
        if overlong or (new and end == len(new) and not new.endswith(REPLACEMENT)):
            if not overlong:
                del self._window[: self._read]
            self._read = len(self._window)
            self._sent = 0
        else:
            self._sent = max(self._sent, end)
        return delta

    def _ends_in_byte_token(self) -> bool:
        # A run of byte tokens is decoded as one: a later byte can spoil the characters before it.
        if len(self._window) == self._read:
            return False
        name = self._tokenizer.token_name(self._window[-1])
        return len(name) == 6 and name.startswith("<0x") and name.endswith(">")
