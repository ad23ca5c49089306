"""Puts the server together."""

from __future__ import annotations

from aiohttp import web

from tokenspeed_engine.config import ServerConfig
from tokenspeed_engine.server.context import CONTEXT, MetricsRenderer, ServerContext
from tokenspeed_engine.server.engine_client import EngineClient
from tokenspeed_engine.server.http_log import http_logger
from tokenspeed_engine.server.limits import Limits
from tokenspeed_engine.server.middleware import add_headers, boundary
from tokenspeed_engine.server.routes import (
    chat_completions,
    completions,
    health,
    list_models,
    metrics,
    readiness,
    show_model,
)
from tokenspeed_engine.server.validation import seed_source


def build_app(
    client: EngineClient, config: ServerConfig, metrics_renderer: MetricsRenderer, limits: Limits | None = None, *, seed: int = 0
) -> web.Application:
    """The application: routes, error shape, API keys. Serve it with build_runner().

    Args:
        client: the engine.
        config: names, keys and body size.
        metrics_renderer: what `/metrics` shows.
        limits: bounds of requests; the defaults when None.
        seed: where requests without a seed get theirs from; 0 is another place at each start.
    """
    app = web.Application(middlewares=[boundary])
    app.on_response_prepare.append(add_headers)
    app[CONTEXT] = ServerContext(client, config, metrics_renderer, limits or Limits(), seed_source(seed))
    app.router.add_post("/v1/chat/completions", chat_completions)
    app.router.add_post("/v1/completions", completions)
    app.router.add_get("/v1/models", list_models)
    app.router.add_get("/v1/models/{model:.+}", show_model)
    app.router.add_get("/health", health)
    app.router.add_get("/readiness", readiness)
    app.router.add_get("/metrics", metrics)
    return app


def build_runner(app: web.Application, *, shutdown_timeout_s: float = 60.0) -> web.AppRunner:
    """A runner with what the application relies on.

    The handler is cancelled when its client goes away, which closes the engine's generators and so frees the pages; signals are
    left to the caller, who drains first; the access log is the middleware's.

    Args:
        app: from build_app().
        shutdown_timeout_s: how long cleanup() waits for handlers.
    """
    return web.AppRunner(
        app,
        handler_cancellation=True,
        handle_signals=False,
        access_log=None,
        logger=http_logger,
        shutdown_timeout=shutdown_timeout_s,
        keepalive_timeout=75.0,
    )
