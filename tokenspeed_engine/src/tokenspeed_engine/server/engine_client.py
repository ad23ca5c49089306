"""What the HTTP server needs of the engine: one protocol, one status, three errors.

The server never sees sockets or the core process. It hands over a TokenizedRequest and iterates TextDeltas; everything
between (queueing, transport, detokenizing, aborting) belongs to the implementation of EngineClient.
"""

from __future__ import annotations

import enum
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, Protocol

from tokenspeed_engine.types import ModelInfo, TextDelta, TokenizedRequest


class EngineStatus(enum.Enum):
    """Where the engine stands, as `/readiness` reports it."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    DEAD = "dead"


class EngineClientError(Exception):
    """Base of what generate() raises for one request. The text is shown to the HTTP client."""


class RequestRefused(EngineClientError):
    """The engine cannot serve this request, now or ever, with these parameters. The server answers 400.

    Attributes:
        message: what was expected, what came, and the remedy.
        param: the API parameter at fault, where one is.
        code: a machine-readable reason, such as "context_length_exceeded".
    """

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


class QueueFullError(EngineClientError):
    """The bound of waiting requests is reached. The server answers 429 with Retry-After.

    Attributes:
        retry_after_s: seconds after which another attempt makes sense.
    """

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after_s = retry_after_s


class EngineDeadError(EngineClientError):
    """The core died, hangs, or is not up.

    Before the first delta the server answers 503; later it ends the stream with an error event.

    Attributes:
        message: what happened to the core, for the client.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class TextCodec(Protocol):
    """The part of tokenizer.Tokenizer that the server uses; every method may be called from a worker thread."""

    @property
    def special_token_ids(self) -> frozenset[int]:
        """Ids that skip_special_tokens leaves out of a text."""

    def encode(self, text: str, add_special_tokens: bool = ...) -> Sequence[int]:
        """Text to ids; add_special_tokens adds what the model expects around a prompt, such as BOS."""

    def max_chars(self, num_tokens: int) -> int | None:
        """Most characters that so many tokens can stand for; None when that is not known."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = ...) -> str:
        """Ids to text; an incomplete character becomes U+FFFD."""

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that this token stands for; may be part of a character."""

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = ...,
        add_generation_prompt: bool = ...,
        **kwargs: Any,
    ) -> str:
        """Messages to the prompt's text. Raises ValueError (or a subclass) when the template refuses the messages."""


class EngineClient(Protocol):
    """The engine as the server sees it."""

    @property
    def status(self) -> EngineStatus:
        """Where the engine stands now; reading it is free."""

    @property
    def model_info(self) -> ModelInfo:
        """Facts of the loaded model. Defined once status has been READY; the server does not read it before."""

    @property
    def tokenizer(self) -> TextCodec:
        """The model's tokenizer. Defined once status has been READY; the server does not read it before."""

    def generate(self, request: TokenizedRequest) -> AsyncGenerator[TextDelta, None]:
        """Run one sequence; an `async def` with `yield` fits.

        Contract:
            - The request is submitted when the generator is first advanced, not before.
            - It yields at least one delta. The last, and only that, has a finish_reason other than RUNNING; then the
              generator ends. FinishReason.ERROR carries `error`.
            - While the consumer is busy, deltas of the request are merged in place (texts joined, ids and logprobs
              appended): the buffer is bounded by what the request may generate, and the core never waits for a reader.
            - prompt_logprobs, when asked for, come with or before the first delta that has token_ids.
            - num_prompt_tokens and num_cached_tokens are set on every delta, or at least on the last.
            - aclose(), or cancelling the task that advances it, aborts the request at the core at once; after the last
              delta it does nothing.

        Raises (from the advance that finds it):
            RequestRefused: the engine can never run it.  QueueFullError: try later.  EngineDeadError: the core is gone.
        """
