"""The boundary of the server: request ids, API keys, one shape for every error, one log line for every request."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Awaitable, Callable

from aiohttp import web

from tokenspeed_engine.server.auth import check_api_key
from tokenspeed_engine.server.context import CONTEXT, NOTES, RequestNotes
from tokenspeed_engine.server.engine_client import EngineClientError
from tokenspeed_engine.server.errors import ApiError, from_engine, internal_error

logger = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_HEADER = "X-Request-Id"


@web.middleware
async def boundary(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Everything that all routes have in common."""
    context = request.app[CONTEXT]
    notes = RequestNotes(_request_id(request, context.limits.max_identifier_chars))
    NOTES.set(notes)
    is_api = request.path.startswith("/v1/")
    started_s = time.monotonic()
    status = "cancelled"
    try:
        response = await _answer(request, handler, context.config.api_keys if is_api else ())
        status = str(response.status)
    except asyncio.CancelledError:
        status = "client went away"
        raise
    finally:
        logger.log(
            logging.INFO if is_api else logging.DEBUG,
            "%s %s %s in %.3f s, id %s%s",
            request.method,
            request.rel_url.raw_path,
            status,
            time.monotonic() - started_s,
            notes.request_id,
            notes.caller,
        )
    return response


async def add_headers(request: web.Request, response: web.StreamResponse) -> None:
    """Signal of every response, streams included: its id, and a name without the versions of what is inside."""
    notes = NOTES.get(None)
    if notes is not None:
        response.headers[_HEADER] = notes.request_id
    response.headers["Server"] = "tokenspeed-engine"


async def _answer(request: web.Request, handler: Handler, api_keys: tuple[str, ...]) -> web.StreamResponse:
    try:
        NOTES.get().key_name = check_api_key(request, api_keys)
        return await handler(request)
    except ApiError as error:
        return error.response()
    except EngineClientError as error:
        return from_engine(error).response()
    except web.HTTPException as error:
        return _from_http(request, error).response()
    except Exception:
        logger.exception("%s %s failed, id %s", request.method, request.rel_url.raw_path, NOTES.get().request_id)
        return internal_error().response()


def _from_http(request: web.Request, error: web.HTTPException) -> ApiError:
    where = f"{request.method} {request.path[:256]}"
    if isinstance(error, web.HTTPMethodNotAllowed):
        allowed = ", ".join(sorted(error.allowed_methods))
        return ApiError(
            405, f"{where}: this method is not allowed. Use {allowed}.", code="method_not_allowed", headers={"Allow": allowed}
        )
    if isinstance(error, web.HTTPNotFound):
        known = ", ".join(sorted({r.canonical for r in request.app.router.resources()}))
        return ApiError(404, f"{where}: there is no such route. There are {known}.", code="unknown_url")
    return ApiError(error.status, f"{where}: {error.reason}.", code="http_error")


def _request_id(request: web.Request, max_chars: int) -> str:
    given = request.headers.get(_HEADER, "")
    if 0 < len(given) <= max_chars and given.isascii() and given.isprintable():
        return given
    return uuid.uuid4().hex
