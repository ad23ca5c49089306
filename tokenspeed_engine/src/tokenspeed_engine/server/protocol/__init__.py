"""Typed bodies of the OpenAI API: what may come in, and what goes out."""

from tokenspeed_engine.server.protocol.chat import (
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChoice,
    ChatCompletionMessage,
    ChatCompletionRequest,
    ChatDelta,
    ChatMessage,
    ContentPart,
    ToolCall,
    ToolCallFunction,
)
from tokenspeed_engine.server.protocol.completions import (
    Completion,
    CompletionChoice,
    CompletionChunk,
    CompletionRequest,
)
from tokenspeed_engine.server.protocol.errors import ErrorDetail, ErrorResponse
from tokenspeed_engine.server.protocol.logprobs import (
    ChatLogprobs,
    ChatTokenLogprob,
    ChatTopLogprob,
    CompletionLogprobs,
)
from tokenspeed_engine.server.protocol.models import ModelCard, ModelList
from tokenspeed_engine.server.protocol.sampling import SamplingFields, StreamOptions
from tokenspeed_engine.server.protocol.usage import PromptTokensDetails, Usage

__all__ = [
    "ChatChunk",
    "ChatChunkChoice",
    "ChatCompletion",
    "ChatCompletionChoice",
    "ChatCompletionMessage",
    "ChatCompletionRequest",
    "ChatDelta",
    "ChatLogprobs",
    "ChatMessage",
    "ChatTokenLogprob",
    "ChatTopLogprob",
    "Completion",
    "CompletionChoice",
    "CompletionChunk",
    "CompletionLogprobs",
    "CompletionRequest",
    "ContentPart",
    "ErrorDetail",
    "ErrorResponse",
    "ModelCard",
    "ModelList",
    "PromptTokensDetails",
    "SamplingFields",
    "StreamOptions",
    "ToolCall",
    "ToolCallFunction",
    "Usage",
]
