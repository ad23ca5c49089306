"""What each token id stands for, as bytes: the basis of exact and cheap decoding.

Two families of decoders give a token the same bytes wherever it stands: byte-level BPE (GPT-2's alphabet) and SentencePiece
with byte fallback. For these, text is the UTF-8 decoding of the joined bytes, and a stream can be decoded one token at a
time at a cost that does not depend on its length. All other decoders go through the library.
"""

from __future__ import annotations

import json
from typing import Any

from tokenizers import Tokenizer as BackendTokenizer

SPACE_MARK = "\u2581"

Piece = str | bytes


def byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins: character to byte. Bytes that print stand for themselves; the others follow from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    alphabet.update({chr(0x100 + index): byte for index, byte in enumerate(others)})
    return alphabet


_ALPHABET = byte_alphabet()


def _byte_level_bytes(token: str) -> bytes:
    # A token with a character outside the alphabet was added as plain text.
    try:
        return bytes([_ALPHABET[char] for char in token])
    except KeyError:
        return token.encode("utf-8")


def _sentencepiece_bytes(token: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes([int(token[3:5], 16)])
        except ValueError:
            pass
    return token.replace(SPACE_MARK, " ").encode("utf-8")


class TokenPieces:
    """Bytes of each token, worked out once for each id that is asked for.

    Attributes:
        strips_first_space: whether the decoder drops one space at the beginning of a text.
        visible: id to piece with special tokens left out.
        all: id to piece with special tokens.
    A piece is a str where the token is whole characters by itself, else bytes. An id without a token is an empty piece.
    """

    __slots__ = ("all", "strips_first_space", "visible")

    def __init__(
        self, backend: BackendTokenizer, special_ids: frozenset[int], vocab_size: int, *, sentencepiece: bool, strips: bool
    ) -> None:
        self.strips_first_space = strips
        self.all = _PieceTable(backend, frozenset(), vocab_size, sentencepiece)
        self.visible = _PieceTable(backend, special_ids, vocab_size, sentencepiece)


class _PieceTable(dict[int, Piece]):
    """A dict that fills itself: the hot path is one look-up. Holds at most one entry for each id of the vocabulary."""

    __slots__ = ("_backend", "_hidden", "_sentencepiece", "_vocab_size")

    def __init__(self, backend: BackendTokenizer, hidden: frozenset[int], vocab_size: int, sentencepiece: bool) -> None:
        super().__init__()
        self._backend = backend
        self._hidden = hidden
        self._vocab_size = vocab_size
        self._sentencepiece = sentencepiece

    def __missing__(self, token_id: int) -> Piece:
        token = self._backend.id_to_token(token_id) if 0 <= token_id < self._vocab_size else None
        if token is None:
            return ""  # not kept: ids outside the vocabulary would let the table grow without bound
        raw = b""
        if token_id not in self._hidden:
            raw = _sentencepiece_bytes(token) if self._sentencepiece else _byte_level_bytes(token)
        piece: Piece
        try:
            piece = raw.decode("utf-8")
        except UnicodeDecodeError:
            piece = raw
        self[token_id] = piece
        return piece


def pieces_of(backend: BackendTokenizer, special_ids: frozenset[int], vocab_size: int) -> TokenPieces | None:
    """The byte table of a tokenizer, or None when its decoder gives a token no bytes of its own."""
    decoder = backend.decoder
    if decoder is None:
        return None
    state: dict[str, Any] = json.loads(decoder.__getstate__())
    steps = state["decoders"] if state["type"] == "Sequence" else [state]
    names = [step["type"] for step in steps]
    if names == ["ByteLevel"]:
        return TokenPieces(backend, special_ids, vocab_size, sentencepiece=False, strips=False)
    if names[:3] == ["Replace", "ByteFallback", "Fuse"] and names[3:] in ([], ["Strip"]):
        replaces = steps[0]["pattern"] == {"String": SPACE_MARK} and steps[0]["content"] == " "
        strip = steps[3] if len(steps) == 4 else None
        strips_one = strip is None or (strip["content"] == " " and strip["start"] == 1 and strip["stop"] == 0)
        if replaces and strips_one:
            return TokenPieces(backend, special_ids, vocab_size, sentencepiece=True, strips=strip is not None)
    return None


# Unicode: NFC joins at most four code points into one.
_JOINED_CODE_POINTS = {"NFC": 4}


def longest_token(backend: BackendTokenizer) -> int:
    """Most characters of a text that one token of a byte-level tokenizer takes up; 0 where there is no such bound.

    A normalizer may drop or join characters, an added token may swallow the spaces around it, and an unknown token stands for
    whatever the vocabulary lacks.
    """
    vocabulary: dict[str, int] = backend.get_vocab(with_added_tokens=True)
    swallows = any(token.lstrip or token.rstrip for token in backend.get_added_tokens_decoder().values())
    normalizer = backend.normalizer
    joined = 1 if normalizer is None else _JOINED_CODE_POINTS.get(json.loads(normalizer.__getstate__())["type"], 0)
    if swallows or not _ALPHABET.keys() <= vocabulary.keys():
        return 0
    return joined * max(len(_byte_level_bytes(token)) for token in vocabulary)
