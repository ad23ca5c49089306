"""Which file builds which architecture. A new file in this package that names ARCHITECTURES and `build` is found by itself."""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable, Mapping
from typing import Any, cast

from tokenspeed_engine import models
from tokenspeed_engine.models.base import CausalLM
from tokenspeed_engine.models.errors import UnsupportedModelError

Builder = Callable[[Mapping[str, Any], str], CausalLM]
"""Takes the configuration and the architecture's name."""


@functools.cache
def builders() -> Mapping[str, Builder]:
    """Architecture name to builder, over all files of this package."""
    found: dict[str, Builder] = {}
    for info in sorted(pkgutil.iter_modules(models.__path__), key=lambda m: m.name):
        module = importlib.import_module(f"{models.__name__}.{info.name}")
        for architecture in getattr(module, "ARCHITECTURES", ()):
            if architecture in found:
                raise RuntimeError(f"{architecture} is built by {info.name} and by {found[architecture].__module__}")
            found[architecture] = cast(Builder, module.build)
    return found


def build_model(config: Mapping[str, Any]) -> CausalLM:
    """Build the model that a configuration describes, without weights.

    Args:
        config: keys as in config.json; a nested `text_config` fills in and overrides.
    Returns:
        The model.
    Raises:
        UnsupportedModelError: the architecture, or a feature that the configuration asks for, is not supported.
    """
    known = builders()
    names = config.get("architectures") or []
    architecture = next((name for name in names if name in known), None)
    if architecture is None:
        raise UnsupportedModelError(
            f"architecture {', '.join(map(str, names)) or '(config.json has no architectures)'} is not supported; "
            f"expected one of {', '.join(sorted(known))}."
        )
    nested = config.get("text_config")
    return known[architecture]({**config, **nested} if isinstance(nested, Mapping) else config, architecture)
