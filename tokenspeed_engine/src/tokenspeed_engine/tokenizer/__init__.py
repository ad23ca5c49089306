"""Text to token ids and back: loading, chat templates, incremental detokenizing."""

from tokenspeed_engine.tokenizer.chat_template import ChatTemplate
from tokenspeed_engine.tokenizer.detokenize import MAX_STATES, IncrementalDetokenizer, TextUpdate
from tokenspeed_engine.tokenizer.encode import Tokenizer
from tokenspeed_engine.tokenizer.errors import (
    DetokenizerError,
    DetokenizerFullError,
    TemplateError,
    TokenizerError,
    UnknownRequestError,
    UnsupportedTokenizerError,
)
from tokenspeed_engine.tokenizer.load import load_tokenizer

__all__ = [
    "MAX_STATES",
    "ChatTemplate",
    "DetokenizerError",
    "DetokenizerFullError",
    "IncrementalDetokenizer",
    "TemplateError",
    "TextUpdate",
    "Tokenizer",
    "TokenizerError",
    "UnknownRequestError",
    "UnsupportedTokenizerError",
    "load_tokenizer",
]
