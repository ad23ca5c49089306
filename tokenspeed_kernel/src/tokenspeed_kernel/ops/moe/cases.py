"""Cases of the mixture-of-experts ops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tokenspeed_kernel.case import Case, Tolerance
from tokenspeed_kernel.ops.moe.cases_experts import EXPERT_CASES
from tokenspeed_kernel.ops.moe.contract import PERMUTE, TOPK_ROUTING, UNPERMUTE

__all__ = ["CASES", "SUMS", "pair_ids", "permute_inputs", "unpermute_inputs"]

_Build = Callable[[torch.Generator, torch.device, torch.dtype], dict[str, Any]]


def _routing(num_tokens: int, num_experts: int, top_k: int, layout: str = "contiguous", bias: str = "", **options: Any) -> _Build:
    def build(generator: torch.Generator, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
        logits = torch.randn(num_tokens, num_experts, generator=generator) * 2
        if layout == "ties":  # a few distinct values: each row has many equal ones
            logits = logits.round()
        if layout == "broken":
            logits[0, ::2] = float("nan")
            logits[1] = float("nan")
            logits[2] = float("-inf")
            logits[3, 1] = float("inf")
            logits[4, :2] = float("inf")
            logits[5] = 60.0  # a sigmoid of 1
            logits[6] = -200.0  # a sigmoid of 0
        logits = logits.to(device, dtype)
        if layout == "transposed":
            logits = logits.t().contiguous().t()
        if layout == "sliced":
            logits = logits.repeat_interleave(2, dim=1)[:, ::2]
        inputs: dict[str, Any] = {"logits": logits, "top_k": top_k, **options}
        if bias:
            # Of the scores' size, so that it changes the choice; negative ones must not lose to experts that are barred.
            offset = torch.randn(num_experts, generator=generator) * 0.3 - (1 if bias == "negative" else 0)
            inputs["correction_bias"] = offset.to(device, dtype if bias == "narrow" else torch.float32)
        return inputs

    return build


_SIGMOID: dict[str, Any] = {"scoring": "sigmoid", "renormalize": True, "scaling_factor": 2.5}
_GROUPED: dict[str, Any] = {**_SIGMOID, "num_groups": 4, "top_groups": 2, "group_score": "top2_sum"}
_ROUTING: tuple[tuple[str, _Build, bool], ...] = (
    ("empty 0x8", _routing(0, 8, 2), False),
    ("empty, groups", _routing(0, 48, 6, bias="fp32", **_GROUPED), False),
    ("odd 5x7 top 3", _routing(5, 7, 3), False),
    ("one expert 3x1 top 1", _routing(3, 1, 1), False),
    ("all experts 3x6 top 6", _routing(3, 6, 6, renormalize=True), False),
    ("top 1 of 60", _routing(4, 60, 1), False),
    ("top 8 of 128, renormalized", _routing(9, 128, 8, renormalize=True), False),
    ("topk_softmax 5x32 top 4", _routing(5, 32, 4, scoring="topk_softmax"), False),
    ("topk_softmax, scaled, ties", _routing(5, 33, 4, "ties", scoring="topk_softmax", scaling_factor=0.5), False),
    ("sigmoid 5x12 top 3", _routing(5, 12, 3, scoring="sigmoid"), False),
    ("ties 9x20 top 5", _routing(9, 20, 5, "ties"), False),
    ("ties, sigmoid, bias", _routing(9, 24, 5, "ties", bias="fp32", **_SIGMOID), False),
    ("sigmoid, bias 5x40", _routing(5, 40, 6, bias="fp32", **_SIGMOID), False),
    ("sigmoid, bias in the dtype of the logits", _routing(5, 40, 6, bias="narrow", **_SIGMOID), False),
    ("softmax, bias", _routing(5, 40, 6, bias="fp32"), False),
    ("groups by the sum of two 6x48", _routing(6, 48, 6, bias="fp32", **_GROUPED), False),
    ("groups, negative bias", _routing(6, 48, 8, bias="negative", **_GROUPED), False),
    ("groups of one", _routing(6, 8, 2, **{**_GROUPED, "num_groups": 8, "top_groups": 3}), False),
    ("groups by their maximum, softmax", _routing(6, 60, 4, num_groups=5, top_groups=2, scaling_factor=16.0), False),
    ("groups, ties", _routing(6, 48, 6, "ties", num_groups=6, top_groups=3), False),
    ("transposed 5x24", _routing(5, 24, 3, "transposed", renormalize=True), False),
    ("sliced 5x24", _routing(5, 24, 3, "sliced", bias="fp32", **_SIGMOID), False),
    ("broken softmax", _routing(8, 10, 4, "broken", renormalize=True), False),
    ("broken sigmoid", _routing(8, 10, 4, "broken", bias="fp32", **_SIGMOID), False),
    ("broken topk_softmax", _routing(8, 10, 4, "broken", scoring="topk_softmax"), False),
    ("broken groups", _routing(8, 12, 4, "broken", **_GROUPED), False),
    ("64x128 top 8", _routing(64, 128, 8, renormalize=True), True),
    ("64x256 top 8 of 4 of 8 groups", _routing(64, 256, 8, bias="fp32", **{**_GROUPED, "num_groups": 8, "top_groups": 4}), True),
)


def pair_ids(
    generator: torch.Generator, num_tokens: int, top_k: int, num_experts: int, kind: str = "distinct", first_expert: int = 0
) -> torch.Tensor:
    """Expert ids [num_tokens, top_k] int32.

    Args:
        generator: of the ids.
        num_tokens: rows.
        top_k: columns.
        num_experts: experts that lie here.
        kind: `distinct` within a row; `one` for all tokens; `missing`, some -1; `outside`, also experts of other ranks;
            `repeated` within a row; `none` that lies here.
        first_expert: id of the first expert that lies here.
    """
    ids = torch.rand(num_tokens, num_experts, generator=generator).argsort(1)[:, :top_k]
    if kind == "one":
        ids = torch.full((num_tokens, top_k), num_experts // 2)
    if kind == "repeated":
        ids = torch.randint(0, num_experts, (num_tokens, top_k), generator=generator)
    ids = ids + first_expert
    if kind == "missing":
        ids[torch.rand(num_tokens, top_k, generator=generator) < 0.4] = -1
    if kind == "outside":
        ids = torch.randint(-1, first_expert + 2 * num_experts, (num_tokens, top_k), generator=generator)
    if kind == "none":
        ids = torch.full((num_tokens, top_k), -1)
    return ids.int()


def permute_inputs(
    num_tokens: int, top_k: int, num_experts: int, hidden: int, kind: str = "distinct", layout: str = "", first: int = 0
) -> _Build:
    """Make arguments of `permute`; `kind` as in `pair_ids`, `layout` of rows and ids."""
    def build(generator: torch.Generator, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
        x = torch.randn(num_tokens, hidden, generator=generator).to(device, dtype)
        ids = pair_ids(generator, num_tokens, top_k, num_experts, kind, first).to(device)
        if layout == "transposed":
            x, ids = x.t().contiguous().t(), ids.t().contiguous().t()
        if layout == "sliced":
            x, ids = x.repeat_interleave(2, dim=1)[:, ::2], ids.repeat_interleave(2, dim=1)[:, ::2]
        return {"x": x, "topk_ids": ids, "num_experts": num_experts, "first_expert": first}

    return build


_PERMUTE: tuple[tuple[str, _Build, bool], ...] = (
    ("empty 0 tokens", permute_inputs(0, 2, 4, 8), False),
    ("one token", permute_inputs(1, 1, 1, 8), False),
    ("odd 5x7", permute_inputs(5, 3, 7, 7), False),
    ("an expert without tokens", permute_inputs(2, 2, 11, 16), False),
    ("all on one expert", permute_inputs(9, 2, 4, 16, "one"), False),
    ("some -1", permute_inputs(9, 3, 5, 16, "missing"), False),
    ("nothing here", permute_inputs(4, 2, 3, 16, "none"), False),
    ("experts of other ranks", permute_inputs(20, 4, 6, 12, "outside", first=6), False),
    ("repeated ids", permute_inputs(12, 4, 5, 12, "repeated"), False),
    ("transposed", permute_inputs(6, 2, 5, 24, layout="transposed"), False),
    ("sliced", permute_inputs(6, 2, 5, 24, layout="sliced"), False),
    ("several blocks of pairs", permute_inputs(700, 3, 9, 4), False),
    ("no elements", permute_inputs(3, 2, 5, 0), False),
    ("4096x2048 top 8 of 128", permute_inputs(4096, 8, 128, 2048), True),
)


def unpermute_inputs(num_tokens: int, top_k: int, hidden: int, kind: str = "all", layout: str = "", addend: bool = False) -> _Build:
    """Make arguments of `unpermute`; of kind `missing`, half of the pairs have no row."""
    def build(generator: torch.Generator, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
        pairs = num_tokens * top_k
        rows = torch.randn(pairs, hidden, generator=generator)
        row_of_pair = torch.randperm(pairs, generator=generator).int().view(num_tokens, top_k)
        weights = torch.rand(num_tokens, top_k, generator=generator)
        if kind == "missing":  # what no pair names may be anything
            dropped = torch.rand(num_tokens, top_k, generator=generator) < 0.5
            rows[row_of_pair[dropped].long()] = float("nan")
            row_of_pair[dropped] = -1
            row_of_pair[-1] = pairs  # outside
        rows = rows.to(device, dtype)
        if layout == "transposed":
            rows = rows.t().contiguous().t()
            row_of_pair, weights = row_of_pair.t().contiguous().t(), weights.t().contiguous().t()
        if layout == "sliced":
            rows = rows.repeat_interleave(2, dim=1)[:, ::2]
        inputs = {"rows": rows, "row_of_pair": row_of_pair.to(device), "topk_weights": weights.to(device)}
        if addend:
            inputs["addend"] = torch.randn(num_tokens, hidden, generator=generator).to(device, dtype)
        return inputs

    return build


_UNPERMUTE: tuple[tuple[str, _Build, bool], ...] = (
    ("empty 0 tokens", unpermute_inputs(0, 2, 8), False),
    ("one token", unpermute_inputs(1, 1, 8), False),
    ("odd 5x7", unpermute_inputs(5, 3, 7), False),
    ("some dropped", unpermute_inputs(9, 3, 16, "missing"), False),
    ("some dropped, addend", unpermute_inputs(9, 3, 16, "missing", addend=True), False),
    ("transposed", unpermute_inputs(6, 2, 24, layout="transposed"), False),
    ("sliced, addend", unpermute_inputs(6, 2, 24, layout="sliced", addend=True), False),
    ("wide 2x3000", unpermute_inputs(2, 2, 3000), False),
    ("many tokens", unpermute_inputs(70, 2, 12, addend=True), False),
    ("4096x2048 top 8", unpermute_inputs(4096, 8, 2048), True),
)
# Sums of as many rounded terms as a token has experts.
SUMS = {torch.float16: Tolerance(2e-3, 4e-3), torch.bfloat16: Tolerance(1.6e-2, 3e-2)}

CASES = (
    *(Case(TOPK_ROUTING.name, label, build, ("weights_out", "ids_out"), bench=bench) for label, build, bench in _ROUTING),
    *(Case(PERMUTE.name, label, build, (), bench=bench) for label, build, bench in _PERMUTE),
    *(Case(UNPERMUTE.name, label, build, tolerance=SUMS, bench=bench) for label, build, bench in _UNPERMUTE),
    *EXPERT_CASES,
)
"""Every kernel of the family meets these, unless its formats leave one out."""
