"""Server-sent events: one response that starts late, writes what comes, and always ends in one of two ways."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing

from aiohttp import web

from tokenspeed_engine.server.context import NOTES
from tokenspeed_engine.server.engine_client import EngineClientError
from tokenspeed_engine.server.errors import ApiError, from_engine, internal_error

logger = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"
_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    # Proxies that buffer would turn a stream into one late block.
    "X-Accel-Buffering": "no",
}


def event(data: bytes) -> bytes:
    """One event with one line of data."""
    return b"data: " + data + b"\n\n"


async def stream(request: web.Request, events: AsyncGenerator[bytes, None], *, write_timeout_s: float) -> web.StreamResponse:
    """Send events as they come.

    The status line waits for the first event, so that a request which the engine refuses still gets its own status. After that, an
    error is an event in the API's error shape, without [DONE] behind it. Events are written one at a time, and the next is not
    asked for before the socket took the last.

    Args:
        request: the request to answer.
        events: framed events; closed here in every case.
        write_timeout_s: how long the peer may take nothing before the connection is cut.
    Raises:
        EngineClientError, ApiError: from before the first event.
    """
    request_id = NOTES.get().request_id
    async with aclosing(events):
        first = await anext(events)
        response = web.StreamResponse(headers=_HEADERS)
        try:
            await response.prepare(request)
            await _write(request, response, first, write_timeout_s)
            while True:
                data = await _next_event(events, request_id)
                await _write(request, response, DONE if data is None else data.bytes, write_timeout_s)
                if data is None or data.is_last:
                    break
            await response.write_eof()
        except ConnectionError as gone:
            # Nobody is left to tell. Closing `events` aborts the request at the core.
            logger.info("request %s: the client went away (%s)", request_id, gone)
    return response


class _Event:
    """Data to send, and whether the stream ends with it."""

    __slots__ = ("bytes", "is_last")

    def __init__(self, data: bytes, is_last: bool = False) -> None:
        self.bytes = data
        self.is_last = is_last


async def _next_event(events: AsyncGenerator[bytes, None], request_id: str) -> _Event | None:
    try:
        return _Event(await anext(events))
    except StopAsyncIteration:
        return None
    except EngineClientError as error:
        return _Event(event(from_engine(error).body()), is_last=True)
    except ApiError as error:
        return _Event(event(error.body()), is_last=True)
    except Exception:
        logger.exception("request %s failed while it was streamed", request_id)
        return _Event(event(internal_error().body()), is_last=True)


async def _write(request: web.Request, response: web.StreamResponse, data: bytes, timeout_s: float) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            await response.write(data)
    except TimeoutError:
        logger.warning("a reader took nothing for %g s; its connection is cut", timeout_s)
        if request.transport is not None:
            request.transport.abort()
        raise ConnectionResetError("the reader of a stream stalled") from None
