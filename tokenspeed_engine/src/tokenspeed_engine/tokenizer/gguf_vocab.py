"""A tokenizer from the metadata of a GGUF file.

Two of the vocabularies that `tokenizer.ggml.model` can name are built: "gpt2" (byte-level BPE with merges) and "llama"
(SentencePiece BPE with scores and byte fallback). Others are refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken, decoders, models, normalizers, processors
from tokenizers import Tokenizer as BackendTokenizer

from tokenspeed_engine.tokenizer.chat_template import ChatTemplate
from tokenspeed_engine.tokenizer.encode import Tokenizer
from tokenspeed_engine.tokenizer.errors import TokenizerError, UnsupportedTokenizerError
from tokenspeed_engine.tokenizer.pieces import SPACE_MARK, byte_alphabet
from tokenspeed_engine.tokenizer.pretokenizers import PreTokenizer, build_pre_tokenizer, pre_tokenizer_named

# tokenizer.ggml.token_type
_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 2, 3, 4, 5, 6

# Control tokens that end a turn. Files written before eot_token_id existed name them in the vocabulary alone.
_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>", "<EOT>")
_EOS_KEYS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
_NAMED_TOKENS = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
    "pad_token": "tokenizer.ggml.padding_token_id",
}
_TEMPLATE_PREFIX = "tokenizer.chat_template"


def tokenizer_from_gguf(metadata: Mapping[str, Any], source: str, chat_template: str | None = None) -> Tokenizer:
    """Build the tokenizer that a GGUF file describes.

    Args:
        metadata: the file's key/value pairs.
        source: the file's name, for messages.
        chat_template: a template to use in place of the file's own.
    Returns:
        Tokenizer.
    Raises:
        UnsupportedTokenizerError: the model or pre-tokenizer name is not known.  TokenizerError: keys are missing or disagree.
        TemplateError: the template does not compile.
    Source: the GGUF specification, "tokenizer" keys.
    """
    vocabulary = _Vocabulary(metadata, source)
    model = vocabulary.required("tokenizer.ggml.model", str)
    if model == "gpt2":
        backend = _byte_level_bpe(vocabulary)
    elif model == "llama":
        backend = _sentencepiece_bpe(vocabulary)
    else:
        raise UnsupportedTokenizerError(
            f"tokenizer.ggml.model of {source}: expected gpt2 or llama, got {model!r}. "
            "Fix: serve the model from a folder with its tokenizer.json."
        )
    names = {name: vocabulary.token_at(key) for name, key in _NAMED_TOKENS.items() if key in metadata}
    templates = {"default": chat_template} if chat_template is not None else _templates(metadata)
    return Tokenizer(
        backend,
        source=source,
        vocab_size=len(vocabulary.tokens),
        eos_token_ids=vocabulary.eos_ids(),
        bos_token_id=vocabulary.optional_id("tokenizer.ggml.bos_token_id"),
        chat_template=ChatTemplate(templates, names, source) if templates else None,
    )


def _templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    named = {
        key.removeprefix(_TEMPLATE_PREFIX).lstrip(".") or "default": text
        for key, text in metadata.items()
        if key.startswith(_TEMPLATE_PREFIX) and isinstance(text, str)
    }
    return named if "default" in named else {}


class _Vocabulary:
    """The tokenizer keys of the file, with types and lengths checked."""

    def __init__(self, metadata: Mapping[str, Any], source: str) -> None:
        self.metadata = metadata
        self.source = source
        self.tokens: list[str] = self.required("tokenizer.ggml.tokens", list)
        if not self.tokens or not all(isinstance(token, str) for token in self.tokens):
            raise TokenizerError(f"tokenizer.ggml.tokens of {source}: expected a list of strings, got none")
        self.types: list[int] = metadata.get("tokenizer.ggml.token_type", [1] * len(self.tokens))
        if len(self.types) != len(self.tokens):
            raise TokenizerError(
                f"tokenizer.ggml.token_type of {source}: expected {len(self.tokens)} entries, got {len(self.types)}"
            )
        self.ids = {token: token_id for token_id, token in enumerate(self.tokens)}

    def required(self, key: str, kind: type) -> Any:
        value = self.metadata.get(key)
        if not isinstance(value, kind):
            got = "nothing" if value is None else type(value).__name__
            raise TokenizerError(
                f"{key} of {self.source}: expected {kind.__name__}, got {got}. Fix: use a GGUF file with its tokenizer."
            )
        return value

    def optional_id(self, key: str) -> int | None:
        token_id = self.metadata.get(key)
        if token_id is None:
            return None
        if not isinstance(token_id, int) or not 0 <= token_id < len(self.tokens):
            raise TokenizerError(f"{key} of {self.source}: expected an id in 0..{len(self.tokens) - 1}, got {token_id!r}")
        return token_id

    def token_at(self, key: str) -> str:
        token_id = self.optional_id(key)
        return "" if token_id is None else self.tokens[token_id]

    def eos_ids(self) -> set[int]:
        ids = {self.optional_id(key) for key in _EOS_KEYS}
        ids.update(self.ids[name] for name in _TURN_ENDS if name in self.ids and self.types[self.ids[name]] == _CONTROL)
        return {token_id for token_id in ids if token_id is not None}

    def added_tokens(self) -> list[AddedToken]:
        """Tokens that are found in the text before anything else is done to it; control tokens are special."""
        return [
            AddedToken(token, special=kind != _USER_DEFINED, normalized=False)
            for token, kind in zip(self.tokens, self.types, strict=True)
            if kind in (_CONTROL, _USER_DEFINED, _UNKNOWN) and token
        ]

    def finish(self, backend: BackendTokenizer, add_bos: bool) -> BackendTokenizer:
        """Add the special tokens, and BOS and EOS around a prompt where the file asks for them."""
        backend.add_tokens(self.added_tokens())
        first = self.optional_id("tokenizer.ggml.bos_token_id")
        last = self.optional_id("tokenizer.ggml.eos_token_id")
        begins = self.metadata.get("tokenizer.ggml.add_bos_token", add_bos) and first is not None
        ends = self.metadata.get("tokenizer.ggml.add_eos_token", False) and last is not None
        if begins or ends:
            around = [(self.tokens[i], i) for i, used in ((first, begins), (last, ends)) if used and i is not None]
            single = f"{'BOS ' if begins else ''}$A{' EOS' if ends else ''}"
            names = {"BOS": self.tokens[first or 0], "EOS": self.tokens[last or 0]}
            template = " ".join(names.get(part, part) for part in single.split())
            backend.post_processor = processors.TemplateProcessing(single=template, special_tokens=around)
        return backend


def _byte_level_bpe(vocabulary: _Vocabulary) -> BackendTokenizer:
    scheme: PreTokenizer = pre_tokenizer_named(vocabulary.metadata.get("tokenizer.ggml.pre", "default"))
    merges: list[tuple[str, str]] = []
    for index, merge in enumerate(vocabulary.required("tokenizer.ggml.merges", list)):
        left, _, right = merge.partition(" ") if isinstance(merge, str) else ("", "", "")
        if not left or not right:
            raise TokenizerError(
                f"tokenizer.ggml.merges[{index}] of {vocabulary.source}: expected two parts with a space between, got {merge!r}"
            )
        if left in vocabulary.ids and right in vocabulary.ids and left + right in vocabulary.ids:
            merges.append((left, right))
    ids = dict(vocabulary.ids)
    # A vocabulary may lack some of the 256 bytes. The library would drop such a byte before merging and so join its
    # neighbours; ids past the end keep them apart, and Tokenizer leaves these ids out of what it returns.
    for char in byte_alphabet():
        ids.setdefault(char, len(ids))
    backend = BackendTokenizer(models.BPE(vocab=ids, merges=merges, ignore_merges=scheme.ignore_merges))
    backend.pre_tokenizer = build_pre_tokenizer(scheme)
    backend.decoder = decoders.ByteLevel()
    return vocabulary.finish(backend, scheme.add_bos)


def _sentencepiece_bpe(vocabulary: _Vocabulary) -> BackendTokenizer:
    scores = vocabulary.required("tokenizer.ggml.scores", list)
    if len(scores) != len(vocabulary.tokens):
        raise TokenizerError(
            f"tokenizer.ggml.scores of {vocabulary.source}: expected {len(vocabulary.tokens)} entries, got {len(scores)}"
        )
    unknown = vocabulary.optional_id("tokenizer.ggml.unknown_token_id")
    backend = BackendTokenizer(
        models.BPE(
            vocab=vocabulary.ids,
            merges=_merges_by_score(vocabulary, scores),
            unk_token=None if unknown is None else vocabulary.tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = bool(vocabulary.metadata.get("tokenizer.ggml.add_space_prefix", True))
    steps: list[normalizers.Normalizer] = [normalizers.Prepend(SPACE_MARK)] if prefix else []
    backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE_MARK)])
    chain: list[decoders.Decoder] = [decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        chain.append(decoders.Strip(" ", 1, 0))
    backend.decoder = decoders.Sequence(chain)
    return vocabulary.finish(backend, add_bos=True)


def _merges_by_score(vocabulary: _Vocabulary, scores: list[float]) -> list[tuple[str, str]]:
    """Every way to make a token of two others, best score first: what SentencePiece's BPE does without a list of merges."""
    ids, types = vocabulary.ids, vocabulary.types
    plain = {token for token, token_id in ids.items() if types[token_id] not in (_CONTROL, _UNKNOWN, _BYTE, _UNUSED)}
    found: list[tuple[float, int, int, str, str]] = []
    for token in plain:
        token_id = ids[token]
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in plain and right in plain:
                found.append((-scores[token_id], ids[left], ids[right], left, right))
    found.sort()
    return [(left, right) for _, _, _, left, right in found]
