"""One module for each route."""

from tokenspeed_engine.server.routes.chat import chat_completions
from tokenspeed_engine.server.routes.completions import completions
from tokenspeed_engine.server.routes.models import list_models, show_model
from tokenspeed_engine.server.routes.probes import health, metrics, readiness

__all__ = ["chat_completions", "completions", "health", "list_models", "metrics", "readiness", "show_model"]
