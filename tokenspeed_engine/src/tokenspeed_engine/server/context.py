"""What every route needs: the client, the limits, the names, the gate."""

from __future__ import annotations

import hashlib
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Protocol

from aiohttp import web

from tokenspeed_engine._version import __version__
from tokenspeed_engine.config import ServerConfig
from tokenspeed_engine.server.engine_client import EngineClient, EngineStatus
from tokenspeed_engine.server.errors import model_not_found, not_ready, too_busy
from tokenspeed_engine.server.limits import Limits
from tokenspeed_engine.server.validation import seed_source


class MetricsRenderer(Protocol):
    """The part of the metrics object that the server uses."""

    @property
    def content_type(self) -> str:
        """Content type of what render() returns."""

    def render(self) -> bytes:
        """The metrics in Prometheus' text format."""


@dataclass(frozen=True, slots=True)
class ResponseIdentity:
    """Fields that all chunks of a response share.

    Attributes:
        id: of the response; also the prefix of its sequences' request ids.
        created: seconds since the epoch.
        model: the name that the client used.
        system_fingerprint: the same for the same version, model and numerics.
    """

    id: str
    created: int
    model: str
    system_fingerprint: str


@dataclass(slots=True)
class ServerContext:
    """State of the server.

    Attributes:
        client: the engine.
        config: flags of the server.
        metrics: what `/metrics` shows.
        limits: bounds of requests.
        draw_seed: gives requests without a seed theirs.
        started_at: seconds since the epoch.
        num_inflight: requests that are inside the gate.
        num_body_bytes: size of their bodies, as far as they were read.
    """

    client: EngineClient
    config: ServerConfig
    metrics: MetricsRenderer
    limits: Limits = field(default_factory=Limits)
    draw_seed: Callable[[], int] = field(default_factory=lambda: seed_source(0))
    started_at: int = field(default_factory=lambda: int(time.time()))
    num_inflight: int = 0
    num_body_bytes: int = 0

    def served_names(self) -> tuple[str, ...]:
        """Names under which the model can be asked for.

        Raises:
            ApiError: 503 when they are the model's own, and it is not loaded yet.
        """
        if self.config.served_model_names:
            return self.config.served_model_names
        if self.client.status is EngineStatus.STARTING:
            raise not_ready(EngineStatus.STARTING)
        return (self.client.model_info.name,)

    def check_model(self, name: str) -> None:
        """Raises ApiError: 404 for a name that is not served."""
        served = self.served_names()
        if name not in served:
            raise model_not_found(name[:256], served)

    def check_ready(self) -> None:
        """Raises ApiError: 503 unless the engine takes requests."""
        if self.client.status is not EngineStatus.READY:
            raise not_ready(self.client.status)

    @contextmanager
    def gate(self) -> Iterator[Callable[[int], None]]:
        """Hold one of the bounded places for requests that generate.

        Yields:
            a function that counts bytes of the request's body until the place is given back; it raises 429 when the bodies of
            all requests together are too large.
        Raises:
            ApiError: 503 unless ready, 429 when all places are taken.
        """
        self.check_ready()
        if self.num_inflight >= self.limits.max_inflight_requests:
            raise too_busy(
                f"The server is handling {self.num_inflight} requests, its limit. Retry after the time in Retry-After.", 1.0
            )
        num_own_bytes = 0

        def account(num_bytes: int) -> None:
            nonlocal num_own_bytes
            # One body alone may always be as large as a body may be.
            most = max(self.limits.max_inflight_body_bytes, self.config.max_body_bytes)
            if self.num_body_bytes + num_bytes > most:
                raise too_busy(
                    f"The bodies of the requests in progress take {self.num_body_bytes} bytes, near the limit of {most}. "
                    "Retry after the time in Retry-After.",
                    1.0,
                    closes_connection=True,
                )
            self.num_body_bytes += num_bytes
            num_own_bytes += num_bytes

        self.num_inflight += 1
        try:
            yield account
        finally:
            self.num_inflight -= 1
            self.num_body_bytes -= num_own_bytes

    def identity(self, prefix: str, model: str) -> ResponseIdentity:
        """A new response's identity; `prefix` is "chatcmpl" or "cmpl"."""
        info = self.client.model_info
        facts = "|".join((__version__, info.name, info.architecture, info.dtype, info.device))
        return ResponseIdentity(
            id=f"{prefix}-{uuid.uuid4().hex}",
            created=int(time.time()),
            model=model,
            system_fingerprint=f"fp_{hashlib.sha256(facts.encode()).hexdigest()[:12]}",
        )


CONTEXT: web.AppKey[ServerContext] = web.AppKey("context", ServerContext)


@dataclass(slots=True)
class RequestNotes:
    """What is remembered of the HTTP request that the current task answers.

    Attributes:
        request_id: the client's X-Request-Id, or one of ours.
        caller: the caller's identifiers, ready for the log line.
        key_name: which of several API keys was shown; empty where there are no two.
    """

    request_id: str
    caller: str = ""
    key_name: str = ""


NOTES: ContextVar[RequestNotes] = ContextVar("request_notes")
