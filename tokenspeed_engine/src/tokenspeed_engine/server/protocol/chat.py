"""`POST /v1/chat/completions`."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from tokenspeed_engine.server.protocol.logprobs import ChatLogprobs
from tokenspeed_engine.server.protocol.sampling import SamplingFields
from tokenspeed_engine.server.protocol.usage import Usage


class ContentPart(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One part of a message's content; only text exists (other types are refused before this struct is built)."""

    type: Literal["text"]
    text: str


class ToolCallFunction(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The function of an earlier tool call.

    Attributes:
        name: which function.
        arguments: JSON text, as the API returned it.
    """

    name: str
    arguments: str


class ToolCall(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A tool call that an assistant made earlier in the conversation."""

    id: str
    type: Literal["function"] = "function"
    function: ToolCallFunction


class ChatMessage(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One message of the conversation, given to the chat template.

    Attributes:
        role: who speaks; "developer" reaches the template as "system".
        content: text, or parts, which are joined by a line feed; null only beside tool_calls.
        name: given to the template.
        tool_calls: of an assistant.
        tool_call_id: of a tool's answer.
        reasoning_content: of an assistant, for templates that show it.
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


class ChatCompletionRequest(SamplingFields, kw_only=True, forbid_unknown_fields=True):
    """Body of a chat completion.

    Attributes:
        messages: the conversation, oldest first.
        max_completion_tokens: the newer name of max_tokens.
        logprobs: report the log-probability of each token.
        top_logprobs: and of so many alternatives.
        add_generation_prompt: end the prompt with the header of an assistant's message; true when not given.
        chat_template_kwargs: variables for the chat template.
    """

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class ChatCompletionMessage(msgspec.Struct, kw_only=True):
    """The answer of one choice."""

    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class ChatCompletionChoice(msgspec.Struct, kw_only=True):
    """One answer. `stop_reason` is an extension, sent with finish_reason: the stop string or token id that ended it, or null."""

    index: int
    message: ChatCompletionMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None
    stop_reason: str | int | msgspec.UnsetType | None = msgspec.UNSET


class ChatCompletion(msgspec.Struct, kw_only=True):
    """The answer to a request without `stream`."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatCompletionChoice]
    usage: Usage


class ChatDelta(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What a chunk adds to the message: the role in the first chunk of a choice, text later, nothing at its end."""

    role: Literal["assistant"] | None = None
    content: str | None = None


class ChatChunkChoice(msgspec.Struct, kw_only=True):
    """One choice's part of a chunk."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | msgspec.UnsetType | None = msgspec.UNSET


class ChatChunk(msgspec.Struct, kw_only=True):
    """One event of a stream. `usage` is absent unless include_usage was set; then it is null in all chunks but the last."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChunkChoice]
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET
