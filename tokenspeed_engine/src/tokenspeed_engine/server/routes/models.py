"""`GET /v1/models` and `GET /v1/models/{model}`."""

from __future__ import annotations

import msgspec
from aiohttp import web

from tokenspeed_engine.server.context import CONTEXT, ServerContext
from tokenspeed_engine.server.engine_client import EngineStatus
from tokenspeed_engine.server.protocol import ModelCard, ModelList


async def list_models(request: web.Request) -> web.Response:
    """All served names."""
    context = request.app[CONTEXT]
    cards = [_card(context, name) for name in context.served_names()]
    return web.Response(body=msgspec.json.encode(ModelList(data=cards)), content_type="application/json")


async def show_model(request: web.Request) -> web.Response:
    """One served name; a name may hold slashes."""
    context = request.app[CONTEXT]
    name = request.match_info["model"]
    context.check_model(name)
    return web.Response(body=msgspec.json.encode(_card(context, name)), content_type="application/json")


def _card(context: ServerContext, name: str) -> ModelCard:
    starting = context.client.status is EngineStatus.STARTING
    max_model_len = None if starting else context.client.model_info.max_model_len
    return ModelCard(id=name, created=context.started_at, max_model_len=max_model_len)
