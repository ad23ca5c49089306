"""Token counts of a response."""

from __future__ import annotations

import msgspec


class PromptTokensDetails(msgspec.Struct):
    """Where the prompt's tokens came from.

    Attributes:
        cached_tokens: prompt tokens that the prefix cache already held, in whichever tier.
        host_cached_tokens: of these, those that had to be brought from the host's memory.
        external_cached_tokens: of these, those that had to be brought from outside of the engine.
    """

    cached_tokens: int = 0
    host_cached_tokens: int = 0
    external_cached_tokens: int = 0


class Usage(msgspec.Struct, kw_only=True):
    """Token counts.

    Attributes:
        prompt_tokens: tokens of all prompts; a prompt counts once, however many choices it has.
        completion_tokens: generated tokens of all choices, stop tokens included.
        total_tokens: their sum.
        prompt_tokens_details: see PromptTokensDetails.
    """

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
