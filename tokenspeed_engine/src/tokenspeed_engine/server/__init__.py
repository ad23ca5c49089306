"""The OpenAI-compatible HTTP server."""

from tokenspeed_engine.server.app import build_app, build_runner
from tokenspeed_engine.server.context import MetricsRenderer
from tokenspeed_engine.server.engine_client import (
    EngineClient,
    EngineClientError,
    EngineDeadError,
    EngineStatus,
    QueueFullError,
    RequestRefused,
    TextCodec,
)
from tokenspeed_engine.server.limits import Limits

__all__ = [
    "EngineClient",
    "EngineClientError",
    "EngineDeadError",
    "EngineStatus",
    "Limits",
    "MetricsRenderer",
    "QueueFullError",
    "RequestRefused",
    "TextCodec",
    "build_app",
    "build_runner",
]
