"""Random cases of routing and of the experts: sizes, formats, gates, and ids that repeat, lack, or lie elsewhere."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, Final

import torch

from tokenspeed_kernel.case import Case, Tolerance
from tokenspeed_kernel.ops.moe.cases import SUMS, pair_ids, permute_inputs, unpermute_inputs
from tokenspeed_kernel.ops.moe.cases_experts import CLAMPED, ROUNDED, random_experts
from tokenspeed_kernel.ops.moe.contract import ACTIVATION_FORMATS, FUSED_EXPERTS, PERMUTE, TOPK_ROUTING, UNPERMUTE, WEIGHT_FORMATS
from tokenspeed_kernel.ops.random_shapes import random_layout, random_size

__all__ = ["RANDOM"]

# As for the fixed cases: gated values are rounded between the products, and results of experts before they are summed.
_TOLERANCE: Final = {
    torch.float32: Tolerance(2e-5, 3e-5),
    torch.float16: Tolerance(4e-3, 8e-3),
    torch.bfloat16: Tolerance(3e-2, 6e-2),
}


def _experts(rng: random.Random) -> Case:
    num_experts, num_tokens = rng.randint(1, 9), random_size(rng, 40, low=0)
    top_k, fmt = rng.randint(1, num_experts), rng.choice(("", "", *WEIGHT_FORMATS))
    # Scaled formats have blocks, of up to 128 numbers.
    hidden, inner = ((128 * rng.randint(1, 2), 128) if fmt else (random_size(rng, 90), random_size(rng, 90)))
    kind = rng.choice(("distinct", "one", "missing", "outside", "repeated", "none"))
    # Rows in fp8, where the weights' format goes with some.
    fitting = [rows for rows, weights in ACTIVATION_FORMATS.items() if fmt in weights]
    rows = rng.choice((None, *fitting)) if fitting else None
    first, gate, state = 3 if kind == "outside" else 0, rng.choice((None, None, CLAMPED)), rng.getrandbits(32)

    def build(generator: torch.Generator, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
        layout = random.Random(state)
        x = torch.randn(num_tokens, hidden, generator=generator).to(device, dtype)
        inputs: dict[str, Any] = {
            "x": random_layout(layout, x),
            "w13": random_experts(generator, (num_experts, 2 * inner, hidden), fmt, device, dtype),
            "w2": random_experts(generator, (num_experts, hidden, inner), fmt, device, dtype),
            "topk_ids": pair_ids(generator, num_tokens, top_k, num_experts, kind, first).to(device),
            "topk_weights": torch.rand(num_tokens, top_k, generator=generator).to(device),
        }
        options = {"activation": gate, "first_expert": first or None, "activation_format": rows}
        return {**inputs, **{name: value for name, value in options.items() if value is not None}}

    label = f"random {num_tokens} tokens, top {top_k} of {num_experts}, {hidden}x{inner} {rows or ''} {fmt} {kind} {state:08x}"
    return Case(FUSED_EXPERTS.name, label, build, tolerance=ROUNDED if rows else _TOLERANCE)


def _routing(rng: random.Random) -> Case:
    num_groups, per_group = rng.choice((1, 1, 2, 4)), rng.randint(2, 20)
    num_experts, num_tokens = num_groups * per_group, random_size(rng, 30, low=0)
    top_groups = rng.randint(1, num_groups)
    options: dict[str, Any] = {"top_k": rng.randint(1, min(8, top_groups * per_group)), "renormalize": rng.random() < 0.5}
    options["scoring"] = rng.choice(("softmax", "sigmoid"))
    if num_groups > 1:
        options.update(num_groups=num_groups, top_groups=top_groups)
    biased, state = rng.random() < 0.4, rng.getrandbits(32)

    def build(generator: torch.Generator, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
        logits = (torch.randn(num_tokens, num_experts, generator=generator) * 2).to(device, dtype)
        inputs = {"logits": random_layout(random.Random(state), logits), **options}
        if biased:
            inputs["correction_bias"] = (torch.randn(num_experts, generator=generator) * 0.3).to(device)
        return inputs

    label = f"random {num_tokens}x{num_experts} {options} {state:08x}"
    return Case(TOPK_ROUTING.name, label, build, ("weights_out", "ids_out"))


def _permute(rng: random.Random) -> Case:
    num_experts, num_tokens, hidden = rng.randint(1, 12), random_size(rng, 70, low=0), random_size(rng, 70)
    top_k = rng.randint(1, num_experts)
    kind = rng.choice(("distinct", "one", "missing", "outside", "repeated", "none"))
    layout, first = rng.choice(("", "transposed", "sliced")), 5 if kind == "outside" else 0
    label = f"random {num_tokens}x{hidden} top {top_k} of {num_experts} {kind} {layout} {rng.getrandbits(32):08x}"
    return Case(PERMUTE.name, label, permute_inputs(num_tokens, top_k, num_experts, hidden, kind, layout, first), ())


def _unpermute(rng: random.Random) -> Case:
    num_tokens, top_k, hidden = random_size(rng, 40), rng.randint(1, 8), random_size(rng, 200)
    kind, layout, addend = rng.choice(("all", "missing")), rng.choice(("", "transposed", "sliced")), rng.random() < 0.4
    label = f"random {num_tokens}x{hidden} top {top_k} {kind} {layout} {rng.getrandbits(32):08x}"
    build = unpermute_inputs(num_tokens, top_k, hidden, kind, layout, addend)
    return Case(UNPERMUTE.name, label, build, tolerance=SUMS)


RANDOM: Final[dict[str, Callable[[random.Random], Case]]] = {
    FUSED_EXPERTS.name: _experts,
    TOPK_ROUTING.name: _routing,
    PERMUTE.name: _permute,
    UNPERMUTE.name: _unpermute,
}
"""Makes a case of each op from a random generator."""
