"""How byte-level BPE vocabularies cut text into words, by the name that GGUF files carry in `tokenizer.ggml.pre`.

Each scheme is a list of regular expressions, applied one after the other: an expression cuts each piece that the one before
it left into its matches and the stretches between them. The expressions are facts of the models that were trained with them.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Regex, pre_tokenizers

from tokenspeed_engine.tokenizer.errors import UnsupportedTokenizerError

_CONTRACTIONS = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED_WORD = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+"
_CAPITALS = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_QWEN35 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
_TEKKEN = rf"{_CASED_WORD}|{_CAPITALS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
_O200K = (
    rf"{_CASED_WORD}{_CONTRACTIONS}?|{_CAPITALS}{_CONTRACTIONS}?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
)
_DEEPSEEK_V3_WORDS = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}"
)


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """One way of cutting text.

    Attributes:
        patterns: regular expressions (Oniguruma), applied in order.
        ignore_merges: a word that is itself a token is taken whole, whatever the merges say.
        add_bos: whether prompts begin with BOS when the file does not say.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False


_SMOLLM = PreTokenizer((r"\p{N}", _GPT2))
_PLAIN_GPT2 = PreTokenizer((_GPT2,))
_PLAIN_QWEN2 = PreTokenizer((_QWEN2,))
_PLAIN_LLAMA3 = PreTokenizer((_LLAMA3,), ignore_merges=True, add_bos=True)
_PLAIN_TEKKEN = PreTokenizer((_TEKKEN,), ignore_merges=True, add_bos=True)

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    "falcon": PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")),
    "gpt-2": _PLAIN_GPT2,
    "mpt": _PLAIN_GPT2,
    "olmo": _PLAIN_GPT2,
    "phi-2": _PLAIN_GPT2,
    "smollm": _SMOLLM,
    "starcoder": _SMOLLM,
    "refact": _SMOLLM,
    "command-r": _SMOLLM,
    "codeshell": _SMOLLM,
    "exaone": _SMOLLM,
    "qwen2": _PLAIN_QWEN2,
    "deepseek-r1-qwen": _PLAIN_QWEN2,
    "qwen35": PreTokenizer((_QWEN35,)),
    "llama-bpe": _PLAIN_LLAMA3,
    "llama3": _PLAIN_LLAMA3,
    "llama-v3": _PLAIN_LLAMA3,
    "falcon3": _PLAIN_LLAMA3,
    "pixtral": _PLAIN_LLAMA3,
    "dbrx": PreTokenizer((_LLAMA3,)),
    "smaug-bpe": PreTokenizer((_LLAMA3,)),
    "tekken": _PLAIN_TEKKEN,
    "gpt-4o": PreTokenizer((_O200K,)),
    "deepseek-v3": PreTokenizer((r"\p{N}{1,3}", "[一-龥\u3040-\u309f\u30a0-\u30ff]+", _DEEPSEEK_V3_WORDS)),
}


def pre_tokenizer_named(name: str) -> PreTokenizer:
    """The scheme of that name. Raises UnsupportedTokenizerError, with the names that are known."""
    found = PRE_TOKENIZERS.get(name)
    if found is None:
        known = ", ".join(sorted(PRE_TOKENIZERS))
        raise UnsupportedTokenizerError(
            f"tokenizer.ggml.pre: expected one of {known}; got {name!r}. "
            "Fix: serve the model from a folder with its tokenizer.json."
        )
    return found


def build_pre_tokenizer(scheme: PreTokenizer) -> pre_tokenizers.PreTokenizer:
    """The scheme as a `tokenizers` object: cut, then map bytes to the byte-level alphabet."""
    steps: list[pre_tokenizers.PreTokenizer] = [
        pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in scheme.patterns
    ]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    return pre_tokenizers.Sequence(steps)
