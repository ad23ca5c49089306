"""Cases of the attention ops, from `batches`. They feed tests and timings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

from tokenspeed_kernel.case import Case
from tokenspeed_kernel.ops.attention.batches import (
    DECODE_BATCHES,
    DEVICE_DECODE_BATCHES,
    DEVICE_EXTEND_BATCHES,
    DEVICE_PREFILL_BATCHES,
    EXTEND_BATCHES,
    PREFILL_BATCHES,
    TOLERANCES,
    Batch,
    decode_inputs,
    paged_inputs,
    ragged_inputs,
)
from tokenspeed_kernel.ops.attention.contract import MHA_DECODE, MHA_EXTEND, MHA_PREFILL
from tokenspeed_kernel.ops.attention.merge_cases import MERGE_CASES
from tokenspeed_kernel.ops.attention.scaled_cases import SCALED_CASES

__all__ = [
    "CASES",
    "DECODE_BATCHES",
    "DEVICE_DECODE_BATCHES",
    "DEVICE_EXTEND_BATCHES",
    "DEVICE_PREFILL_BATCHES",
    "EXTEND_BATCHES",
    "PREFILL_BATCHES",
    "TOLERANCES",
    "Batch",
    "decode_inputs",
    "paged_inputs",
    "ragged_inputs",
]


def _cases(op: str, batches: tuple[Batch, ...], inputs: Callable[..., dict[str, Any]], *, bench: bool = False) -> list[Case]:
    def build(batch: Batch, return_lse: bool) -> Callable[[torch.Generator, torch.device, torch.dtype], dict[str, Any]]:
        def make(generator: torch.Generator, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
            made = inputs(batch, dtype=dtype, device=str(device), seed=generator.initial_seed())
            return {**made, "return_lse": True} if return_lse else made

        return make

    plain = [Case(op, batch.name, build(batch, False), bench=bench) for batch in batches]
    # The LSE has no output argument: those cases are run without given outputs.
    return plain + [Case(op, f"{batch.name} lse", build(batch, True), outputs=(), bench=bench) for batch in batches]


CASES: Final = (
    *_cases(MHA_DECODE.name, DECODE_BATCHES, decode_inputs),
    *_cases(MHA_EXTEND.name, EXTEND_BATCHES, paged_inputs),
    *_cases(MHA_PREFILL.name, PREFILL_BATCHES, ragged_inputs),
    *_cases(MHA_DECODE.name, DEVICE_DECODE_BATCHES, decode_inputs, bench=True),
    *_cases(MHA_EXTEND.name, DEVICE_EXTEND_BATCHES, paged_inputs, bench=True),
    *_cases(MHA_PREFILL.name, DEVICE_PREFILL_BATCHES, ragged_inputs, bench=True),
    *SCALED_CASES,
    *MERGE_CASES,
)
"""Every kernel of the family meets these."""
