"""What the mixture-of-experts ops promise: operands, parameters, and the traits that a kernel may restrict.

Scores and sums are float32 or better, an output is rounded once, and nothing depends on the order in which threads run: equal
inputs give equal bits. No op asks the device how many tokens an expert got, so that each can be captured into a graph.
"""

from __future__ import annotations

from typing import Final

from tokenspeed_kernel.signature import Format, Signature
from tokenspeed_kernel.spec import OpContract
from tokenspeed_kernel.traits import OneOf, Trait

__all__ = [
    "ACTIVATIONS",
    "ACTIVATION_FORMATS",
    "ALL_EXPERT_OPTIONS",
    "ALL_ROUTING_OPTIONS",
    "CONTRACTS",
    "FUSED_EXPERTS",
    "GROUP_SCORES",
    "PERMUTE",
    "PLAIN",
    "SCORINGS",
    "TOPK_ROUTING",
    "UNPERMUTE",
    "WEIGHT_FORMATS",
    "expert_formats",
    "routing_formats",
]

SCORINGS: Final = ("softmax", "sigmoid", "topk_softmax")
GROUP_SCORES: Final = ("max", "top2_sum")
ACTIVATIONS: Final = ("swiglu", "gelu", "gelu_tanh")
PLAIN: Final = ("fp32", "bf16", "fp16")

TOPK_ROUTING: Final = OpContract(
    name="moe.topk_routing",
    operands=("logits", "correction_bias"),
    parameters=(
        *("logits", "top_k", "scoring", "renormalize", "correction_bias", "num_groups", "top_groups", "group_score"),
        *("scaling_factor", "weights_out", "ids_out"),
    ),
    traits=(
        Trait("scoring", "how a logit becomes a weight", default="softmax"),
        Trait("grouped", "experts are chosen from the best groups only", default=False),
        Trait("biased", "a bias counts for choosing, not for the weights", default=False),
        Trait("num_experts", "experts to choose from"),
        Trait("top_k", "experts of a token"),
    ),
    summary="each token's experts and their weights, from the router's logits",
)
PERMUTE: Final = OpContract(
    name="moe.permute",
    operands=("x",),
    parameters=("x", "topk_ids", "num_experts", "first_expert"),
    summary="a row for each (token, expert) pair, sorted by expert",
)
UNPERMUTE: Final = OpContract(
    name="moe.unpermute",
    operands=("rows", "addend"),
    parameters=("rows", "row_of_pair", "topk_weights", "addend", "out"),
    summary="each token's rows, weighted and summed in float32",
)
FUSED_EXPERTS: Final = OpContract(
    name="moe.fused_experts",
    operands=("x", "w13", "w2", "w13_bias", "w2_bias", "addend"),
    parameters=(
        *("x", "w13", "w2", "topk_ids", "topk_weights", "w13_bias", "w2_bias", "activation", "activation_format", "first_expert"),
        *("addend", "out"),
    ),
    traits=(
        Trait("activation", "gate between the two products of an expert", default="swiglu"),
        Trait("clamped", "the gate has a limit, a steepness or an offset", default=False),
        Trait("biased", "experts have biases", default=False),
        Trait("activation_format", "format to which the rows of both products are rounded", default="none"),
        Trait("num_experts", "experts that lie here"),
        Trait("top_k", "experts of a token"),
        Trait("hidden_size", "elements of a token"),
        Trait("intermediate_size", "elements between the two products"),
    ),
    summary="the experts' gated feed-forward networks, weighted and summed for each token",
)
CONTRACTS: Final = (TOPK_ROUTING, PERMUTE, UNPERMUTE, FUSED_EXPERTS)

ALL_ROUTING_OPTIONS: Final = {"scoring": OneOf(*SCORINGS), "grouped": OneOf(True, False), "biased": OneOf(True, False)}
ACTIVATION_FORMATS: Final = {
    "fp8_e4m3@token": ("fp8_e4m3@tensor", "fp8_e4m3@channel"),
    "fp8_e4m3@block_1x128": ("fp8_e4m3@block_128x128",),
}
"""Formats to which the rows of both products can be rounded, each with those of the weights that it goes with."""
ALL_EXPERT_OPTIONS: Final = {
    "activation": OneOf(*ACTIVATIONS),
    "clamped": OneOf(True, False),
    "biased": OneOf(True, False),
    "activation_format": OneOf("none", *ACTIVATION_FORMATS),
}
"""Constraints of a kernel that takes every option."""

WEIGHT_FORMATS: Final = (
    *(f"{logical}@{scale}" for logical in ("fp8_e4m3", "fp8_e5m2") for scale in ("tensor", "channel", "block_128x128")),
    *("mxfp8_e4m3@block_32", "mxfp8_e5m2@block_32", "mxfp4@block_32", "nvfp4@block_16", "mxint4@block_32"),
    *(f"{logical}@{scale}" for logical in ("int4", "uint4") for scale in ("channel", "group_32", "group_64", "group_128")),
)
"""Scaled formats of expert weights that the portable kernels read, for rows as they are; see `ACTIVATION_FORMATS` for others."""


def routing_formats() -> tuple[Signature, ...]:
    """Logits in a plain format, with a bias in the same one or in fp32."""
    return tuple(
        Signature.of(logits=fmt, correction_bias=bias) for fmt in PLAIN for bias in dict.fromkeys((fmt, "fp32"))
    )


def expert_formats(weights: tuple[str | Format, ...], formats: tuple[str, ...] = PLAIN) -> tuple[Signature, ...]:
    """Signatures with both weights in one of `weights`, or in x's own format; biases in x's format or fp32.

    Args:
        weights: scaled formats.
        formats: of x and of what is added to the result.
    """
    return tuple(
        Signature.of(x=fmt, w13=weight, w2=weight, w13_bias=bias, w2_bias=bias, addend=fmt)
        for fmt in formats
        for weight in (fmt, *weights)
        for bias in dict.fromkeys((fmt, "fp32"))
    )
