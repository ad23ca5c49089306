"""The OpenAI-compatible HTTP server."""

from tokenspeed_engine.server.engine_client import (
    EngineClient,
    EngineClientError,
    EngineDeadError,
    EngineStatus,
    QueueFullError,
    RequestRefused,
    TextCodec,
)

__all__ = [
    "EngineClient",
    "EngineClientError",
    "EngineDeadError",
    "EngineStatus",
    "QueueFullError",
    "RequestRefused",
    "TextCodec",
]
