"""Errors of the API, and their one shape on the wire."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from aiohttp import web

from tokenspeed_engine.server.engine_client import (
    EngineClientError,
    EngineDeadError,
    EngineStatus,
    QueueFullError,
    RequestRefused,
)
from tokenspeed_engine.server.protocol import ErrorDetail, ErrorResponse

INVALID_REQUEST = "invalid_request_error"
AUTHENTICATION = "authentication_error"
RATE_LIMIT = "rate_limit_error"
SERVER = "server_error"

# A message may quote what the client sent, which may be megabytes.
_MAX_MESSAGE_CHARS = 2000
_MAX_PARAM_CHARS = 200


class ApiError(Exception):
    """An answer other than 200, raised anywhere below a route.

    Attributes:
        status: HTTP status.
        detail: the body's `error`.
        headers: added to the answer.
        closes_connection: the connection cannot be used again (its body was not read), or should not be.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        error_type: str = INVALID_REQUEST,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
        closes_connection: bool = False,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.detail = ErrorDetail(
            message=_clipped(message, _MAX_MESSAGE_CHARS),
            type=error_type,
            param=None if param is None else _clipped(param, _MAX_PARAM_CHARS),
            code=code,
        )
        self.headers = dict(headers or {})
        self.closes_connection = closes_connection

    def body(self) -> bytes:
        """The JSON body, also the data of an SSE error event."""
        return msgspec.json.encode(ErrorResponse(self.detail))

    def response(self) -> web.Response:
        """The HTTP answer."""
        answer = web.Response(status=self.status, body=self.body(), content_type="application/json", headers=self.headers)
        if self.closes_connection:
            answer.force_close()
        return answer


def _clipped(text: str, max_chars: int) -> str:
    return text if len(text) <= max_chars else text[: max_chars - 3] + "..."


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """400: the client's mistake; `param` names the field."""
    return ApiError(400, message, param=param, code=code)


def model_not_found(name: str, served: tuple[str, ...]) -> ApiError:
    """404 for a model name that is not served."""
    known = ", ".join(repr(s) for s in served)
    return ApiError(
        404,
        f"The model {name!r} is not served here. Use one of: {known}.",
        param="model",
        code="model_not_found",
    )


def not_ready(status: EngineStatus) -> ApiError:
    """503 for a status other than READY."""
    if status is EngineStatus.DRAINING:
        return ApiError(
            503,
            "The server is shutting down and takes no new requests. Retry against another server, or later.",
            error_type=SERVER,
            code="engine_draining",
            headers={"Retry-After": "5"},
            closes_connection=True,
        )
    if status is EngineStatus.STARTING:
        return ApiError(
            503,
            "The engine is starting (the model is still loading). Retry when GET /readiness answers 200.",
            error_type=SERVER,
            code="engine_starting",
            headers={"Retry-After": "2"},
        )
    return engine_dead("The engine core is down and is being restarted. Retry when GET /readiness answers 200.")


def engine_dead(message: str) -> ApiError:
    """503: the core died or does not answer."""
    return ApiError(503, message, error_type=SERVER, code="engine_dead", headers={"Retry-After": "5"})


def too_busy(message: str, retry_after_s: float, *, closes_connection: bool = False) -> ApiError:
    """429: a bounded queue is full."""
    return ApiError(
        429,
        message,
        error_type=RATE_LIMIT,
        code="queue_full",
        headers={"Retry-After": str(max(1, round(retry_after_s)))},
        closes_connection=closes_connection,
    )


def internal_error() -> ApiError:
    """500: a fault of ours; the cause is in the log, not in the answer."""
    return ApiError(
        500,
        "The server failed to handle this request. The cause is in the server's log, under this request's X-Request-Id.",
        error_type=SERVER,
        code="internal_error",
    )


def from_engine(error: EngineClientError) -> ApiError:
    """The answer to an error of EngineClient.generate()."""
    if isinstance(error, RequestRefused):
        return bad_request(error.message, error.param, error.code)
    if isinstance(error, QueueFullError):
        return too_busy(error.message, error.retry_after_s)
    if isinstance(error, EngineDeadError):
        return engine_dead(error.message)
    return ApiError(500, str(error), error_type=SERVER, code="engine_error")
