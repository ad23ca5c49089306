"""Qwen3, dense: like Llama, with an RMSNorm on each head's queries and keys.

Source: arXiv:2505.09388.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from tokenspeed_engine.kvcache import KVPool
from tokenspeed_engine.layers import ForwardBatch, GatedMLP, Module, RMSNorm, Rotary, SelfAttention
from tokenspeed_engine.models.base import EMBEDDING_TENSOR, CausalLM, dense_layer_weights
from tokenspeed_engine.models.config import ConfigReader, DenseConfig, read_dense, windows_by_layer_type

ARCHITECTURES = ("Qwen3ForCausalLM",)


class Qwen3Layer(Module):
    """One decoder layer.

    Args:
        index: position in the model.
        config: sizes.
        rotary: the shared rotary table.
    """

    def __init__(self, index: int, config: DenseConfig, rotary: Rotary) -> None:
        self.input_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attention = SelfAttention(
            index,
            config.hidden_size,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            rotary,
            qkv_bias=config.qkv_bias,
            out_bias=config.out_bias,
            qk_norm_eps=config.rms_norm_eps,
            sliding_window=config.sliding_windows[index],
        )
        self.mlp_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size)

    def flow(self) -> list[tuple[str, Module]]:
        """The modules in the order in which the activation passes them."""
        return [("input_norm", self.input_norm), *self.attention.flow(), ("mlp_norm", self.mlp_norm), *self.mlp.flow()]

    def forward(self, x: Tensor, residual: Tensor, batch: ForwardBatch, kv: KVPool) -> Tensor:
        """x [rows, H] is what the layer before adds to `residual`; returns what this one adds."""
        x = self.attention(self.input_norm.add(x, residual), batch, kv)
        return self.mlp(self.mlp_norm.add(x, residual))


class Qwen3ForCausalLM(CausalLM):
    """The model.

    Args:
        config: sizes.
    """

    def __init__(self, config: DenseConfig) -> None:
        super().__init__(config)
        self.layers = [Qwen3Layer(index, config, self.rotary) for index in range(config.num_layers)]
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, batch: ForwardBatch, kv: KVPool) -> Tensor:
        """See `CausalLM.forward`."""
        x = self.embed(batch.token_ids)
        residual = x.new_zeros(x.shape)
        for layer in self.layers:
            x = layer.forward(x, residual, batch, kv)
        if batch.output_rows is not None:
            x, residual = x.index_select(0, batch.output_rows), residual.index_select(0, batch.output_rows)
        return self.norm.add(x, residual)

    def flow(self) -> list[tuple[str, Module]]:
        """See `CausalLM.flow`."""
        layers = [(f"layers.{i}.{name}", module) for i, layer in enumerate(self.layers) for name, module in layer.flow()]
        return [("embed", self.embed), *layers, ("norm", self.norm), ("head", self.head)]

    def weight_map(self) -> dict[str, tuple[str, ...]]:
        """See `CausalLM.weight_map`."""
        found: dict[str, tuple[str, ...]] = {
            "embed.weight": (EMBEDDING_TENSOR,),
            "norm.weight": ("model.norm.weight",),
            "head.weight": ("lm_head.weight",),
        }
        for index in range(self.config.num_layers):
            found |= dense_layer_weights(index, self.config, qk_norm=True)
        return found


def build(config: Mapping[str, Any], architecture: str) -> Qwen3ForCausalLM:
    """Build the model, without weights.

    Raises:
        UnsupportedModelError: the configuration asks for something that is not supported.
    """
    bias = ConfigReader(config, architecture).flag("attention_bias")
    windows = windows_by_layer_type(config, architecture)
    # head_dim does not follow from the other sizes in this family: Hugging Face's default is 128.
    complete = {**config, "head_dim": 128 if config.get("head_dim") is None else config["head_dim"]}
    return Qwen3ForCausalLM(read_dense(complete, architecture, sliding_windows=windows, qkv_bias=bias, out_bias=bias))
