"""Other tokenizers, and the vocabularies that ours is compared on. Imports them only when they are used."""

from __future__ import annotations

import base64
import collections
import contextlib
import itertools
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SPACE = "\u2581"
_SPM_CORPUS = (
    "the quick brown fox jumps over the lazy dog and then the other dog sleeps in the warm sun while the fox runs "
    "into the forest to find the river where the water is cold and clear and the trees are tall and green "
    "def return class import self print for in range while if else not and or none true false "
    "héllo wörld naïve façade 你好 世界 こんにちは 123 456 789 "
)


def gguf_fields(path: Path) -> dict[str, Any]:
    """The fields of a GGUF file that a vocabulary needs."""
    from tokenspeed_engine.checkpoint.gguf_metadata import read_gguf_metadata

    fields = read_gguf_metadata(path)
    return {key: value for key, value in fields.items() if not isinstance(value, list) or key.startswith("tokenizer.")}


def spm_fields() -> dict[str, Any]:
    """A small SentencePiece vocabulary: specials, 256 bytes, characters, then merges by frequency with falling scores."""
    words = [tuple(SPACE + word) for word in _SPM_CORPUS.split()]
    counts = collections.Counter(words)
    pieces: list[str] = []
    for _ in range(150):
        pairs: collections.Counter[tuple[str, str]] = collections.Counter()
        for word, count in counts.items():
            for pair in itertools.pairwise(word):
                pairs[pair] += count
        if not pairs:
            break
        left, right = min(pairs, key=lambda pair: (-pairs[pair], pair))
        pieces.append(left + right)
        counts = collections.Counter({_merged(word, left, right): count for word, count in counts.items()})
    letters = sorted({char for word in words for char in word})
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *dict.fromkeys(pieces), *letters]
    num_pieces = len(dict.fromkeys(pieces))
    scores = [0.0] * 259 + [float(-index) for index in range(num_pieces + len(letters))]
    types = [2, 3, 3, *[6] * 256, *[1] * (num_pieces + len(letters))]
    tokens += ["<|im_start|>", "<|im_end|>"]
    return {
        "general.architecture": "llama",
        "llama.block_count": 1,
        "llama.context_length": 128,
        "llama.embedding_length": 64,
        "llama.feed_forward_length": 64,
        "llama.attention.head_count": 1,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.dimension_count": 64,
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [*scores, 0.0, 0.0],
        "tokenizer.ggml.token_type": [*types, 3, 3],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


def _merged(word: tuple[str, ...], left: str, right: str) -> tuple[str, ...]:
    out: list[str] = []
    for piece in word:
        if out and out[-1] == left and piece == right:
            out[-1] = left + right
        else:
            out.append(piece)
    return tuple(out)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    # The library writes to the process's own standard error while it loads.
    sys.stderr.flush()
    saved = os.dup(2)
    with open(os.devnull, "w", encoding="utf-8") as nothing:
        os.dup2(nothing.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(saved, 2)
            os.close(saved)


class LlamaCppTokenizer:
    """The vocabulary of a GGUF file in llama.cpp."""

    def __init__(self, path: Path) -> None:
        import llama_cpp

        with _quiet():
            self._model = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)

    def encode(self, text: str) -> list[int]:
        """Text to ids, special tokens in the text included, without BOS."""
        return list(self._model.tokenize(text.encode("utf-8"), add_bos=False, special=True))


QWEN_PATTERN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN_SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
QWEN_CHAT_TEMPLATE = (
    "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


def qwen_ranks(path: Path) -> dict[bytes, int]:
    """The vocabulary of a .tiktoken file: a line for each token, base64 and rank."""
    lines = path.read_text(encoding="ascii").splitlines()
    return {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in lines)}


def write_qwen_folder(ranks: dict[bytes, int], folder: Path) -> Path:
    """The same vocabulary as a Hugging Face folder: tokenizer.json with merges, tokenizer_config.json with a chat template."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    from tokenspeed_engine.tokenizer.pieces import byte_alphabet

    letters = {byte: char for char, byte in byte_alphabet().items()}
    names = {token: "".join(letters[byte] for byte in token) for token in ranks}
    merges = [
        (names[token[:cut]], names[token[cut:]])
        for token in sorted(ranks, key=ranks.__getitem__)
        for cut in range(1, len(token))
        if token[:cut] in ranks and token[cut:] in ranks
    ]
    backend = Tokenizer(models.BPE(vocab={names[token]: rank for token, rank in ranks.items()}, merges=merges))
    split = pre_tokenizers.Split(Regex(QWEN_PATTERN), behavior="isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in QWEN_SPECIALS])
    backend.save(str(folder / "tokenizer.json"), pretty=False)
    config = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "chat_template": QWEN_CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [151645, 151643]}), encoding="utf-8")
    return folder
