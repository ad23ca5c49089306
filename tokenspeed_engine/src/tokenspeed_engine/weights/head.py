"""Which tensor the output head is read from: its own, or the embedding.

The rule, in this order:

1. `tie_word_embeddings` true (also when it stands only in a nested `text_config`) and no head in the checkpoint: the embedding.
2. Both true and a head of its own: the head, as it is in the file. If it differs from the embedding there is a warning, since the
   configuration and the weights contradict each other and the weights are what was trained.
3. Not tied and a head: the head.
4. Not tied and no head: the start fails. A head that nobody trained would produce garbage.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tokenspeed_engine.checkpoint import Checkpoint
from tokenspeed_engine.weights.errors import MissingTensorsError

HEAD = "lm_head.weight"


def is_tied(config: Mapping[str, Any]) -> bool:
    """Whether the configuration ties the head to the embedding; a nested text_config decides where the top level is silent."""
    if config.get("tie_word_embeddings") is not None:
        return bool(config["tie_word_embeddings"])
    nested = config.get("text_config")
    return isinstance(nested, Mapping) and bool(nested.get("tie_word_embeddings"))


def head_source(checkpoint: Checkpoint, embedding: str) -> tuple[str, list[str]]:
    """The tensor that the head is loaded from.

    Args:
        checkpoint: where to look.
        embedding: name of the embedding's tensor.
    Returns:
        (tensor name, warnings).
    Raises:
        MissingTensorsError: the head is not tied and the checkpoint has none.
    """
    tied = is_tied(checkpoint.config)
    if HEAD not in checkpoint:
        if tied:
            return embedding, []
        raise MissingTensorsError(
            f"weights: {checkpoint.path} has no tensor {HEAD!r}, and tie_word_embeddings is not true. "
            "Fix: fetch the complete checkpoint, or set tie_word_embeddings if the model shares its embedding.",
            (HEAD,),
        )
    if not tied or embedding not in checkpoint:
        return HEAD, []
    same = checkpoint.shape(HEAD) == checkpoint.shape(embedding) and torch.equal(checkpoint.read(HEAD), checkpoint.read(embedding))
    if same:
        return HEAD, []
    return HEAD, [
        f"tie_word_embeddings is true, but {HEAD!r} is in the checkpoint and differs from {embedding!r}: "
        f"{HEAD!r} is used. Set tie_word_embeddings to false to silence this."
    ]
