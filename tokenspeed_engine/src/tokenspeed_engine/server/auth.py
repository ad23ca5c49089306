"""API keys."""

from __future__ import annotations

import hmac

from aiohttp import web

from tokenspeed_engine.server.errors import AUTHENTICATION, ApiError

_SCHEME = "bearer "


def check_api_key(request: web.Request, keys: tuple[str, ...]) -> str:
    """Ask for one of the keys as `Authorization: Bearer KEY`. No keys: everybody may come in.

    Every key is compared in constant time, and all of them always, so that the time tells nothing about any.

    Returns:
        A name for the key, without its secret, where there are several; else empty.
    Raises:
        ApiError: 401.
    """
    if not keys:
        return ""
    header = request.headers.get("Authorization", "")
    given = header[len(_SCHEME) :].strip() if header[: len(_SCHEME)].lower() == _SCHEME else ""
    raw = given.encode("utf-8", "surrogateescape")
    matches = [index for index, key in enumerate(keys) if hmac.compare_digest(raw, key.encode("utf-8"))]
    if not given:
        raise _unauthorized("No API key was given. Send it in the header 'Authorization: Bearer KEY'.")
    if not matches:
        raise _unauthorized("The API key is not valid here. Send another in the header 'Authorization: Bearer KEY'.")
    return f"key {matches[0]}" if len(keys) > 1 else ""


def _unauthorized(message: str) -> ApiError:
    return ApiError(
        401,
        message,
        error_type=AUTHENTICATION,
        code="invalid_api_key",
        headers={"WWW-Authenticate": "Bearer"},
        closes_connection=True,
    )
