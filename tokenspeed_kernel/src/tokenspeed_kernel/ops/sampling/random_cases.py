"""Random cases of the sampling ops that take logits alone or with filters."""

from __future__ import annotations

import functools
import random
from typing import Any, Final

import torch

from tokenspeed_kernel.case import Case
from tokenspeed_kernel.ops.random_shapes import random_layout, random_size

__all__ = ["RANDOM"]


def _case(op: str, rng: random.Random) -> Case:
    rows, size, state = random_size(rng, 20, low=0), random_size(rng, 3000), rng.getrandbits(32)
    columns: dict[str, tuple[list[float], torch.dtype]] = {
        "temperature": ([rng.choice((0.0, 0.3, 1.0, 2.5)) for _ in range(rows)], torch.float32),
        "top_k": ([rng.choice((0, 1, 2, 50, size, size + 5)) for _ in range(rows)], torch.int32),
        "top_p": ([rng.choice((0.0, 0.1, 0.9, 1.0)) for _ in range(rows)], torch.float32),
        "min_p": ([rng.choice((0.0, 0.0, 0.05, 1.0)) for _ in range(rows)], torch.float32),
    }

    def build(generator: torch.Generator, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
        logits = torch.randn(rows, size, generator=generator) * 4
        inputs: dict[str, Any] = {"logits": random_layout(random.Random(state), logits.to(device, dtype))}
        if op == "sampling.argmax":
            return inputs
        filters = {name: torch.tensor(values, dtype=kind, device=device) for name, (values, kind) in columns.items()}
        if op == "sampling.sample":
            inputs["uniform"] = torch.rand(rows, dtype=torch.float64, generator=generator).to(device)
        return {**inputs, **filters}

    return Case(op, f"random {rows}x{size} {state:08x}", build)


RANDOM: Final = {
    op: functools.partial(_case, op) for op in ("sampling.argmax", "sampling.sample", "sampling.sampling_probs")
}
"""Makes a case of each op from a random generator."""
