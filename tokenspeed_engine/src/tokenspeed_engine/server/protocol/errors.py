"""The error body that OpenAI's clients parse."""

from __future__ import annotations

import msgspec


class ErrorDetail(msgspec.Struct, kw_only=True):
    """What went wrong.

    Attributes:
        message: for people: what was expected, what came, the remedy.
        type: "invalid_request_error", "authentication_error", "rate_limit_error" or "server_error".
        param: the parameter at fault, as a path such as "messages[0].content", or null.
        code: for programs, or null.
    """

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorResponse(msgspec.Struct):
    """`{"error": {...}}`: the whole body of a failed request, or one event of a stream that failed after it began."""

    error: ErrorDetail
