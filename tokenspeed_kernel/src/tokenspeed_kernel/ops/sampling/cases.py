"""Cases of the sampling ops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tokenspeed_kernel.case import Case

__all__ = ["CASES", "bias_inputs", "log_probs_inputs", "penalties_inputs", "uniform_inputs", "verify_inputs"]

_Build = Callable[[torch.Generator, torch.device, torch.dtype], dict[str, Any]]

# (temperature, top_k, top_p, min_p) of successive rows: alone, together, and greedy in every way.
_FILTERS = (
    (1.0, 0, 1.0, 0.0),
    (0.7, 5, 0.9, 0.0),
    (0.0, 0, 1.0, 0.0),
    (1.3, 0, 0.8, 0.02),
    (1.0, 3, 1.0, 0.0),
    (2.0, 300, 0.6, 0.0),
    (1e-12, 0, 0.5, 0.5),
    (1.0, 0, 1.0, 0.3),
    (1.0, 1, 0.9, 0.0),
    (0.9, 0, 1e-9, 0.0),
    (1.0, 0, 0.95, 0.0),
    (1.1, 1 << 30, 0.5, 1.0),
    (1.0, 0, 0.0, 0.0),
)


def _logits(generator: torch.Generator, device: torch.device, dtype: torch.dtype, rows: int, size: int, layout: str) -> Tensor:
    if layout == "transposed":  # the last dimension has the large stride
        return (torch.randn(size, rows, generator=generator) * 3).to(device, dtype).t()
    if layout == "sliced":  # rows and columns with gaps
        return (torch.randn(rows, 2 * size + 1, generator=generator) * 3).to(device, dtype)[:, 1::2]
    logits = torch.randn(rows, size, generator=generator) * 3
    if layout == "ties":
        logits = logits.round()
    if layout == "masked":  # as a grammar leaves them
        logits[torch.rand(rows, size, generator=generator) < 0.6] = float("-inf")
        logits[:, 0] = 0
    if layout == "broken":
        logits[0, size // 2] = float("nan")
        logits[1] = float("-inf")
        logits[2, 1] = float("inf")
        logits[3] = 0.0
        logits[4, ::2] = -0.0
        logits[5] *= 1e30
    return logits.to(device, dtype)


def _filters(rows: int, device: torch.device) -> dict[str, Tensor]:
    picked = [_FILTERS[row % len(_FILTERS)] for row in range(rows)]
    columns = list(zip(*picked, strict=True)) or [(), (), (), ()]
    return {
        "temperature": torch.tensor(columns[0], dtype=torch.float32, device=device),
        "top_k": torch.tensor(columns[1], dtype=torch.int32, device=device),
        "top_p": torch.tensor(columns[2], dtype=torch.float32, device=device),
        "min_p": torch.tensor(columns[3], dtype=torch.float32, device=device),
    }


def _argmax(rows: int, size: int, layout: str) -> _Build:
    return lambda generator, device, dtype: {"logits": _logits(generator, device, dtype, rows, size, layout)}


def _sample(rows: int, size: int, layout: str) -> _Build:
    def build(generator: torch.Generator, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
        logits = _logits(generator, device, dtype, rows, size, layout)
        uniform = torch.rand(rows, dtype=torch.float64, generator=generator).to(device)
        return {"logits": logits, "uniform": uniform, **_filters(rows, device)}

    return build


def _probs(rows: int, size: int, layout: str) -> _Build:
    def build(generator: torch.Generator, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
        return {"logits": _logits(generator, device, dtype, rows, size, layout), **_filters(rows, device)}

    return build


def verify_inputs(rows: int, drafts: int, size: int, layout: str, *, probs: bool) -> _Build:
    """Drafts that the target often gives, so that chains end at every place; some rows have fewer, or none."""

    def build(generator: torch.Generator, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
        flat = _logits(generator, device, dtype, rows * (drafts + 1), size, layout)
        logits = torch.unflatten(flat, 0, (rows, drafts + 1))
        filters = _filters(rows, device)
        near = logits[:, :drafts].float().cpu() + torch.randn(rows, drafts, size, generator=generator)
        proposed = torch.softmax(near.nan_to_num(0.0, 9.0, -9.0).clamp(-50, 50), -1)
        uniform = torch.rand(rows, drafts + 1, 3, dtype=torch.float64, generator=generator)
        ids = (proposed.double().cumsum(-1) < uniform[:, :drafts, 2:]).sum(-1).clamp(max=size - 1).int()
        ids[1::4, drafts // 2 :] = -1
        ids[3::8] = size
        inputs = {"logits": logits, "draft_ids": ids.to(device), "uniform": uniform.to(device)[:, :, 0], **filters}
        if probs:
            inputs["draft_probs"] = proposed.to(device)
            inputs["accept_uniform"] = uniform.to(device)[:, :drafts, 1]
        return inputs

    return build


def log_probs_inputs(rows: int, size: int, layout: str) -> _Build:
    """Make arguments of `log_probs`; some ids lie outside of the vocabulary."""
    def build(generator: torch.Generator, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
        logits = _logits(generator, device, dtype, rows, size, layout)
        ids = torch.randint(-1, size + 1, (rows,), generator=generator, dtype=torch.int32).to(device)
        return {"logits": logits, "token_ids": ids, "top_n": min(size, 3)}

    return build


def uniform_inputs(rows: int, stream: int) -> _Build:
    """Make arguments of `philox_uniform`."""
    def build(generator: torch.Generator, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
        seeds = torch.randint(-(2**63), 2**63 - 1, (2 * rows,), generator=generator)
        counters = torch.randint(0, 2**40, (rows,), generator=generator)
        return {"seeds": seeds.to(device)[::2], "counters": counters.to(device), "stream": stream}

    return build


def _lists(generator: torch.Generator, device: torch.device, rows: int, size: int) -> dict[str, Tensor]:
    """Each row's distinct tokens, some rows empty; the last entry of a row lies outside the vocabulary."""
    members, offsets = [], [0]
    for row in range(rows):
        number = 0 if row % 3 == 1 else int(torch.randint(1, min(size, 200) + 1, (1,), generator=generator))
        picked = torch.randperm(size, generator=generator)[:number].tolist()
        members += [*picked, size if row % 2 else -1][: number + 1] if number else []
        offsets.append(len(members))
    return {
        "row_offsets": torch.tensor(offsets, dtype=torch.int32, device=device),
        "token_ids": torch.tensor(members, dtype=torch.int32, device=device),
    }


