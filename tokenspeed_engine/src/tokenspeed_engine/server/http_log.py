"""What the HTTP library logs: a client's broken HTTP is one line, not a traceback."""

from __future__ import annotations

import logging

from aiohttp import web
from aiohttp.http import HttpProcessingError


class _OneLineForBrokenHttp(logging.Filter):
    """The library tells of each client that speaks no HTTP as of a fault of ours; anyone could fill the log with it."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if isinstance(record.exc_info, tuple) else None
        if isinstance(error, (HttpProcessingError, web.RequestPayloadError)):
            # repr(): the text quotes what the client sent, line feeds included.
            record.msg, record.args = "a client sent what is no HTTP: %s", (repr(" ".join(str(error).split()))[:200],)
            record.exc_info = record.exc_text = None
            record.levelno, record.levelname = logging.INFO, logging.getLevelName(logging.INFO)
        return True


http_logger = logging.getLogger(__name__)
"""For `logger` of aiohttp's runner."""
http_logger.addFilter(_OneLineForBrokenHttp())
