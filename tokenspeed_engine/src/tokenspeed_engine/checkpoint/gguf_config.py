"""GGUF metadata as a Hugging Face configuration, and GGUF tensor names as Hugging Face names."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from tokenspeed_engine.checkpoint.errors import CorruptCheckpointError, UnsupportedCheckpointError

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
"""`general.architecture` to the Hugging Face architecture."""

ROPE_FACTORS = "rope_freqs.weight"
"""Tensor that holds the divisors of llama3's rope frequencies; its parameters are not in the metadata."""

_GLOBAL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def hf_name(name: str) -> str:
    """Hugging Face's name of a GGUF tensor; a name without counterpart is returned unchanged."""
    if name in _GLOBAL_NAMES:
        return _GLOBAL_NAMES[name]
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in _BLOCK_NAMES and parts[3] in ("weight", "bias"):
        return f"model.layers.{parts[1]}.{_BLOCK_NAMES[parts[2]]}.{parts[3]}"
    return name


def hf_config(
    metadata: Mapping[str, Any], path: str, tensor_names: set[str], rope_factors: torch.Tensor | None, vocab_size: int
) -> dict[str, Any]:
    """Build the configuration that Hugging Face would have for the model.

    Args:
        metadata: key/value pairs of the file.
        path: the file, for messages.
        tensor_names: names in the file; decide tying and biases.
        rope_factors: the tensor ROPE_FACTORS, if there is one.
        vocab_size: rows of the embedding; the metadata's own figure is optional.
    Returns:
        Keys as in config.json.
    Raises:
        UnsupportedCheckpointError: an architecture or a rope scaling that is not known.
        CorruptCheckpointError: a required key is missing or not a number.
    Source: the GGUF specification, "standardized key-value pairs".
    """
    architecture = metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise UnsupportedCheckpointError(
            f"gguf {path}: general.architecture is {architecture!r}; expected one of {', '.join(ARCHITECTURES)}."
        )
    reader = _Keys(metadata, path, architecture)
    heads = reader.integer("attention.head_count")
    hidden = reader.integer("embedding_length")
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURES[architecture]],
        "model_type": architecture,
        "hidden_size": hidden,
        "intermediate_size": reader.integer("feed_forward_length"),
        "num_hidden_layers": reader.integer("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": reader.integer("attention.head_count_kv", heads),
        "head_dim": reader.integer("attention.key_length", hidden // heads),
        "max_position_embeddings": reader.integer("context_length"),
        "vocab_size": vocab_size,
        "rms_norm_eps": reader.number("attention.layer_norm_rms_epsilon"),
        "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in tensor_names,
        "attention_bias": "blk.0.attn_q.bias" in tensor_names,
        "mlp_bias": "blk.0.ffn_gate.bias" in tensor_names,
    }
    value_length = reader.integer("attention.value_length", config["head_dim"])
    if value_length != config["head_dim"]:
        raise UnsupportedCheckpointError(f"gguf {path}: value_length {value_length} differs from key_length {config['head_dim']}")
    if reader.integer("expert_count", 0):
        raise UnsupportedCheckpointError(f"gguf {path}: {architecture} with experts (expert_count) is not supported")
    window = reader.integer("attention.sliding_window", 0)
    if window:
        config |= {"sliding_window": window, "use_sliding_window": True, "max_window_layers": 0}
        if architecture == "llama":
            config |= {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
    elif architecture == "mistral":
        config["sliding_window"] = None
    rotary = reader.integer("rope.dimension_count", config["head_dim"])
    config["rope_theta"] = reader.number("rope.freq_base", 10000.0)
    if rotary != config["head_dim"]:
        config["partial_rotary_factor"] = rotary / config["head_dim"]
    scaling = _rope_scaling(reader, path, rope_factors, rotary, config)
    if scaling:
        config["rope_scaling"] = scaling
    return config


class _Keys:
    """Typed access to `<architecture>.<key>`."""

    def __init__(self, metadata: Mapping[str, Any], path: str, architecture: str) -> None:
        self._metadata, self._path, self._architecture = metadata, path, architecture

    def number(self, key: str, default: float | None = None) -> float:
        value = self._metadata.get(f"{self._architecture}.{key}", default)
        if isinstance(value, list) and value and all(v == value[0] for v in value):
            value = value[0]  # per-layer values that are all the same
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise CorruptCheckpointError(
                f"gguf {self._path}: {self._architecture}.{key}: expected a number, got {value!r}. Fix: convert the model again."
            )
        return float(value)

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.number(key, default)
        if value != int(value) or value < 0:
            raise CorruptCheckpointError(f"gguf {self._path}: {self._architecture}.{key}: expected a count, got {value!r}.")
        return int(value)

    def text(self, key: str) -> str | None:
        value = self._metadata.get(f"{self._architecture}.{key}")
        return None if value is None else str(value)

    def has(self, key: str) -> bool:
        return f"{self._architecture}.{key}" in self._metadata


def _rope_scaling(
    keys: _Keys, path: str, factors: torch.Tensor | None, rotary: int, config: Mapping[str, Any]
) -> dict[str, Any] | None:
    if factors is not None:
        return _llama3_scaling(path, factors.float(), rotary, float(config["rope_theta"]))
    kind = keys.text("rope.scaling.type")
    if kind in (None, "none"):
        # Old converters wrote `rope.scale_linear` alone.
        factor = keys.number("rope.scale_linear", 1.0)
        return None if factor == 1.0 else {"rope_type": "linear", "factor": factor}
    factor = keys.number("rope.scaling.factor", 1.0)
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        scaling: dict[str, Any] = {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": keys.integer("rope.scaling.original_context_length"),
        }
        for key, name in (("yarn_beta_fast", "beta_fast"), ("yarn_beta_slow", "beta_slow")):
            if keys.has(f"rope.scaling.{key}"):
                scaling[name] = keys.number(f"rope.scaling.{key}")
        for key in ("attn_factor", "yarn_attn_factor"):
            # In GGUF the factor multiplies YaRN's own magnitude; in Hugging Face `attention_factor` replaces it.
            if keys.has(f"rope.scaling.{key}") and (multiplier := keys.number(f"rope.scaling.{key}")) != 1.0:
                scaling["attention_factor"] = multiplier * (0.1 * math.log(factor) + 1.0)
        return scaling
    raise UnsupportedCheckpointError(f"gguf {path}: rope.scaling.type is {kind!r}; expected none, linear or yarn.")


def _llama3_scaling(path: str, factors: torch.Tensor, rotary: int, base: float) -> dict[str, Any]:
    """Recover llama3's parameters from its table of divisors, and refuse a table that they do not reproduce.

    The divisor is 1 for short wavelengths, `factor` for long ones, and a blend in between that depends on
    original_max_position_embeddings alone once the two other parameters have their only published values (1 and 4).
    """
    if factors.shape != (rotary // 2,):
        raise CorruptCheckpointError(
            f"gguf {path}: tensor {ROPE_FACTORS!r}: expected shape {(rotary // 2,)}, got {tuple(factors.shape)}"
        )
    factor = float(factors.max())
    wavelengths = 2 * math.pi * base ** (torch.arange(0, rotary, 2).float() / rotary)
    for original in (8192, 4096, 2048, 16384, 32768):
        blend = ((original / wavelengths - 1.0) / 3.0).clamp(0.0, 1.0)
        expected = 1.0 / ((1 - blend) / factor + blend)
        if torch.allclose(expected, factors, rtol=1e-3, atol=1e-3):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": original,
            }
    raise UnsupportedCheckpointError(
        f"gguf {path}: tensor {ROPE_FACTORS!r} is not a llama3 scaling with low 1 and high 4; such a table is not supported."
    )
