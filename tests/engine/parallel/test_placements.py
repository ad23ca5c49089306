"""Collectives follow from placements, and only where they differ."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tokenspeed_engine.models import build_model
from tokenspeed_engine.parallel import Mesh, Partial, Placement, PlacementError, Replicate, Shard, collective, compile_flow

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def _mesh(size: int) -> Mesh:
    return Mesh(size, 0, group=object() if size > 1 else None)


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"])
def test_a_decoder_layer_needs_two_sums(architecture: str) -> None:
    model = build_model({**CONFIG, "architectures": [architecture], "head_dim": 4})
    inserted = model.parallelize(_mesh(2))
    expected = ["embed: Partial() -> Replicate()"]
    for layer in range(2):
        expected += [f"layers.{layer}.{name}: Partial() -> Replicate()" for name in ("out", "down")]
    assert inserted == [*expected, "head: Shard(dim=-1) -> Replicate()"]


def test_one_rank_needs_nothing() -> None:
    model = build_model(CONFIG)
    assert model.parallelize(_mesh(1)) == []
    assert all(module.finish is None for module in model.modules())


def test_heads_that_do_not_divide_are_named() -> None:
    with pytest.raises(ValueError, match=r"2 KV heads do not divide by 4 ranks\. Fix: use a number of ranks that divides 2"):
        build_model(CONFIG).parallelize(_mesh(4))


class _Fake:
    def __init__(self, source: Placement, target: Placement) -> None:
        self.input_placement, self.output_placement = source, target
        self.finish: Any = None


def test_neighbours_that_cannot_be_connected_are_named() -> None:
    flow = [("first", _Fake(Replicate(), Replicate())), ("second", _Fake(Partial(), Replicate()))]
    with pytest.raises(PlacementError, match=r"Replicate\(\) to Partial\(\) \(between first and second\)"):
        compile_flow(flow, Replicate(), _mesh(2))


def test_a_replicated_activation_is_cut_without_talking() -> None:
    mesh = Mesh(2, 1, group=object())
    cut = collective(Replicate(), Shard(-1), mesh)
    assert cut is not None
    assert torch.equal(cut(torch.arange(8).view(2, 4)), torch.tensor([[2, 3], [6, 7]]))
    with pytest.raises(PlacementError, match="dimension -1 of 3 does not divide by 2"):
        cut(torch.zeros(2, 3))


@pytest.mark.parametrize("arguments", [(0, 0, None), (2, 2, object()), (2, -1, object()), (2, 0, None)])
def test_a_mesh_checks_itself(arguments: tuple[int, int, Any]) -> None:
    with pytest.raises(ValueError, match="mesh"):
        Mesh(*arguments)
