"""Where tokens begin in a text, and how single tokens are shown."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from itertools import pairwise

from tokenspeed_engine.server.engine_client import TextCodec

# No UTF-8 character is longer.
_MAX_CHARACTER_BYTES = 4


class OffsetCounter:
    """Counts characters while tokens go by, as joined bytes decode: a token inside a character begins where that does.

    Args:
        codec: the tokenizer.
        skip_special_tokens: special tokens take no room.
        unfinished: bytes of a character that the text before the first token left incomplete.
    """

    def __init__(self, codec: TextCodec, skip_special_tokens: bool, unfinished: bytes = b"") -> None:
        self._codec = codec
        self._hidden = codec.special_token_ids if skip_special_tokens else frozenset()
        self._unfinished = unfinished
        self._num_foreign = len(unfinished)
        self._num_chars = 0

    def advance(self, token_id: int) -> int:
        """Take the next token; returns the number of characters before the one that it begins in."""
        if token_id in self._hidden:
            return self._num_chars
        new = self._codec.token_bytes(token_id)
        if self._unfinished and _breaks(self._unfinished, new[:1]):
            # The unfinished character becomes a U+FFFD of its own; one that is all the earlier text's is not counted here.
            self._num_chars += len(self._unfinished) > self._num_foreign
            self._unfinished = b""
            self._num_foreign = 0
        start = self._num_chars
        data = self._unfinished + new
        text, num_used = codecs.utf_8_decode(data, "replace", False)
        self._unfinished = data[num_used:]
        self._num_chars += len(text)
        if num_used:
            self._num_foreign = 0
        return start

    @property
    def unfinished(self) -> bytes:
        """The bytes of the last character, while it is incomplete."""
        return self._unfinished


def _breaks(unfinished: bytes, following: bytes) -> bool:
    """Whether the next byte neither goes on with the unfinished character nor completes it."""
    try:
        codecs.utf_8_decode(unfinished + following, "strict", False)
    except UnicodeDecodeError:
        return True
    return False


def counter_after(prompt_token_ids: Sequence[int], codec: TextCodec, skip_special_tokens: bool) -> OffsetCounter:
    """A counter for what is generated after a prompt: a character that the prompt leaves incomplete goes on."""
    hidden = codec.special_token_ids if skip_special_tokens else frozenset()
    tail = b""
    for token_id in reversed(prompt_token_ids):
        if token_id not in hidden:
            tail = codec.token_bytes(token_id) + tail
        if len(tail) >= _MAX_CHARACTER_BYTES:
            break
    num_used = codecs.utf_8_decode(tail, "replace", False)[1]
    return OffsetCounter(codec, skip_special_tokens, tail[num_used:])


def text_prompt_offsets(text: str, token_ids: Sequence[int], codec: TextCodec) -> list[int]:
    """Character offset of each token of a tokenized text.

    Tokens are laid along the text's bytes; one that is not there (BOS and the like) takes no room, and one that a
    normalizer changed takes its own length.
    """
    raw = text.encode("utf-8")
    position = 0
    starts = []
    for token_id in token_ids:
        starts.append(position)
        piece = codec.token_bytes(token_id)
        if raw.startswith(piece, position):
            position += len(piece)
        elif token_id in codec.special_token_ids:
            continue
        elif position == 0 and piece.startswith(b" ") and raw.startswith(piece[1:]):
            # SentencePiece puts a space before the text.
            position = len(piece) - 1
        else:
            position = min(len(raw), position + len(piece))
    return _character_indices(raw, starts)


def id_prompt_offsets(text: str, token_ids: Sequence[int], codec: TextCodec, skip_special_tokens: bool) -> list[int]:
    """Character offset of each token of a prompt that came as ids, in its decoded text."""
    counter = OffsetCounter(codec, skip_special_tokens)
    starts = [counter.advance(token_id) for token_id in token_ids]
    first = next((i for i in token_ids if not (skip_special_tokens and i in codec.special_token_ids)), None)
    if first is not None and codec.token_bytes(first).startswith(b" ") and not text.startswith(" "):
        # The decoder strips the space that SentencePiece puts before a text.
        starts = [max(0, start - 1) for start in starts]
    return [min(start, len(text)) for start in starts]


def complete_text(token_ids: Sequence[int], codec: TextCodec, skip_special_tokens: bool) -> str:
    """The decoded ids without an incomplete last character: the text that generation goes on from."""
    text = codec.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
    return text.removesuffix("\ufffd") if counter_after(token_ids, codec, skip_special_tokens).unfinished else text


def _character_indices(raw: bytes, positions: Sequence[int]) -> list[int]:
    # Ascending byte positions to character indices: the number of characters that begin before each position, less one
    # where the position is inside a character.
    indices = []
    num_chars = 0
    for before, position in pairwise([0, *positions]):
        num_chars += sum((byte & 0xC0) != 0x80 for byte in raw[before:position])
        inside = position < len(raw) and (raw[position] & 0xC0) == 0x80
        indices.append(num_chars - 1 if inside else num_chars)
    return indices


def shown_text(raw: bytes) -> str:
    """A token for chat logprobs: U+FFFD for bytes that are no whole character (the exact bytes stand beside it)."""
    return raw.decode("utf-8", "replace")


def shown_key(raw: bytes) -> str:
    r"""A token for completions logprobs, where it is a key too: `bytes:\xNN...` for bytes that are no whole character."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
