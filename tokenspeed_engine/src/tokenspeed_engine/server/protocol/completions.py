"""`POST /v1/completions`."""

from __future__ import annotations

from typing import Literal

import msgspec

from tokenspeed_engine.server.protocol.logprobs import CompletionLogprobs
from tokenspeed_engine.server.protocol.sampling import SamplingFields
from tokenspeed_engine.server.protocol.usage import Usage


class CompletionRequest(SamplingFields, kw_only=True, forbid_unknown_fields=True):
    """Body of a text completion.

    Attributes:
        prompt: a text, token ids, or a list of one of them.
        echo: begin the text of each choice with the prompt.
        logprobs: how many alternatives to report for each token; with echo, for prompt tokens too.
        best_of: accepted only when equal to n.
    """

    prompt: str | list[str | int | list[int]]
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None


class CompletionChoice(msgspec.Struct, kw_only=True):
    """One text. `stop_reason` is an extension, sent with finish_reason: the stop string or token id that ended it, or null."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | msgspec.UnsetType | None = msgspec.UNSET


class Completion(msgspec.Struct, kw_only=True):
    """The answer to a request without `stream`."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage


class CompletionChunk(msgspec.Struct, kw_only=True):
    """One event of a stream. `usage` is absent unless include_usage was set; then it is null in all chunks but the last."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET
