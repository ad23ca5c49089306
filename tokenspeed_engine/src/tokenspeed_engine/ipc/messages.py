"""The messages between front end and engine core: typed, versioned, msgpack.

The handshake (Hello, HelloReply) keeps its form in every version, so that two versions can tell each other that they do not
match. Everything after it may change with PROTOCOL_VERSION. No message can carry code or an object of the sender's choice: a
decoder builds the types below or raises.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from tokenspeed_engine.ipc.errors import MessageTooLargeError, ProtocolError
from tokenspeed_engine.types import EngineStats, ModelInfo, SampledTokens, TokenizedRequest

PROTOCOL_VERSION = 1

Role = Literal["data", "heartbeat"]


class CoreLaunch(msgspec.Struct, frozen=True, tag="launch"):
    """What a core reads from its standard input at its start; never on its command line, which others can read.

    Attributes:
        protocol_version: the version that the front end speaks.
        endpoint: where to connect.
        token: what to show in the handshake.
        parent_pid: process id of the front end.
        config: the core's configuration, msgpack.
    """

    protocol_version: int
    endpoint: str
    token: str
    parent_pid: int
    config: bytes


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """The core's first message on each connection. Its form never changes.

    Attributes:
        protocol_version: the version that the core speaks.
        token: the random token that the front end gave to this core at its start.
        role: what the connection is for.
        pid: process id of the core.
    """

    protocol_version: int
    token: str
    role: str
    pid: int


class HelloReply(msgspec.Struct, frozen=True, tag="hello_reply"):
    """The front end's answer. Its form never changes.

    Attributes:
        accepted: whether the connection may be used.
        protocol_version: the version that the front end speaks.
        reason: why not, when it was refused.
    """

    accepted: bool
    protocol_version: int
    reason: str = ""


class SubmitRequest(msgspec.Struct, frozen=True, tag="submit"):
    """Front end to core: a new request."""

    request: TokenizedRequest


class AbortRequests(msgspec.Struct, frozen=True, tag="abort"):
    """Front end to core: nobody waits for these any more. Unknown ids are ignored: they have just ended."""

    request_ids: tuple[str, ...]


class QueryStats(msgspec.Struct, frozen=True, tag="query_stats"):
    """Front end to core: answer with StatsReply, after all messages before it were handled."""

    query_id: int


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    """Front end to core: stop after the step in progress, and exit with status 0."""


class LoadProgress(msgspec.Struct, frozen=True, tag="load_progress"):
    """Core to front end: how far the start is.

    Attributes:
        stage: what is being done, such as "weights".
        done: units done.
        total: units in all; 0 when unknown.
        detail: what to show beside it; may be empty.
    """

    stage: str
    done: int = 0
    total: int = 0
    detail: str = ""


class CoreReady(msgspec.Struct, frozen=True, tag="ready"):
    """Core to front end: requests are served from now on.

    Attributes:
        model_info: facts of the loaded model.
        max_num_batched_tokens: token budget of a step, as chosen.
        startup_s: time from the process's start.
        resident_bytes: physical memory of the core's process; 0 where it is not known.
        peak_resident_bytes: the most that it ever held.
    """

    model_info: ModelInfo
    max_num_batched_tokens: int
    startup_s: float
    resident_bytes: int = 0
    peak_resident_bytes: int = 0


class StepOutputs(msgspec.Struct, frozen=True, tag="outputs", array_like=True):
    """Core to front end: everything that one step brought, in one frame.

    Attributes:
        step: number of the step.
        outputs: new tokens, one entry for each request that has any.
        queued: (request id, seconds) for each request that was scheduled for the first time: how long it had waited.
        stats: where the core stands after the step.
    """

    step: int
    outputs: tuple[SampledTokens, ...]
    queued: tuple[tuple[str, float], ...]
    stats: EngineStats


class RequestRejected(msgspec.Struct, frozen=True, tag="rejected"):
    """Core to front end: this request cannot be served; no output follows.

    Attributes:
        request_id: the request.
        code: machine-readable reason.
        message: expected, got and remedy.
    """

    request_id: str
    code: str
    message: str


class StatsReply(msgspec.Struct, frozen=True, tag="stats"):
    """Core to front end: answer to QueryStats."""

    query_id: int
    stats: EngineStats


class CoreFailed(msgspec.Struct, frozen=True, tag="failed"):
    """Core to front end: the core ends now, for this reason.

    Attributes:
        message: the cause, for people.
        user_error: the configuration or the checkpoint is at fault, so that another start would fail alike.
    """

    message: str
    user_error: bool = False


class Heartbeat(msgspec.Struct, frozen=True, tag="heartbeat"):
    """Core to front end, from a thread of its own.

    Attributes:
        phase: what the core does.
        num_steps: steps so far.
        stalled_s: time since the last progress, while there is work to do; 0 when idle or loading.
        resident_bytes: physical memory of the core's process; 0 where it is not known.
        peak_resident_bytes: the most that it ever held.
    """

    phase: Literal["loading", "idle", "busy"]
    num_steps: int
    stalled_s: float
    resident_bytes: int = 0
    peak_resident_bytes: int = 0


ToCore = SubmitRequest | AbortRequests | QueryStats | Shutdown
ToFrontend = LoadProgress | CoreReady | StepOutputs | RequestRejected | StatsReply | CoreFailed
Message = CoreLaunch | Hello | HelloReply | ToCore | ToFrontend | Heartbeat


class _HelloProbe(msgspec.Struct):
    """What every version's Hello has; read first, so that a foreign version gets an answer and not a decoding error."""

    protocol_version: int
    token: str


