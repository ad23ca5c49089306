"""The tokenizer of a served model: text to ids and back, and its chat template."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer as BackendTokenizer

from tokenspeed_engine.tokenizer.chat_template import ChatTemplate
from tokenspeed_engine.tokenizer.errors import TemplateError, TokenizerError
from tokenspeed_engine.tokenizer.pieces import TokenPieces, longest_token, pieces_of


class Tokenizer:
    """Text to token ids and back. Immutable after construction; every method may be called from any thread.

    Attributes:
        source: where it came from, for messages.
        vocab_size: one more than the highest id that has a token. A model may have more logits than that.
        eos_token_ids: the ids that end a sequence, in ascending order.
        bos_token_id: the id that begins one, or None.
        special_token_ids: ids that skip_special_tokens leaves out.
        pieces: bytes of each token, or None where the decoder gives a token no bytes of its own.
    """

    def __init__(
        self,
        backend: BackendTokenizer,
        *,
        source: str,
        vocab_size: int | None = None,
        eos_token_ids: Iterable[int] = (),
        bos_token_id: int | None = None,
        chat_template: ChatTemplate | None = None,
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        added = backend.get_added_tokens_decoder()
        self._backend = backend
        self.source = source
        self.vocab_size = (
            vocab_size
            if vocab_size is not None
            else max([backend.get_vocab_size(with_added_tokens=True), *(token_id + 1 for token_id in added)])
        )
        self.eos_token_ids = tuple(sorted(set(eos_token_ids)))
        self.bos_token_id = bos_token_id
        self.special_token_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.pieces: TokenPieces | None = pieces_of(backend, self.special_token_ids, self.vocab_size)
        self._chat_template = chat_template
        self._longest_token: int | None = None

    @property
    def backend(self) -> BackendTokenizer:
        """The `tokenizers` object underneath. For a vocabulary that lacks bytes, its ids can pass vocab_size; ours cannot."""
        return self._backend

    @property
    def has_chat_template(self) -> bool:
        """Whether the model came with a chat template."""
        return self._chat_template is not None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Text to ids.

        Args:
            text: any text; the names of special tokens in it become these tokens.
            add_special_tokens: add what the model expects around a prompt, such as BOS. False for the text of a chat template,
                which writes them itself.
        Returns:
            ids, each in 0..vocab_size-1.
        Raises:
            TokenizerError: the text holds a lone surrogate.
        """
        try:
            # encode() keeps the interpreter's lock, for seconds with megabytes, and counts offsets that nobody reads.
            ids = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        except (TypeError, UnicodeEncodeError) as error:
            raise self._unencodable(text, error) from error
        return self._known(ids)

    def max_chars(self, num_tokens: int) -> int | None:
        """Most characters that a text of `num_tokens` tokens can have; None where that has no bound, or none that is known.

        It tells a text that cannot fit without tokenizing it, which takes seconds with megabytes.
        """
        if self._longest_token is None:
            self._longest_token = longest_token(self._backend) if self.pieces is not None else 0
        return num_tokens * self._longest_token if self._longest_token else None

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """Several texts to ids, in parallel. Raises TokenizerError as encode() does."""
        try:
            encodings = self._backend.encode_batch(list(texts), add_special_tokens=add_special_tokens)
        except (TypeError, UnicodeEncodeError) as error:
            raise self._unencodable(" ".join(texts), error) from error
        return [self._known(encoding.ids) for encoding in encodings]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Ids to text; bytes that are no UTF-8 become U+FFFD, ids without a token nothing.

        Args:
            ids: token ids.
            skip_special_tokens: leave special tokens out.
        Returns:
            the text.
        """
        if self.pieces is None:
            return str(self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens))
        table = self.pieces.visible if skip_special_tokens else self.pieces.all
        found = [table[token_id] for token_id in ids]
        raw = b"".join([piece if isinstance(piece, bytes) else piece.encode("utf-8") for piece in found])
        text = raw.decode("utf-8", "replace")
        return text[1:] if self.pieces.strips_first_space and text.startswith(" ") else text

    def decode_batch(self, batch: Sequence[Sequence[int]], skip_special_tokens: bool = True) -> list[str]:
        """Several sequences to text, each as decode() does."""
        if self.pieces is None:
            lists = [list(ids) for ids in batch]
            return list(self._backend.decode_batch(lists, skip_special_tokens=skip_special_tokens))
        return [self.decode(ids, skip_special_tokens) for ids in batch]

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that this token stands for, special or not; may be part of a character, empty for an unknown id."""
        if self.pieces is None:
            return str(self._backend.decode([token_id], skip_special_tokens=False)).encode("utf-8")
        piece = self.pieces.all[token_id]
        return piece if isinstance(piece, bytes) else piece.encode("utf-8")

    def token_text(self, token_id: int) -> str:
        """The token's bytes as text; part of a character becomes U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def token_name(self, token_id: int) -> str:
        """The token's name in the vocabulary, such as "Ġworld" or "<|im_end|>"; empty for an unknown id."""
        return self._backend.id_to_token(token_id) or "" if 0 <= token_id < self.vocab_size else ""

    def token_id(self, token: str) -> int | None:
        """The id of a token by its name in the vocabulary, such as "<|im_end|>", or None."""
        found = self._backend.token_to_id(token)
        return None if found is None or found >= self.vocab_size else int(found)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> str:
        """Messages to the text of a prompt; encode it with add_special_tokens=False.

        Args:
            messages: dicts with `role` and `content`, as the template expects them.
            tools: function tools in OpenAI's form, or None.
            add_generation_prompt: end with what opens the assistant's turn.
            kwargs: further variables of the template.
        Returns:
            the prompt.
        Raises:
            TemplateError: there is no template, or it refused the messages.
        """
        if self._chat_template is None:
            raise TemplateError(
                f"chat template: {self.source} has none. Fix: give one with --chat-template, or use /v1/completions."
            )
        return self._chat_template.render(messages, tools, add_generation_prompt, **kwargs)

    def _known(self, ids: list[int]) -> list[int]:
        # Ids past the vocabulary stand for bytes that it cannot express; see gguf_vocab.py.
        size = self.vocab_size
        return [token_id for token_id in ids if token_id < size] if ids and max(ids) >= size else ids

    @staticmethod
    def _unencodable(text: str, error: Exception) -> TokenizerError:
        surrogate = next((f"U+{ord(char):04X}" for char in text if 0xD800 <= ord(char) <= 0xDFFF), None)
        if surrogate is None:
            return TokenizerError(f"tokenizer encode: expected text, got {type(text).__name__}: {error}")
        return TokenizerError(
            f"tokenizer encode: expected Unicode text, got a lone surrogate {surrogate}. Fix: send well-formed Unicode."
        )
