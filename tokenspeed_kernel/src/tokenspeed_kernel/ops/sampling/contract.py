"""What the ops of the sampling family promise.

The tokens of a row have one order, called the *total order* everywhere in this family: larger logit first, equal logits by
lower id. argmax is its first token; top-k and top-p keep a prefix of it, so that a tie at the cut keeps the lower ids; min-p
keeps or drops equal logits together. Filters apply in the order temperature, top-k, top-p on what top-k left, min-p.
"""

from __future__ import annotations

from tokenspeed_kernel.spec import OpContract

GREEDY_TEMPERATURE = 1e-4
"""Temperatures up to this one (compared as float32) mean greedy: below it 1 / temperature only amplifies rounding noise."""
INVALID_TOKEN = -1
"""Stands for the token of a row that cannot be sampled: it holds a NaN, or its maximum is infinite."""
ACCEPT_STREAM = 1
"""Philox stream of the numbers that decide whether a draft token is accepted; tokens are drawn with those of stream 0."""
MAX_TOP_LOGPROBS = 128
"""Most alternatives that log_probs reports for a row."""

LOGIT_FORMATS = ("fp32", "bf16", "fp16")

_FILTERS = ("temperature", "top_k", "top_p", "min_p")

CONTRACTS = (
    OpContract("sampling.argmax", ("logits",), ("logits", "out"), summary="id of the largest logit, the lowest of equal ones"),
    OpContract(
        "sampling.sample",
        ("logits",),
        ("logits", "uniform", *_FILTERS, "out"),
        summary="one token a row: temperature, top-k, top-p, min-p, inverse of the cumulative distribution",
    ),
    OpContract(
        "sampling.sampling_probs",
        ("logits",),
        ("logits", *_FILTERS, "out"),
        summary="the distribution that sample draws from",
    ),
    OpContract(
        "sampling.philox_uniform",
        ("seeds",),
        ("seeds", "counters", "stream", "out"),
        summary="counter-based random doubles in [0, 1): Philox-4x32-10",
    ),
    OpContract(
        "sampling.apply_penalties",
        ("logits",),
        (
            "logits",
            "row_offsets",
            "token_ids",
            "output_counts",
            "presence",
            "frequency",
            "repetition",
            "pending",
            "out",
        ),
        summary="repetition, frequency and presence penalties from lists of tokens",
    ),
    OpContract(
        "sampling.apply_logit_bias",
        ("logits",),
        ("logits", "row_offsets", "token_ids", "bias", "out"),
        summary="add biases to listed tokens' logits",
    ),
    OpContract(
        "sampling.log_probs",
        ("logits",),
        ("logits", "token_ids", "top_n"),
        summary="log-softmax at chosen ids, their ranks, and the most likely alternatives",
    ),
    OpContract(
        "sampling.verify_chain",
        ("logits", "draft_probs"),
        (
            "logits",
            "draft_ids",
            "uniform",
            *_FILTERS,
            "draft_probs",
            "accept_uniform",
            "out",
            "num_tokens_out",
        ),
        summary="the tokens that a chain of draft tokens gives: those accepted, and one more",
    ),
)
