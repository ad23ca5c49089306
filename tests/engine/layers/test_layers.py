"""Layers on their own: how parameters are found, ranks' shares, rotary limits."""

from __future__ import annotations

import pytest
import torch

from tokenspeed_engine.layers import Embedding, GatedMLP, Linear, Module, Rotary
from tokenspeed_engine.parallel import Mesh
from tokenspeed_kernel.ops.rope import RopeConfig

CPU = torch.device("cpu")


class _Stack(Module):
    def __init__(self) -> None:
        self.first = Linear(4, 6, bias=True)
        self.layers = [GatedMLP(4, 8), GatedMLP(4, 8)]


def test_parameters_are_named_by_attribute_and_index() -> None:
    assert [name for name, _ in _Stack().named_parameters()] == [
        "first.weight",
        "first.bias",
        "layers.0.gate_up.weight",
        "layers.0.down.weight",
        "layers.1.gate_up.weight",
        "layers.1.down.weight",
    ]


@pytest.mark.parametrize("rows", [1, 5, 33])
def test_linear_releases_the_weight_that_it_packed(rows: int) -> None:
    layer = Linear(7, (3, 5), bias=True)
    weight, bias = torch.randn(8, 7), torch.randn(8)
    assert layer.bias is not None
    layer.weight.data, layer.bias.data = weight.clone(), bias
    layer.process_weights()
    assert layer.weight.data is None
    with pytest.raises(RuntimeError, match="not loaded"):
        layer.weight.tensor()
    x = torch.randn(rows, 7)
    with torch.inference_mode():
        torch.testing.assert_close(layer(x), torch.nn.functional.linear(x, weight, bias))


def test_a_split_sum_adds_its_bias_once() -> None:
    weight, bias, x = torch.randn(5, 6), torch.randn(5), torch.randn(3, 6)
    parts = []
    for rank in range(2):
        mesh = Mesh(2, rank, group=object())
        layer = Linear(6, 5, bias=True, split="in")
        assert layer.bias is not None
        layer.place(mesh)
        layer.weight.data, layer.bias.data = layer.weight.local_part(weight, mesh).contiguous(), bias
        layer.process_weights()
        with torch.inference_mode():
            parts.append(layer(x[:, 3 * rank : 3 * rank + 3].contiguous()))
    torch.testing.assert_close(parts[0] + parts[1], torch.nn.functional.linear(x, weight, bias))


def test_the_ranks_embeddings_add_up() -> None:
    table, ids = torch.randn(6, 4), torch.tensor([0, 5, 2, 3, 1], dtype=torch.int32)
    total = torch.zeros(5, 4)
    for rank in range(2):
        mesh = Mesh(2, rank, group=object())
        layer = Embedding(6, 4)
        layer.place(mesh)
        layer.weight.data = layer.weight.local_part(table, mesh)
        layer.process_weights()
        with torch.inference_mode():
            total += layer(ids)
    assert torch.equal(total, table[ids.long()])


def test_dynamic_scaling_beyond_the_configured_length_is_refused() -> None:
    rotary = Rotary(RopeConfig(head_dim=8, rotary_dim=8, kind="dynamic", factor=2.0, max_position=32))
    rotary.build(32, CPU)
    with pytest.raises(ValueError, match=r"dynamic scaling with 33 positions: expected at most 32.*--max-model-len 32"):
        rotary.build(33, CPU)
