"""Choosing tokens: argmax, sampling with filters, random numbers, penalties, biases, log-probabilities."""

from tokenspeed_kernel.ops.sampling.api import (
    apply_logit_bias,
    apply_penalties,
    argmax,
    log_probs,
    philox_uniform,
    sample,
    sampling_probs,
)
from tokenspeed_kernel.ops.sampling.contract import ACCEPT_STREAM, GREEDY_TEMPERATURE, INVALID_TOKEN, MAX_TOP_LOGPROBS
from tokenspeed_kernel.ops.sampling.verify import verify_chain

__all__ = [
    "ACCEPT_STREAM",
    "GREEDY_TEMPERATURE",
    "INVALID_TOKEN",
    "MAX_TOP_LOGPROBS",
    "apply_logit_bias",
    "apply_penalties",
    "argmax",
    "log_probs",
    "philox_uniform",
    "sample",
    "sampling_probs",
    "verify_chain",
]
