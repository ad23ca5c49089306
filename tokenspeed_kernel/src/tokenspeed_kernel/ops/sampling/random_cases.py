"""Random cases of the sampling ops."""

from __future__ import annotations

import functools
import random
from typing import Any, Final

import torch

from tokenspeed_kernel.case import Case
from tokenspeed_kernel.ops.random_shapes import random_layout, random_size
from tokenspeed_kernel.ops.sampling.cases import (
    bias_inputs,
    log_probs_inputs,
    penalties_inputs,
    uniform_inputs,
    verify_inputs,
)

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


def _of_lists(op: str, rng: random.Random) -> Case:
    """Of the ops that take a list for each row, or an id."""
    rows, size = random_size(rng, 20, low=0), random_size(rng, 2000)
    layout = rng.choice(("contiguous", "ties", "masked", "transposed", "sliced"))
    pending = rng.random() < 0.5
    label = f"random {rows}x{size} {layout}{' pending' if pending else ''} {rng.getrandbits(32):08x}"
    if op == "sampling.apply_penalties":
        return Case(op, label, penalties_inputs(rows, size, layout, pending=pending))
    if op == "sampling.apply_logit_bias":
        return Case(op, label, bias_inputs(rows, size, layout))
    return Case(op, label, log_probs_inputs(rows, size, layout), outputs=())


def _verify(rng: random.Random) -> Case:
    rows, drafts, size = rng.randint(0, 9), rng.randint(0, 5), random_size(rng, 300)
    layout, probs = rng.choice(("contiguous", "ties", "masked")), rng.random() < 0.5
    label = f"random {rows}x{drafts}x{size} {layout}{' draft_probs' if probs else ''} {rng.getrandbits(32):08x}"
    build = verify_inputs(rows, drafts, size, layout, probs=probs)
    return Case("sampling.verify_chain", label, build, outputs=("out", "num_tokens_out"))


def _uniform(rng: random.Random) -> Case:
    rows, stream = random_size(rng, 300, low=0), rng.getrandbits(32)
    return Case("sampling.philox_uniform", f"random {rows} rows, stream {stream}", uniform_inputs(rows, stream))


RANDOM: Final = {
    **{op: functools.partial(_case, op) for op in ("sampling.argmax", "sampling.sample", "sampling.sampling_probs")},
    **{
        op: functools.partial(_of_lists, op)
        for op in ("sampling.apply_penalties", "sampling.apply_logit_bias", "sampling.log_probs")
    },
    "sampling.verify_chain": _verify,
    "sampling.philox_uniform": _uniform,
}
"""Makes a case of each op from a random generator."""
