"""On a CUDA device: sizes of real models against the float64 reference, capture into a graph, and what batches may change."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tokenspeed_kernel.ops import moe
from tokenspeed_kernel.ops.moe.cases_experts import CLAMPED, random_experts

pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16
WIDE, CLAMPED_BIASED = (128, 8, 2048, 768), (32, 4, 2880, 2880)
"""Experts, experts of a token, hidden size, intermediate size."""


def _experts(sizes: tuple[int, int, int, int], fmt: str, dtype: torch.dtype = BF16) -> tuple[Any, Any]:
    num_experts, _, hidden, inner = sizes
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = ((num_experts, 2 * inner, hidden), (num_experts, hidden, inner))
    first, second = (random_experts(generator, shape, fmt, torch.device("cuda"), dtype) for shape in shapes)
    return first, second


def _batch(tokens: int, sizes: tuple[int, int, int, int], dtype: torch.dtype = BF16) -> dict[str, torch.Tensor]:
    num_experts, top_k, hidden, _ = sizes
    generator = torch.Generator("cuda").manual_seed(tokens)
    logits = torch.randn((tokens, num_experts), generator=generator, device="cuda")
    weights, ids = moe.topk_routing(logits, top_k, renormalize=True, solution="triton")
    x = torch.randn((tokens, hidden), generator=generator, device="cuda").to(dtype)
    return {"x": x, "topk_ids": ids, "topk_weights": weights}


def _close(got: torch.Tensor, want: torch.Tensor) -> None:
    """Absolute, and by direction: rounding the gated values to bf16 moves a sum of 768 of them by about 2 ** -9 of its size."""
    got, want = got.double(), want.double()
    assert got.isfinite().all()
    scale = want.square().mean().sqrt()
    assert float((got - want).abs().max() / scale) < 0.1
    assert float(torch.nn.functional.cosine_similarity(got.flatten(), want.flatten(), dim=0)) > 0.99995


@pytest.mark.parametrize("tokens", [1, 3, 16, 64, 300, 2000])
def test_wide_experts(tokens: int) -> None:
    w13, w2 = _experts(WIDE, "")
    batch = _batch(tokens, WIDE)
    made = moe.plan(moe.MoeConfig(*WIDE), "cuda", x_format="bf16", weight_format="bf16", solution="triton")
    got = moe.apply(made, moe.process_weights(made, w13, w2), **batch)
    _close(got, moe.fused_experts(w13=w13, w2=w2, **batch, solution="reference"))


@pytest.mark.parametrize("fmt", ["", "mxfp4@block_32"])
@pytest.mark.parametrize("tokens", [1, 16, 200])
def test_clamped_and_biased_experts(tokens: int, fmt: str) -> None:
    num_experts, _, hidden, inner = CLAMPED_BIASED
    w13, w2 = _experts(CLAMPED_BIASED, fmt)
    biases = {
        "w13_bias": torch.randn((num_experts, 2 * inner), device="cuda").to(BF16),
        "w2_bias": torch.randn((num_experts, hidden), device="cuda").to(BF16),
    }
    batch = _batch(tokens, CLAMPED_BIASED)
    config = moe.MoeConfig(*CLAMPED_BIASED, activation=CLAMPED, biased=True)
    made = moe.plan(config, "cuda", x_format="bf16", weight_format=fmt or "bf16", solution="triton")
    got = moe.apply(made, moe.process_weights(made, w13, w2, **biases), **batch)
    _close(got, moe.fused_experts(w13=w13, w2=w2, **batch, **biases, activation=CLAMPED, solution="reference"))


@pytest.mark.parametrize("tokens", [1, 40, 600])
@pytest.mark.parametrize(
    "fmt",
    ["fp8_e4m3@block_128x128", "fp8_e4m3@tensor", "fp8_e5m2@channel", "mxfp8_e4m3@block_32", "mxfp4@block_32", "nvfp4@block_16",
     "mxint4@block_32", "int4@group_128", "uint4@group_64", "uint4@channel"],
)  # fmt: skip
def test_formats(fmt: str, tokens: int) -> None:
    sizes = (16, 4, 2048, 768)
    w13, w2 = _experts(sizes, fmt)
    batch = _batch(tokens, sizes)
    made = moe.plan(moe.MoeConfig(*sizes), "cuda", x_format="bf16", weight_format=fmt, solution="triton")
    got = moe.apply(made, moe.process_weights(made, w13, w2), **batch)
    _close(got, moe.fused_experts(w13=w13, w2=w2, **batch, solution="reference"))


def test_routing_of_many_tokens() -> None:
    for scoring, bias, groups in (("softmax", False, 1), ("sigmoid", True, 8), ("topk_softmax", False, 1)):
        logits = torch.randn((3000, 256), device="cuda")
        options: dict[str, Any] = {"scoring": scoring, "num_groups": groups, "top_groups": max(groups // 2, 1)}
        if bias:
            options |= {"correction_bias": torch.randn(256, device="cuda"), "group_score": "top2_sum", "renormalize": True}
        weights, ids = moe.topk_routing(logits, 8, **options, solution="triton")
        want, want_ids = moe.topk_routing(logits, 8, **options, solution="reference")
        # Scores that differ in the last bit may be chosen in the other order.
        assert (ids == want_ids).float().mean() > 0.9999
        torch.testing.assert_close(weights, want, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("tokens", [1, 64])
@pytest.mark.parametrize("fmt", ["", "mxfp4@block_32"])
def test_captured_and_replayed(tokens: int, fmt: str) -> None:
    """Routing and experts in one graph; replayed on another batch, with other experts."""
    sizes = (32, 4, 1024, 512)
    w13, w2 = _experts(sizes, fmt)
    made = moe.plan(moe.MoeConfig(*sizes), "cuda", x_format="bf16", weight_format=fmt or "bf16", solution="triton")
    weights = moe.process_weights(made, w13, w2)
    router = torch.randn((32, 1024), device="cuda").to(BF16)
    x, out = torch.randn((tokens, 1024), device="cuda").to(BF16), torch.empty((tokens, 1024), device="cuda", dtype=BF16)

    def layer() -> None:
        shares, ids = moe.topk_routing(x @ router.t(), 4, renormalize=True, solution="triton")
        moe.apply(made, weights, x, ids, shares, out=out)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        layer()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layer()
    for _ in range(2):
        x.copy_(torch.randn((tokens, 1024), device="cuda"))
        out.fill_(float("nan"))
        graph.replay()
        shares, ids = moe.topk_routing(x @ router.t(), 4, renormalize=True, solution="triton")
        _close(out, moe.fused_experts(x, w13, w2, ids, shares, solution="reference"))


def test_equal_inputs_give_equal_bits() -> None:
    """Twice the same batch; and a token in two batches that take the same path."""
    w13, w2 = _experts(WIDE, "")
    batch = _batch(64, WIDE)
    first = moe.fused_experts(w13=w13, w2=w2, **batch, solution="triton")
    for _ in range(3):
        assert torch.equal(first, moe.fused_experts(w13=w13, w2=w2, **batch, solution="triton"))
    order = torch.randperm(64, device="cuda")
    shuffled = {name: value[order] for name, value in batch.items()}
    assert torch.equal(first[order], moe.fused_experts(w13=w13, w2=w2, **shuffled, solution="triton"))
    alone = {name: value[:1] for name, value in batch.items()}
    _close(moe.fused_experts(w13=w13, w2=w2, **alone, solution="triton"), first[:1])


def test_weights_beyond_two_to_the_31_elements() -> None:
    """The last expert's weights lie behind 2**31 elements of either stack."""
    hidden, inner, num_experts = 4096, 4096, 140
    w13 = torch.zeros((num_experts, 2 * inner, hidden), dtype=BF16, device="cuda")
    w2 = torch.zeros((num_experts, hidden, inner), dtype=BF16, device="cuda")
    assert w13[:-1].numel() > 2**31
    assert w2[:-1].numel() > 2**31
    w13[-1].normal_().mul_(hidden**-0.5)
    w2[-1].normal_().mul_(inner**-0.5)
    for tokens in (1, 48):
        x = torch.randn((tokens, hidden), device="cuda").to(BF16)
        ids = torch.full((tokens, 1), num_experts - 1, dtype=torch.int32, device="cuda")
        shares = torch.ones((tokens, 1), device="cuda")
        got = moe.fused_experts(x, w13, w2, ids, shares, solution="triton")
        gate, up = (x.double() @ w13[-1].double().t()).chunk(2, dim=1)
        _close(got, (gate * torch.sigmoid(gate) * up) @ w2[-1].double().t())


