"""Llama and Mistral: RMSNorm, rotary attention with grouped heads, SwiGLU.

Source: arXiv:2302.13971, arXiv:2307.09288; Mistral's sliding window: arXiv:2310.06825.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from tokenspeed_engine.kvcache import KVPool
from tokenspeed_engine.layers import ForwardBatch, GatedMLP, Module, RMSNorm, Rotary, SelfAttention
from tokenspeed_engine.models.base import EMBEDDING_TENSOR, CausalLM, dense_layer_weights
from tokenspeed_engine.models.config import ConfigReader, DenseConfig, read_dense

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM")


class LlamaLayer(Module):
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
            sliding_window=config.sliding_windows[index],
        )
        self.mlp_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)

    def flow(self) -> list[tuple[str, Module]]:
        """The modules in the order in which the activation passes them."""
        return [("input_norm", self.input_norm), *self.attention.flow(), ("mlp_norm", self.mlp_norm), *self.mlp.flow()]

    def forward(self, x: Tensor, residual: Tensor, batch: ForwardBatch, kv: KVPool) -> Tensor:
        """x [rows, H] is what the layer before adds to `residual`; returns what this one adds."""
        x = self.attention(self.input_norm.add(x, residual), batch, kv)
        return self.mlp(self.mlp_norm.add(x, residual))


class LlamaForCausalLM(CausalLM):
    """The model.

    Args:
        config: sizes.
    """

    def __init__(self, config: DenseConfig) -> None:
        super().__init__(config)
        self.layers = [LlamaLayer(index, config, self.rotary) for index in range(config.num_layers)]
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
            found |= dense_layer_weights(index, self.config)
        return found


def build(config: Mapping[str, Any], architecture: str) -> LlamaForCausalLM:
    """Build the model, without weights.

    Raises:
        UnsupportedModelError: the configuration asks for something that is not supported.
    """
    reader = ConfigReader(config, architecture)
    num_layers = reader.count("num_hidden_layers")
    if architecture == "MistralForCausalLM":
        reader.only("attention_bias", False)
        reader.only("mlp_bias", False)
        reader.only("layer_types", ["sliding_attention"] * num_layers, ["full_attention"] * num_layers)
        window = None if config.get("sliding_window", 4096) is None else reader.count("sliding_window", 4096)
        return LlamaForCausalLM(read_dense(config, architecture, sliding_windows=(window,) * num_layers))
    reader.only("layer_types", ["full_attention"] * num_layers)
    bias = reader.flag("attention_bias")
    return LlamaForCausalLM(
        read_dense(
            config,
            architecture,
            sliding_windows=(None,) * num_layers,
            qkv_bias=bias,
            out_bias=bias,
            mlp_bias=reader.flag("mlp_bias"),
        )
    )
