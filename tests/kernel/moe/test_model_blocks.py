"""Whole mixture-of-experts blocks of an independent implementation: the same weights, the same tokens, the same result."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tokenspeed_kernel.ops import moe

pytest.importorskip("transformers", reason="needs transformers")

H, I, E, K, TOKENS = 48, 32, 8, 3, 13
PLAIN = moe.GatedActivation()


def _filled(block: torch.nn.Module) -> torch.nn.Module:
    generator = torch.Generator().manual_seed(5)
    for name, tensor in [*block.named_parameters(), *block.named_buffers()]:
        # The router's weights are larger, so that no two experts are nearly equal.
        tensor.data.copy_(torch.randn(tensor.shape, generator=generator) * (0.5 if "gate." in name or "router" in name else 0.2))
    return block.eval()


def _x() -> torch.Tensor:
    return torch.randn(TOKENS, H, generator=torch.Generator().manual_seed(6))


def _apply(
    x: torch.Tensor,
    routed: tuple[torch.Tensor, torch.Tensor],
    w13: torch.Tensor,
    w2: torch.Tensor,
    *,
    solution: str,
    gate: moe.GatedActivation = PLAIN,
    order: str = "gate_up",
    shared: dict[str, torch.Tensor] | None = None,
    **biases: torch.Tensor,
) -> torch.Tensor:
    weights, ids = routed
    config = moe.MoeConfig(w2.shape[0], ids.shape[1], H, w2.shape[2], activation=gate, biased=bool(biases))
    made = moe.plan(config, x.device, x_format=x.dtype, weight_format=w13.dtype, solution=solution)
    processed = moe.process_weights(made, w13, w2, order=order, **biases)
    expert = None if shared is None else moe.process_shared_expert(made, **shared)
    return moe.apply(made, processed, x, ids, weights, shared_expert=expert)


@pytest.fixture(params=["cpu", "reference", "triton"])
def solution(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    if name == "triton":
        if torch.cuda.is_available():
            pytest.skip("the blocks are compared on the CPU, where Triton is interpreted without a GPU alone")
        pytest.importorskip("triton", reason="needs triton")
    return name


def _close(got: torch.Tensor, want: Any) -> None:
    want = want[0] if isinstance(want, tuple) else want
    torch.testing.assert_close(got, want.view(got.shape), rtol=2e-5, atol=2e-5)


@torch.no_grad()
def test_mixtral(solution: str) -> None:
    from transformers.models.mixtral import modeling_mixtral as theirs

    config = theirs.MixtralConfig(hidden_size=H, intermediate_size=I, num_local_experts=E, num_experts_per_tok=2)
    block: Any = _filled(theirs.MixtralSparseMoeBlock(config))
    x = _x()
    routed = moe.topk_routing(x @ block.gate.weight.t(), 2, renormalize=True, solution=solution)
    got = _apply(x, routed, block.experts.gate_up_proj.data, block.experts.down_proj.data, solution=solution)
    _close(got, block(x[None]))


@torch.no_grad()
@pytest.mark.parametrize("normalized", [True, False])
def test_qwen3_moe(solution: str, normalized: bool) -> None:
    from transformers.models.qwen3_moe import modeling_qwen3_moe as theirs

    config = theirs.Qwen3MoeConfig(
        hidden_size=H, moe_intermediate_size=I, num_experts=E, num_experts_per_tok=K, norm_topk_prob=normalized
    )
    block: Any = _filled(theirs.Qwen3MoeSparseMoeBlock(config))
    x = _x()
    routed = moe.topk_routing(x @ block.gate.weight.t(), K, renormalize=normalized, solution=solution)
    got = _apply(x, routed, block.experts.gate_up_proj.data, block.experts.down_proj.data, solution=solution)
    _close(got, block(x[None]))


@torch.no_grad()
def test_qwen2_moe_with_a_gated_shared_expert(solution: str) -> None:
    from transformers.models.qwen2_moe import modeling_qwen2_moe as theirs

    config = theirs.Qwen2MoeConfig(
        hidden_size=H, moe_intermediate_size=I, shared_expert_intermediate_size=40, num_experts=E, num_experts_per_tok=K
    )
    block: Any = _filled(theirs.Qwen2MoeSparseMoeBlock(config))
    x = _x()
    routed = moe.topk_routing(x @ block.gate.weight.t(), K, renormalize=config.norm_topk_prob, solution=solution)
    expert = block.shared_expert
    shared = {
        "w13": torch.cat((expert.gate_proj.weight.data, expert.up_proj.weight.data)),
        "w2": expert.down_proj.weight.data,
        "gate": block.shared_expert_gate.weight.data,
    }
    w13, w2 = block.experts.gate_up_proj.data, block.experts.down_proj.data
    _close(_apply(x, routed, w13, w2, solution=solution, shared=shared), block(x[None]))


@torch.no_grad()
def test_deepseek_v3(solution: str) -> None:
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as theirs

    config = theirs.DeepseekV3Config(
        hidden_size=H, moe_intermediate_size=I, n_routed_experts=16, num_experts_per_tok=4, n_group=4, topk_group=2,
        n_shared_experts=2, routed_scaling_factor=2.5, norm_topk_prob=True,
    )  # fmt: skip
    block: Any = _filled(theirs.DeepseekV3MoE(config))
    x = _x()
    routed = moe.topk_routing(
        x @ block.gate.weight.t(), 4, scoring="sigmoid", renormalize=True, correction_bias=block.gate.e_score_correction_bias,
        num_groups=4, top_groups=2, group_score="top2_sum", scaling_factor=2.5, solution=solution,
    )  # fmt: skip
    assert len(set(routed[1].flatten().tolist())) > 4
    expert = block.shared_experts
    shared = {
        "w13": torch.cat((expert.up_proj.weight.data, expert.gate_proj.weight.data)),
        "w2": expert.down_proj.weight.data,
        "order": "up_gate",
    }
    w13, w2 = block.experts.gate_up_proj.data, block.experts.down_proj.data
    _close(_apply(x, routed, w13, w2, solution=solution, shared=shared), block(x[None]))


@torch.no_grad()
@pytest.mark.parametrize("method", ["greedy", "group_limited_greedy"])
def test_deepseek_v2(solution: str, method: str) -> None:
    from transformers.models.deepseek_v2 import modeling_deepseek_v2 as theirs

    config = theirs.DeepseekV2Config(
        hidden_size=H, moe_intermediate_size=I, n_routed_experts=12, num_experts_per_tok=3, n_group=4, topk_group=2,
        n_shared_experts=1, routed_scaling_factor=16.0, norm_topk_prob=False, topk_method=method, num_attention_heads=4,
    )  # fmt: skip
    block: Any = _filled(theirs.DeepseekV2Moe(config))
    x = _x()
    groups = {"num_groups": 4, "top_groups": 2} if method == "group_limited_greedy" else {}
    routed = moe.topk_routing(x @ block.gate.weight.t(), 3, scaling_factor=16.0, **groups, solution=solution)
    expert = block.shared_experts
    shared = {"w13": torch.cat((expert.gate_proj.weight.data, expert.up_proj.weight.data)), "w2": expert.down_proj.weight.data}
    w13, w2 = block.experts.gate_up_proj.data, block.experts.down_proj.data
    _close(_apply(x, routed, w13, w2, solution=solution, shared=shared), block(x[None]))


@torch.no_grad()
def test_gpt_oss(solution: str) -> None:
    """Weights stored [in, out], gate and up interleaved, clamps, biases."""
    from transformers.models.gpt_oss import modeling_gpt_oss as theirs

    config = theirs.GptOssConfig(hidden_size=H, intermediate_size=I, num_local_experts=E, num_experts_per_tok=K)
    block: Any = _filled(theirs.GptOssMLP(config))
    block.experts.gate_up_proj.data *= 10  # so that the limits are reached
    x = _x()
    experts = block.experts
    assert (x @ experts.gate_up_proj[0]).abs().max() > config.swiglu_limit
    logits = x @ block.router.weight.t() + block.router.bias
    routed = moe.topk_routing(logits, K, scoring="topk_softmax", solution=solution)
    gate = moe.GatedActivation(limit=config.swiglu_limit, alpha=config.swiglu_alpha, up_offset=1.0)
    assert math.isclose(config.swiglu_limit, 7.0)
    got = _apply(
        x, routed, experts.gate_up_proj.data.transpose(1, 2), experts.down_proj.data.transpose(1, 2), solution=solution,
        gate=gate, order="interleaved", w13_bias=experts.gate_up_proj_bias.data, w2_bias=experts.down_proj_bias.data,
    )  # fmt: skip
    torch.testing.assert_close(got, block(x[None])[0][0], rtol=2e-5, atol=5e-5)
