"""Character offsets of tokens, against decoding each prefix as a whole."""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tokenspeed_engine.server.token_text import (
    OffsetCounter,
    complete_text,
    counter_after,
    id_prompt_offsets,
    shown_key,
    shown_text,
    text_prompt_offsets,
)

TEXTS = st.text(alphabet="aé🌶漢 \n👩‍B", max_size=24)


class PieceCodec:
    """A vocabulary that is written out: id to bytes. The rest is what the real tokenizer does with such bytes."""

    def __init__(self, pieces: Sequence[bytes], special: Sequence[int] = ()) -> None:
        self._pieces = pieces
        self.special_token_ids = frozenset(special)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        raise NotImplementedError

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        shown = [i for i in ids if not (skip_special_tokens and i in self.special_token_ids)]
        return b"".join(self._pieces[i] for i in shown).decode("utf-8", "replace").removeprefix(" ")

    def token_bytes(self, token_id: int) -> bytes:
        return self._pieces[token_id]

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> str:
        raise NotImplementedError


def num_whole_chars(raw: bytes) -> int:
    return len(codecs.utf_8_decode(raw, "replace", False)[0])


@settings(max_examples=200, deadline=None)
@given(text=TEXTS)
def test_text_prompts(tokenizer: Any, text: str) -> None:
    ids = tokenizer.encode(text)
    pieces = [tokenizer.token_bytes(i) for i in ids]
    expected = [num_whole_chars(b"".join(pieces[:n])) for n in range(len(ids))]
    assert text_prompt_offsets(text, ids, tokenizer) == expected
    assert id_prompt_offsets(text, ids, tokenizer, True) == expected


@settings(max_examples=200, deadline=None)
@given(before=TEXTS, after=TEXTS, cut=st.integers(0, 40))
def test_generated_tokens_go_on_from_the_prompt(tokenizer: Any, before: str, after: str, cut: int) -> None:
    ids = tokenizer.encode(before + after)
    prompt, generated = ids[:cut], ids[cut:]
    base = len(complete_text(prompt, tokenizer, True))
    counter = counter_after(prompt, tokenizer, True)
    pieces = [tokenizer.token_bytes(i) for i in ids]
    for n, token_id in enumerate(generated, len(prompt)):
        assert base + counter.advance(token_id) == num_whole_chars(b"".join(pieces[:n]))


def test_bos_and_the_space_of_sentencepiece_take_no_room() -> None:
    codec = PieceCodec([b"<s>", b" Hello", b" world", b"<s", b">"], special=[0])
    assert text_prompt_offsets("Hello world", [0, 1, 2], codec) == [0, 0, 5]
    assert id_prompt_offsets("Hello world", [0, 1, 2], codec, True) == [0, 0, 5]
    # The same name in the text itself does take room.
    assert text_prompt_offsets("<s> Hello", [0, 1], codec) == [0, 3]


def test_a_normalized_text_keeps_offsets_inside() -> None:
    codec = PieceCodec(["é".encode(), b"x"])
    decomposed = "e\u0301x"
    assert text_prompt_offsets(decomposed, [0, 1], codec) == [0, 1]
    assert text_prompt_offsets("x", [0, 0, 1], codec) == [0, 1, 1]


def test_a_characters_beginning_that_nothing_completes_is_the_prompts() -> None:
    codec = PieceCodec([b"\xf0\x9f", b"o", b"\x8c", b"\xb6", b"<e>"], special=[4])
    assert complete_text([1, 0], codec, True) == "o"
    counter = counter_after([1, 0], codec, True)
    assert [counter.advance(i) for i in (1, 1)] == [0, 1]
    counter = counter_after([1, 0], codec, True)
    assert [counter.advance(i) for i in (2, 3, 1)] == [0, 0, 1]
    # A hidden token between the parts of a character does not part it.
    counter = counter_after([0, 4], codec, True)
    assert [counter.advance(i) for i in (2, 4, 3, 1)] == [0, 0, 0, 1]


def test_a_broken_character_is_one_character() -> None:
    codec = PieceCodec([b"\xf0\x9f", b"o", b"\x8c", b"\xff"])
    counter = OffsetCounter(codec, True)
    ids = (0, 1, 0, 2, 0, 1, 3, 1)
    decoded = "\ufffdo\ufffd\ufffdo\ufffdo"
    assert b"".join(codec.token_bytes(i) for i in ids).decode("utf-8", "replace") == decoded
    assert [counter.advance(i) for i in ids] == [0, 1, 2, 2, 3, 4, 5, 6]
    # The prompt's own broken character is not the answer's; one that the answer went on with is.
    counter = counter_after([0], codec, True)
    assert [counter.advance(i) for i in (0, 1)] == [0, 1]
    counter = counter_after([0], codec, True)
    assert [counter.advance(i) for i in (2, 1, 1)] == [0, 1, 2]


def test_special_tokens() -> None:
    codec = PieceCodec([b"a", b"<|x|>"], special=[1])
    hidden, shown = OffsetCounter(codec, True), OffsetCounter(codec, False)
    assert [hidden.advance(i) for i in (0, 1, 0)] == [0, 1, 1]
    assert [shown.advance(i) for i in (0, 1, 0)] == [0, 1, 6]


def test_tokens_are_shown_without_loss() -> None:
    assert shown_key(b"ab") == "ab"
    assert shown_key(b"\xf0\x9f") == "bytes:\\xf0\\x9f"
    assert shown_text(b"\xf0\x9f") == "\ufffd"
