"""Messages, sockets, handshake and heartbeat between front end and engine core."""

from tokenspeed_engine.ipc.core import CoreLink
from tokenspeed_engine.ipc.directory import MAX_SOCKET_PATH_BYTES, PrivateDirectory
from tokenspeed_engine.ipc.errors import (
    HandshakeError,
    IpcError,
    LinkBusyError,
    LinkDownError,
    MessageTooLargeError,
    ProtocolError,
    SocketPathError,
)
from tokenspeed_engine.ipc.frontend import FrontendLink
from tokenspeed_engine.ipc.heartbeat import HeartbeatMonitor, HeartbeatThread, Progress
from tokenspeed_engine.ipc.lifeline import die_with_parent, watch_parent
from tokenspeed_engine.ipc.messages import (
    PROTOCOL_VERSION,
    AbortRequests,
    CoreFailed,
    CoreLaunch,
    CoreReady,
    Heartbeat,
    LoadProgress,
    QueryStats,
    RequestRejected,
    Role,
    Shutdown,
    StatsReply,
    StepOutputs,
    SubmitRequest,
    ToCore,
    ToFrontend,
    decode_launch,
    encode,
)
from tokenspeed_engine.ipc.outbox import Outbox, merge_outputs, merge_sampled

__all__ = [
    "AbortRequests",
    "CoreFailed",
    "CoreLaunch",
    "CoreLink",
    "CoreReady",
    "FrontendLink",
    "HandshakeError",
    "Heartbeat",
    "HeartbeatMonitor",
    "HeartbeatThread",
    "IpcError",
    "LinkBusyError",
    "LinkDownError",
    "LoadProgress",
    "MAX_SOCKET_PATH_BYTES",
    "MessageTooLargeError",
    "Outbox",
    "PROTOCOL_VERSION",
    "PrivateDirectory",
    "Progress",
    "ProtocolError",
    "QueryStats",
    "RequestRejected",
    "Role",
    "Shutdown",
    "SocketPathError",
    "StatsReply",
    "StepOutputs",
    "SubmitRequest",
    "ToCore",
    "ToFrontend",
    "decode_launch",
    "die_with_parent",
    "encode",
    "merge_outputs",
    "merge_sampled",
    "watch_parent",
]
