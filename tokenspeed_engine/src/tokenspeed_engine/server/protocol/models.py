"""`GET /v1/models`."""

from __future__ import annotations

from typing import Literal

import msgspec


class ModelCard(msgspec.Struct, kw_only=True):
    """One served name.

    Attributes:
        id: what a request gives as `model`.
        object: always "model".
        created: when the server started, seconds since the epoch.
        owned_by: who serves it.
        max_model_len: extension: tokens that prompt and output may hold together; null until the model is loaded.
    """

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "tokenspeed"
    max_model_len: int | None = None


class ModelList(msgspec.Struct, kw_only=True):
    """All served names."""

    object: Literal["list"] = "list"
    data: list[ModelCard]
