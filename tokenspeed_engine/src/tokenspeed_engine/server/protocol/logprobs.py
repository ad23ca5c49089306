"""Log-probabilities as the two API dialects spell them."""

from __future__ import annotations

import msgspec


class ChatTopLogprob(msgspec.Struct):
    """One of the most likely tokens at a position.

    Attributes:
        token: its text; U+FFFD stands for bytes that are not a whole character.
        logprob: natural logarithm of its probability; -9999.0 where it is lower than that.
        bytes: its exact bytes.
    """

    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(msgspec.Struct):
    """The chosen token at a position, and the most likely ones, best first."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[ChatTopLogprob]


class ChatLogprobs(msgspec.Struct):
    """`choices[].logprobs` of a chat completion.

    Attributes:
        content: one entry for each token of the text.
        refusal: always null; refusals are not a separate channel here.
    """

    content: list[ChatTokenLogprob]
    refusal: None = None


class CompletionLogprobs(msgspec.Struct):
    """`choices[].logprobs` of a text completion: four parallel lists.

    Attributes:
        text_offset: where each token begins in `text`, in characters; over a whole stream, in the joined text.
        token_logprobs: null for the first token of an echoed prompt.
        tokens: token texts; "bytes:\\xNN..." for bytes that are not whole characters.
        top_logprobs: token text to log-probability, the chosen token included; null for the first token of an echoed
            prompt.
    """

    text_offset: list[int] = msgspec.field(default_factory=list)
    token_logprobs: list[float | None] = msgspec.field(default_factory=list)
    tokens: list[str] = msgspec.field(default_factory=list)
    top_logprobs: list[dict[str, float] | None] = msgspec.field(default_factory=list)
