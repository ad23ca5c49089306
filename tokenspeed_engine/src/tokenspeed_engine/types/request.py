"""A request after tokenization: what the front end sends to the engine core."""

from __future__ import annotations

from dataclasses import dataclass

from tokenspeed_engine.types.params import SamplingParams


@dataclass(frozen=True, slots=True)
class TokenizedRequest:
    """One sequence to generate. `n > 1` of the API becomes several of these, which share the prompt through the prefix cache.

    Attributes:
        request_id: unique while the request lives; chosen by the front end.
        prompt_token_ids: at least one id, each in 0..vocab_size-1.
        params: sampling and stopping parameters.
        session_id: the conversation that it belongs to, whose pages are kept for its next turn; empty: none.
        cache_salt: only requests of equal salt share cached pages; at most 256 bytes of UTF-8.
        priority: class, 32-bit; a smaller one goes first.
        tenant: whose share of the machine it uses; empty: that of all who have no name.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    session_id: str = ""
    cache_salt: str = ""
    priority: int = 0
    tenant: str = ""
