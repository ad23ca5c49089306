"""What the executor knows of a model, whatever its family."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from tokenspeed_engine.kvcache import KVPool
from tokenspeed_engine.layers import Embedding, ForwardBatch, Linear, Module, Rotary
from tokenspeed_engine.models.config import DenseConfig
from tokenspeed_engine.parallel import Mesh, Replicate, compile_flow
from tokenspeed_kernel.ops.rope import RopeConfig

EMBEDDING_TENSOR = "model.embed_tokens.weight"
"""The checkpoint's name of the embedding: what a tied output head is read from."""


class CausalLM(Module):
    """Base of the families. A family's file builds the layers, and writes `forward` and `weight_map` out.

    Args:
        config: sizes.

    Attributes:
        embed: the table of token embeddings.
        head: the output projection.
        rotary: the shared rotary table.
    """

    def __init__(self, config: DenseConfig) -> None:
        self.config = config
        self.embed = Embedding(config.vocab_size, config.hidden_size)
        self.rotary = Rotary(RopeConfig.from_hf(config.hf))
        self.head = Linear(config.hidden_size, config.vocab_size, split="out")

    @abstractmethod
    def forward(self, batch: ForwardBatch, kv: KVPool) -> Tensor:
        """Run one step.

        Args:
            batch: the tokens.
            kv: the cache; new keys and values are written into it.
        Returns:
            [S, H] normed hidden states of `batch.output_rows`.
        """

    @abstractmethod
    def weight_map(self) -> dict[str, tuple[str, ...]]:
        """Parameter name to the checkpoint tensors that are stacked into it."""

    @abstractmethod
    def flow(self) -> list[tuple[str, Module]]:
        """All modules, in the order in which the activation passes them; the residual stream is replicated."""

    def logits(self, hidden: Tensor) -> Tensor:
        """[S, H] -> [S, V]."""
        return self.head(hidden)

    def parallelize(self, mesh: Mesh) -> list[str]:
        """Split the model over the ranks.

        Returns:
            One line for each collective that was inserted.
        """
        for module in self.modules():
            module.place(mesh)
        return compile_flow(self.flow(), Replicate(), mesh)

    def prepare(self, max_model_len: int, device: torch.device) -> None:
        """Get ready to run, after the weights are loaded."""
        self.rotary.build(max_model_len, device)
        for module in self.modules():
            module.process_weights()


def dense_layer_weights(index: int, config: DenseConfig, *, qk_norm: bool = False) -> dict[str, tuple[str, ...]]:
    """The tensors of one decoder layer with fused projections, under Hugging Face's usual names."""
    ours, theirs = f"layers.{index}.", f"model.layers.{index}."
    attention = tuple(f"{theirs}self_attn.{name}_proj" for name in ("q", "k", "v"))
    gate_up = (f"{theirs}mlp.gate_proj", f"{theirs}mlp.up_proj")
    found = {
        f"{ours}input_norm.weight": (f"{theirs}input_layernorm.weight",),
        f"{ours}attention.qkv.weight": tuple(f"{name}.weight" for name in attention),
        f"{ours}attention.out.weight": (f"{theirs}self_attn.o_proj.weight",),
        f"{ours}mlp_norm.weight": (f"{theirs}post_attention_layernorm.weight",),
        f"{ours}mlp.gate_up.weight": tuple(f"{name}.weight" for name in gate_up),
        f"{ours}mlp.down.weight": (f"{theirs}mlp.down_proj.weight",),
    }
    if config.qkv_bias:
        found[f"{ours}attention.qkv.bias"] = tuple(f"{name}.bias" for name in attention)
    if config.out_bias:
        found[f"{ours}attention.out.bias"] = (f"{theirs}self_attn.o_proj.bias",)
    if config.mlp_bias:
        found[f"{ours}mlp.gate_up.bias"] = tuple(f"{name}.bias" for name in gate_up)
        found[f"{ours}mlp.down.bias"] = (f"{theirs}mlp.down_proj.bias",)
    if qk_norm:
        found[f"{ours}attention.q_norm.weight"] = (f"{theirs}self_attn.q_norm.weight",)
        found[f"{ours}attention.k_norm.weight"] = (f"{theirs}self_attn.k_norm.weight",)
    return found
