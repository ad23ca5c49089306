"""What the dense decoder families read from a Hugging Face configuration, and what they refuse."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenspeed_engine.models.errors import UnsupportedModelError

_SILU = ("silu", "swish")


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseConfig:
    """Sizes of a dense decoder.

    Attributes:
        architecture: Hugging Face architecture name.
        vocab_size: V.
        hidden_size: H.
        intermediate_size: I.
        num_layers: number of decoder layers.
        num_heads: query heads.
        num_kv_heads: key/value heads.
        head_dim: D; need not be hidden_size / num_heads.
        rms_norm_eps: epsilon of every norm.
        max_position: positions that the model is made for.
        sliding_windows: window of each layer, None where it sees everything.
        qkv_bias: bias on q, k and v.
        out_bias: bias on the attention's output projection.
        mlp_bias: bias on the feed-forward projections.
        hf: the configuration that this was read from (for the rotary embedding).
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position: int
    sliding_windows: tuple[int | None, ...]
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    hf: Mapping[str, Any]


class ConfigReader:
    """Typed access to a Hugging Face configuration; faults name the key.

    Args:
        config: keys as in config.json.
        architecture: for messages.
    """

    def __init__(self, config: Mapping[str, Any], architecture: str) -> None:
        self.config = config
        self.architecture = architecture

    def count(self, key: str, default: int | None = None) -> int:
        """A positive integer.

        Raises:
            UnsupportedModelError: missing or something else.
        """
        value = self.config.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.refused(key, value, "a positive integer")
        return value

    def number(self, key: str, default: float) -> float:
        """A float; `default` where the key is missing."""
        value = self.config.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.refused(key, value, "a number")
        return float(value)

    def flag(self, key: str) -> bool:
        """A boolean; false where the key is missing."""
        return bool(self.config.get(key))

    def only(self, key: str, *allowed: Any) -> None:
        """Refuse a value of `key` that is neither missing nor in `allowed`: a feature that the model would not honour."""
        value = self.config.get(key)
        if value is not None and value not in allowed:
            raise self.refused(key, value, f"{' or '.join(map(repr, allowed)) or 'no such key'}")

    def refused(self, key: str, value: Any, expected: str) -> UnsupportedModelError:
        """The error that names a key."""
        return UnsupportedModelError(f"{self.architecture}: config {key!r}: expected {expected}, got {value!r}.")


def read_dense(
    config: Mapping[str, Any],
    architecture: str,
    *,
    sliding_windows: tuple[int | None, ...],
    qkv_bias: bool = False,
    out_bias: bool = False,
    mlp_bias: bool = False,
) -> DenseConfig:
    """Read the keys that all dense decoders share.

    Args:
        config: keys as in config.json.
        architecture: Hugging Face name.
        sliding_windows: one entry per layer.
        qkv_bias, out_bias, mlp_bias: see DenseConfig.
    Returns:
        The sizes.
    Raises:
        UnsupportedModelError: a key is missing, or asks for something that is not done here (another activation,
        quantized weights, a pretraining-time slicing of the projections).
    """
    reader = ConfigReader(config, architecture)
    reader.only("hidden_act", *_SILU)
    reader.only("pretraining_tp", 1)
    reader.only("quantization_config")
    hidden, heads = reader.count("hidden_size"), reader.count("num_attention_heads")
    kv_heads = reader.count("num_key_value_heads", heads)
    if heads % kv_heads:
        raise reader.refused("num_key_value_heads", kv_heads, f"a divisor of num_attention_heads ({heads})")
    if config.get("head_dim") is None and hidden % heads:
        raise reader.refused("num_attention_heads", heads, f"a divisor of hidden_size ({hidden}) where head_dim is not given")
    return DenseConfig(
        architecture=architecture,
        vocab_size=reader.count("vocab_size"),
        hidden_size=hidden,
        intermediate_size=reader.count("intermediate_size"),
        num_layers=reader.count("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=reader.count("head_dim", hidden // heads),
        rms_norm_eps=reader.number("rms_norm_eps", 1e-6),
        max_position=reader.count("max_position_embeddings", 2048),
        sliding_windows=sliding_windows,
        qkv_bias=qkv_bias,
        out_bias=out_bias,
        mlp_bias=mlp_bias,
        hf=config,
    )


def windows_by_layer_type(config: Mapping[str, Any], architecture: str) -> tuple[int | None, ...]:
    """Sliding windows of a family that mixes full and sliding layers.

    `layer_types` decides where it is given; otherwise layers from `max_window_layers` on slide, if `use_sliding_window` is true.

    Raises:
        UnsupportedModelError: a layer type that is not known, or not one for each layer.
    """
    reader = ConfigReader(config, architecture)
    num_layers = reader.count("num_hidden_layers")
    window = reader.count("sliding_window", 4096) if reader.flag("use_sliding_window") else None
    kinds = config.get("layer_types")
    if kinds is None:
        first = reader.config.get("max_window_layers")
        first = 28 if first is None else int(first)
        return tuple(window if index >= first else None for index in range(num_layers))
    if len(kinds) != num_layers:
        raise reader.refused("layer_types", f"{len(kinds)} entries", f"one for each of {num_layers} layers")
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention"):
            raise reader.refused("layer_types", kind, "'full_attention' or 'sliding_attention'")
        if kind == "sliding_attention" and window is None:
            raise reader.refused("use_sliding_window", config.get("use_sliding_window"), "true where layer_types slides")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)