_ENCODER = msgspec.msgpack.Encoder()
_TO_CORE: msgspec.msgpack.Decoder[ToCore] = msgspec.msgpack.Decoder(SubmitRequest | AbortRequests | QueryStats | Shutdown)
_FRONTEND_MAPS: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(
    LoadProgress | CoreReady | RequestRejected | StatsReply | CoreFailed | Heartbeat
)
_OUTPUTS = msgspec.msgpack.Decoder(StepOutputs)
_HELLO = msgspec.msgpack.Decoder(Hello)
_HELLO_REPLY = msgspec.msgpack.Decoder(HelloReply)
_LAUNCH = msgspec.msgpack.Decoder(CoreLaunch)
_PROBE = msgspec.msgpack.Decoder(_HelloProbe)


def encode(message: Message, *, max_bytes: int) -> bytes:
    """Encode a message.

    Raises:
        MessageTooLargeError: it would be larger than max_bytes.
    """
    raw = _ENCODER.encode(message)
    if len(raw) > max_bytes:
        raise MessageTooLargeError(type(message).__name__, len(raw), max_bytes)
    return raw


def decode_to_core(raw: bytes) -> ToCore:
    """Decode what the front end sends. Raises ProtocolError."""
    try:
        return _TO_CORE.decode(raw)
    except (msgspec.DecodeError, msgspec.ValidationError, ValueError) as error:
        raise ProtocolError(f"ipc.receive: expected a message to the core, got {len(raw)} bytes: {error}") from error


def decode_to_frontend(raw: bytes) -> ToFrontend | Heartbeat:
    """Decode what the core sends. Raises ProtocolError."""
    try:
        if raw and _is_array(raw[0]):
            return _OUTPUTS.decode(raw)
        message: ToFrontend | Heartbeat = _FRONTEND_MAPS.decode(raw)
        return message
    except (msgspec.DecodeError, msgspec.ValidationError, ValueError) as error:
        raise ProtocolError(f"ipc.receive: expected a message of the core, got {len(raw)} bytes: {error}") from error


def decode_launch(raw: bytes) -> CoreLaunch:
    """Decode what the front end writes to a new core's standard input. Raises ProtocolError."""
    try:
        return _LAUNCH.decode(raw)
    except (msgspec.DecodeError, msgspec.ValidationError, ValueError) as error:
        raise ProtocolError(f"ipc.launch: expected CoreLaunch, got {len(raw)} bytes: {error}") from error


def decode_hello(raw: bytes) -> Hello:
    """Decode the first message of a connection; of a foreign version, only what every version has.

    Raises:
        ProtocolError: it is no Hello of any version.
    """
    try:
        probe = _PROBE.decode(raw)
        if probe.protocol_version != PROTOCOL_VERSION:
            return Hello(protocol_version=probe.protocol_version, token=probe.token, role="", pid=0)
        return _HELLO.decode(raw)
    except (msgspec.DecodeError, msgspec.ValidationError, ValueError) as error:
        raise ProtocolError(f"ipc.handshake: expected Hello, got {len(raw)} bytes: {error}") from error


def decode_hello_reply(raw: bytes) -> HelloReply:
    """Decode the answer to Hello. Raises ProtocolError."""
    try:
        return _HELLO_REPLY.decode(raw)
    except (msgspec.DecodeError, msgspec.ValidationError, ValueError) as error:
        raise ProtocolError(f"ipc.handshake: expected HelloReply, got {len(raw)} bytes: {error}") from error


def _is_array(first_byte: int) -> bool:
    """Whether a msgpack value starts an array (fixarray, array16 or array32): only StepOutputs is one."""
    return 0x90 <= first_byte <= 0x9F or first_byte in (0xDC, 0xDD)
