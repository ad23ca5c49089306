"""How one request wants its tokens chosen, and when it ends."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling and stopping parameters of one request; validated by the server before they get here.

    Attributes:
        temperature: 0 means greedy.
        top_p: nucleus mass in (0, 1]; 1 is off.
        top_k: number of tokens kept; 0 is off.
        min_p: smallest probability kept, relative to the largest, in [0, 1]; 0 is off.
        presence_penalty: subtracted once from the logit of each token that was generated.
        frequency_penalty: subtracted from the logit for each time that the token was generated.
        repetition_penalty: divides positive and multiplies negative logits of tokens in prompt or output; 1 is off.
        logit_bias: token id to bias, added to the logits.
        seed: 64-bit seed; the server draws one where the client gave none.
        max_tokens: upper bound of generated tokens.
        min_tokens: no stop token (and no end of sequence) is sampled before so many tokens.
        stop: strings that end the text, matched in the front end.
        stop_token_ids: ids that end the text, next to the model's own end-of-sequence ids.
        ignore_eos: do not stop at the model's end-of-sequence ids.
        include_stop_str_in_output: keep the matched stop string in the text.
        skip_special_tokens: leave special tokens out of the text.
        logprobs: number of top alternatives for each generated token (0: only the chosen one); None is off.
        prompt_logprobs: the same for the prompt's tokens; None is off.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int = 0
    max_tokens: int = 16
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None
