"""Writes small GGUF files with the `gguf` package's writer, as the usual converter would."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, INTER, LAYERS, VOCAB = 4, 2, 8, 32, 64, 2, 40


def permute(weights: np.ndarray, heads: int) -> np.ndarray:
    """The converter's order of q and k rows for llama: neighbours are rotated together."""
    return weights.reshape(heads, 2, weights.shape[0] // heads // 2, *weights.shape[1:]).swapaxes(1, 2).reshape(weights.shape)


def tensors(arch: str, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Hugging Face name to float32 array."""

    def draw(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    found = {"model.embed_tokens.weight": draw(VOCAB, HIDDEN), "model.norm.weight": draw(HIDDEN)}
    for i in range(LAYERS):
        p = f"model.layers.{i}."
        found |= {
            f"{p}input_layernorm.weight": draw(HIDDEN),
            f"{p}self_attn.q_proj.weight": draw(HEADS * HEAD_DIM, HIDDEN),
            f"{p}self_attn.k_proj.weight": draw(KV_HEADS * HEAD_DIM, HIDDEN),
            f"{p}self_attn.v_proj.weight": draw(KV_HEADS * HEAD_DIM, HIDDEN),
            f"{p}self_attn.o_proj.weight": draw(HIDDEN, HEADS * HEAD_DIM),
            f"{p}post_attention_layernorm.weight": draw(HIDDEN),
            f"{p}mlp.gate_proj.weight": draw(INTER, HIDDEN),
            f"{p}mlp.up_proj.weight": draw(INTER, HIDDEN),
            f"{p}mlp.down_proj.weight": draw(HIDDEN, INTER),
        }
        if arch == "qwen2":
            found |= {f"{p}self_attn.{n}_proj.bias": draw((HEADS if n == "q" else KV_HEADS) * HEAD_DIM) for n in "qkv"}
        if arch == "qwen3":
            found |= {f"{p}self_attn.{n}_norm.weight": draw(HEAD_DIM) for n in "qk"}
    return found


_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    """GGUF's name of a Hugging Face tensor."""
    stem, _, kind = name.rpartition(".")
    if stem in _NAMES:
        return f"{_NAMES[stem]}.{kind}"
    _, _, index, rest = stem.split(".", 3)
    return f"blk.{index}.{_NAMES[rest]}.{kind}"


def write(
    path: Path,
    arch: str,
    values: dict[str, np.ndarray],
    *,
    keys: dict[str, Any] | None = None,
    kinds: dict[str, gguf.GGMLQuantizationType] | None = None,
    extra: dict[str, np.ndarray] | None = None,
) -> Path:
    """Write a file.

    Args:
        values: by Hugging Face name.
        keys: more metadata: floats, ints, bools or strings.
        kinds: storage of some tensors, by Hugging Face name; the others are F32.
        extra: more tensors, by GGUF name.
    """
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INTER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_eos_token_id(2)
    for key, value in (keys or {}).items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        else:
            writer.add_float32(key, value)
    for name, value in values.items():
        if arch == "llama" and ".q_proj." in name:
            value = permute(value, HEADS)
        if arch == "llama" and ".k_proj." in name:
            value = permute(value, KV_HEADS)
        kind = (kinds or {}).get(name)
        if kind is None:
            writer.add_tensor(gguf_name(name), value)
        else:
            writer.add_tensor(gguf_name(name), gguf.quantize(value, kind), raw_dtype=kind)
    for name, value in (extra or {}).items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
