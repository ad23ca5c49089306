"""The gated feed-forward block."""

from __future__ import annotations

from torch import Tensor

from tokenspeed_engine.layers.linear import Linear
from tokenspeed_engine.layers.module import Module
from tokenspeed_engine.parallel import Placement, Shard
from tokenspeed_kernel.ops.activation import silu_and_mul


class SiluAndMul(Module):
    """silu(gate) * up of a stacked [gate | up]; each rank holds matching shares of both."""

    input_placement: Placement = Shard(-1)
    output_placement: Placement = Shard(-1)

    def __call__(self, gate_up: Tensor) -> Tensor:
        """[rows, 2I] -> [rows, I]."""
        return silu_and_mul(gate_up)


class GatedMLP(Module):
    """down(silu(gate(x)) * up(x)), with gate and up in one matrix.

    Args:
        hidden_size: H.
        intermediate_size: I.
        bias: on all three projections.
    """

    def __init__(self, hidden_size: int, intermediate_size: int, *, bias: bool = False) -> None:
        self.gate_up = Linear(hidden_size, (intermediate_size, intermediate_size), bias=bias, split="out")
        self.activation = SiluAndMul()
        self.down = Linear(intermediate_size, hidden_size, bias=bias, split="in")

    def flow(self) -> list[tuple[str, Module]]:
        """The modules in the order in which the activation passes them."""
        return [("gate_up", self.gate_up), ("activation", self.activation), ("down", self.down)]

    def __call__(self, x: Tensor) -> Tensor:
        """[rows, H] -> [rows, H]."""
        return self.down(self.activation(self.gate_up(x)))
