"""What can go wrong between text and token ids."""

from __future__ import annotations


class TokenizerError(ValueError):
    """A tokenizer cannot be loaded, or cannot work on this input. The text is meant for the user."""


class UnsupportedTokenizerError(TokenizerError):
    """The tokenizer is of a kind that is not supported; the message names it and what is."""


class TemplateError(TokenizerError):
    """A chat template is missing, does not compile, or refused the messages; the message holds its reason."""


class DetokenizerError(RuntimeError):
    """The detokenizer was used against its contract; the message says what to do."""


class DetokenizerFullError(DetokenizerError):
    """No state is free for one more request."""


class UnknownRequestError(DetokenizerError):
    """Tokens came for a request that has no state."""
