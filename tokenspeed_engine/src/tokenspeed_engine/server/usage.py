"""Token counts of a whole request."""

from __future__ import annotations

from collections.abc import Sequence

from tokenspeed_engine.server.assemble import ChoiceAssembler
from tokenspeed_engine.server.prompts import Prompt
from tokenspeed_engine.server.protocol import PromptTokensDetails, Usage


def total_usage(prompts: Sequence[Prompt], choices: Sequence[ChoiceAssembler]) -> Usage:
    """Sum over prompts and choices.

    Args:
        prompts: each counts once.
        choices: as many for each prompt, in the order of the prompts.
    """
    per_prompt = len(choices) // len(prompts)
    num_prompt = sum(len(prompt.token_ids) for prompt in prompts)
    num_completion = sum(choice.usage.num_completion_tokens for choice in choices)
    # Choices of one prompt hit each other's pages; what the prompt itself cost is what the least lucky of them had to compute.
    least = [
        min((choice.usage for choice in choices[i : i + per_prompt]), key=lambda usage: usage.num_cached_tokens)
        for i in range(0, len(choices), per_prompt)
    ]
    return Usage(
        prompt_tokens=num_prompt,
        completion_tokens=num_completion,
        total_tokens=num_prompt + num_completion,
        prompt_tokens_details=PromptTokensDetails(
            cached_tokens=sum(usage.num_cached_tokens for usage in least),
            host_cached_tokens=sum(usage.num_host_cached_tokens for usage in least),
            external_cached_tokens=sum(usage.num_external_cached_tokens for usage in least),
        ),
    )
