"""What the front end must know of the model that the core has loaded."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Facts of the loaded model, sent once by the core when it is ready.

    Attributes:
        name: the name under which it is served.
        architecture: the Hugging Face architecture name.
        vocab_size: number of logits.
        max_model_len: most tokens that one sequence may hold, prompt and output together.
        num_pages: size of the page pool.
        page_size: tokens in a page.
        eos_token_ids: the ids that end a sequence.
        dtype: compute type of the weights.
        device: where it runs.
        weights: how the weights are held, for people: `Q4_1 and Q8_0 as in the file`.
        weights_bytes: memory that the weights take.
        kv_cache_bytes: memory of the page pool.
        keeps_sessions: whether what a session computed is kept for its next turn.
    """

    name: str
    architecture: str
    vocab_size: int
    max_model_len: int
    num_pages: int
    page_size: int
    eos_token_ids: tuple[int, ...]
    dtype: str
    device: str
    weights: str = ""
    weights_bytes: int = 0
    kv_cache_bytes: int = 0
    keeps_sessions: bool = True
