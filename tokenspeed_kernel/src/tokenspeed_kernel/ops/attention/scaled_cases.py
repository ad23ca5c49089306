"""Cases of attention to fp8 caches with scales."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

from tokenspeed_kernel.case import Case
from tokenspeed_kernel.ops.attention.batches import (
    DECODE_BATCHES,
    DEVICE_DECODE_BATCHES,
    DEVICE_EXTEND_BATCHES,
    EXTEND_BATCHES,
    Batch,
    decode_inputs,
    paged_inputs,
)
from tokenspeed_kernel.ops.attention.contract import MHA_DECODE_SCALED, MHA_EXTEND_SCALED

__all__ = ["SCALED_CASES", "SCALES", "scaled_inputs"]

SCALES: Final = (("tensor", "tensor"), ("head", "head"), ("tensor", "head"), ("head", "tensor"))
"""Layouts of the scales of keys and values."""
_NAN_BYTE: Final = 0x7F


def scaled_inputs(
    op: str, batch: Batch, generator: torch.Generator, device: torch.device, dtype: torch.dtype, keys: str, values: str
) -> dict[str, Any]:
    """Arguments of the op: the caches of `mha_extend` in fp8, NaN where that has NaN, with scales that change them visibly."""
    inputs = decode_inputs if op == MHA_DECODE_SCALED.name else paged_inputs
    made = inputs(batch, dtype=dtype, device="cpu", seed=generator.initial_seed())
    for name, layout in (("k", keys), ("v", values)):
        scale = torch.rand(batch.num_kv_heads, generator=generator) * 0.02 + 0.003
        scale = scale if layout == "head" else scale[0]
        wide = made[f"{name}_cache"].float()
        stored = (wide / (scale if scale.dim() == 0 else scale[:, None])).clamp(-448, 448).to(torch.float8_e4m3fn)
        stored.view(torch.uint8)[wide.isnan()] = _NAN_BYTE
        made[f"{name}_cache"], made[f"{name}_scale"] = stored, scale
    return {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in made.items()}


def _cases(op: str, batches: tuple[Batch, ...], *, bench: bool = False) -> list[Case]:
    def build(
        batch: Batch, layouts: tuple[str, str], lse: bool
    ) -> Callable[[torch.Generator, torch.device, torch.dtype], dict[str, Any]]:
        def make(generator: torch.Generator, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
            made = scaled_inputs(op, batch, generator, device, dtype, *layouts)
            return {**made, "return_lse": True} if lse else made

        return make

    cases = []
    for place, batch in enumerate(batch for batch in batches if not batch.fp8):
        layouts = SCALES[place % len(SCALES)]
        label = f"{batch.name} {'-'.join(layouts)}"
        cases.append(Case(op, label, build(batch, layouts, False), bench=bench))
        # The LSE has no output argument: those cases are run without given outputs.
        cases.append(Case(op, f"{label} lse", build(batch, layouts, True), outputs=(), bench=bench))
    return cases


SCALED_CASES: Final = (
    *_cases(MHA_DECODE_SCALED.name, DECODE_BATCHES),
    *_cases(MHA_EXTEND_SCALED.name, EXTEND_BATCHES),
    *_cases(MHA_DECODE_SCALED.name, DEVICE_DECODE_BATCHES, bench=True),
    *_cases(MHA_EXTEND_SCALED.name, DEVICE_EXTEND_BATCHES, bench=True),
)
"""Every kernel of the scaled ops meets these."""
