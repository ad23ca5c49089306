"""Least work of the sampling ops: logits and lists are read, results written once."""

from __future__ import annotations

from typing import Final

from tokenspeed_kernel.case import Cost

__all__ = ["COSTS"]

_OPS: Final = (
    "sampling.argmax",
    "sampling.sample",
    "sampling.sampling_probs",
    "sampling.log_probs",
    "sampling.apply_penalties",
    "sampling.apply_logit_bias",
    "sampling.philox_uniform",
    "sampling.verify_chain",
)
# Bandwidth alone is the limit.
COSTS: Final = {op: Cost() for op in _OPS}
"""By op."""