def penalties_inputs(rows: int, size: int, layout: str, *, pending: bool) -> _Build:
    """Make arguments of `apply_penalties`."""
    def build(generator: torch.Generator, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
        def vector(low: float, high: float) -> Tensor:
            return (torch.rand(rows, generator=generator) * (high - low) + low).to(device)

        logits = _logits(generator, device, dtype, rows, size, layout)
        lists = _lists(generator, device, rows, size)
        counts = torch.randint(0, 4, (len(lists["token_ids"]),), generator=generator, dtype=torch.int32).to(device)
        inputs = {
            "logits": logits,
            **lists,
            "output_counts": counts,
            "presence": vector(-2, 2),
            "frequency": vector(-2, 2),
            "repetition": vector(0.5, 2),
        }
        if pending:  # on the list, new to it, none, outside
            choices = torch.randint(-1, size + 1, (rows,), generator=generator, dtype=torch.int32)
            inputs["pending"] = choices.to(device)
        return inputs

    return build


def bias_inputs(rows: int, size: int, layout: str) -> _Build:
    """Make arguments of `apply_logit_bias`."""
    def build(generator: torch.Generator, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
        logits = _logits(generator, device, dtype, rows, size, layout)
        lists = _lists(generator, device, rows, size)
        bias = torch.randn(len(lists["token_ids"]), generator=generator) * 10
        bias[::5] = float("-inf")
        return {"logits": logits, **lists, "bias": bias.to(device)}

    return build


_SHAPES: tuple[tuple[str, int, int, str, bool], ...] = (
    ("empty 0x64", 0, 64, "contiguous", False),
    ("one token 2x1", 2, 1, "contiguous", False),
    ("odd 13x37", 13, 37, "contiguous", False),
    ("ties 13x130", 13, 130, "ties", False),
    ("masked 13x100", 13, 100, "masked", False),
    ("transposed 5x24", 5, 24, "transposed", False),
    ("sliced 4x33", 4, 33, "sliced", False),
    ("broken 6x50", 6, 50, "broken", False),
    ("several blocks 3x4500", 3, 4500, "contiguous", False),
    ("16x49152", 16, 49152, "contiguous", True),
    ("16x128256", 16, 128256, "contiguous", True),
    ("ties 13x128256", 13, 128256, "ties", True),
)

CASES = (
    *(
        Case(f"sampling.{op}", label, make(rows, size, layout), outputs=outputs, bench=bench)
        for op, make, outputs in (
            ("argmax", _argmax, ("out",)),
            ("sample", _sample, ("out",)),
            ("sampling_probs", _probs, ("out",)),
            ("log_probs", log_probs_inputs, ()),
            ("apply_logit_bias", bias_inputs, ("out",)),
        )
        for label, rows, size, layout, bench in _SHAPES
    ),
    *(
        Case("sampling.apply_penalties", label + suffix, penalties_inputs(rows, size, layout, pending=bool(suffix)), bench=bench)
        for label, rows, size, layout, bench in _SHAPES
        for suffix in ("", ", pending")
    ),
    *(
        Case(
            "sampling.verify_chain",
            f"{label} K={drafts}{', draft_probs' if probs else ''}",
            verify_inputs(rows, drafts, size, layout, probs=probs),
            outputs=("out", "num_tokens_out"),
            bench=bench,
        )
        for label, rows, drafts, size, layout, bench in (
            ("empty", 0, 3, 64, "contiguous", False),
            ("no drafts 4x40", 4, 0, 40, "contiguous", False),
            ("one token 3x1", 3, 2, 1, "contiguous", False),
            ("odd 7x37", 7, 4, 37, "contiguous", False),
            ("ties 4x50", 4, 3, 50, "ties", False),
            ("masked 5x60", 5, 2, 60, "masked", False),
            ("transposed 5x24", 5, 2, 24, "transposed", False),
            ("sliced 4x33", 4, 3, 33, "sliced", False),
            ("broken 4x30", 4, 1, 30, "broken", False),
            ("16x128256", 16, 4, 128256, "contiguous", True),
        )
        for probs in (False, True)
    ),
    *(
        Case("sampling.philox_uniform", f"{rows} rows, stream {stream}", uniform_inputs(rows, stream))
        for rows, stream in ((0, 0), (1, 0), (300, 7), (5, 2**32 - 1))
    ),
)
"""Every kernel of the family meets these."""
