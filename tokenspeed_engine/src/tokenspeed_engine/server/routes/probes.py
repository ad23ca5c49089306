"""Liveness, readiness and metrics: open without an API key, because probes and scrapers have none."""

from __future__ import annotations

from aiohttp import web

from tokenspeed_engine.server.context import CONTEXT


async def health(request: web.Request) -> web.Response:
    """`GET /health`: 200 as long as this process answers, whatever the engine does."""
    return web.json_response({"status": "ok"})


async def readiness(request: web.Request) -> web.Response:
    """`GET /readiness`: 200 when requests are taken; 503 while starting, draining, or without a core."""
    context = request.app[CONTEXT]
    context.check_ready()
    return web.json_response({"status": context.client.status.value})


async def metrics(request: web.Request) -> web.Response:
    """`GET /metrics`: Prometheus' text format."""
    renderer = request.app[CONTEXT].metrics
    return web.Response(body=renderer.render(), headers={"Content-Type": renderer.content_type})
