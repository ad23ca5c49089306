"""Architectures and features that are refused, by name; and what the registry finds."""

from __future__ import annotations

from typing import Any

import pytest

from tokenspeed_engine.models import UnsupportedModelError, build_model, builders

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}


def test_every_family_is_found() -> None:
    assert {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"} <= set(builders())


@pytest.mark.parametrize("names", [["GPT2LMHeadModel"], [], None])
def test_unknown_architecture(names: list[str] | None) -> None:
    with pytest.raises(UnsupportedModelError, match=r"not supported; expected one of LlamaForCausalLM, .*Qwen3ForCausalLM"):
        build_model({**BASE, "architectures": names})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "gelu"}, r"'hidden_act': expected 'silu' or 'swish', got 'gelu'"),
        ({"quantization_config": {"quant_method": "fp8"}}, r"'quantization_config'.*fp8"),
        ({"pretraining_tp": 2}, r"'pretraining_tp'"),
        ({"architectures": ["MistralForCausalLM"], "attention_bias": True}, r"'attention_bias': expected False, got True"),
        ({"num_key_value_heads": 3}, r"'num_key_value_heads': expected a divisor of num_attention_heads \(4\), got 3"),
        ({"hidden_size": None}, r"'hidden_size': expected a positive integer, got None"),
        ({"hidden_size": 18}, r"'num_attention_heads'.*where head_dim is not given"),
        ({"num_hidden_layers": 0}, r"'num_hidden_layers': expected a positive integer, got 0"),
        ({"layer_types": ["sliding_attention", "full_attention"]}, r"'layer_types'"),
        (
            {"architectures": ["Qwen2ForCausalLM"], "layer_types": ["chunked_attention", "full_attention"]},
            r"'layer_types'.*chunked_attention",
        ),
        (
            {"architectures": ["Qwen3ForCausalLM"], "layer_types": ["full_attention"], "use_sliding_window": True},
            r"'layer_types': expected one for each of 2 layers, got '1 entries'",
        ),
        (
            {"architectures": ["Qwen2ForCausalLM"], "layer_types": ["sliding_attention", "full_attention"]},
            r"'use_sliding_window'",
        ),
    ],
)
def test_features_that_would_be_ignored_are_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        build_model({**BASE, **changes})


def test_unknown_rope_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="'longrope'"):
        build_model({**BASE, "rope_scaling": {"rope_type": "longrope", "factor": 4.0}})


def test_nested_text_config_is_read() -> None:
    text = {key: value for key, value in BASE.items() if key != "architectures"}
    model = build_model({"architectures": ["LlamaForCausalLM"], "text_config": {**text, "num_hidden_layers": 5}})
    assert model.config.num_layers == 5


def test_head_dim_of_qwen3_does_not_follow_from_the_hidden_size() -> None:
    assert build_model({**BASE, "architectures": ["Qwen3ForCausalLM"]}).config.head_dim == 128
    assert build_model({**BASE, "architectures": ["Qwen3ForCausalLM"], "head_dim": 6}).config.head_dim == 6
    assert build_model(BASE).config.head_dim == 4


def test_windows_start_at_max_window_layers() -> None:
    changes = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1, "num_hidden_layers": 3}
    assert build_model({**BASE, "architectures": ["Qwen2ForCausalLM"], **changes}).config.sliding_windows == (None, 8, 8)
    off = {**changes, "use_sliding_window": False}
    assert build_model({**BASE, "architectures": ["Qwen2ForCausalLM"], **off}).config.sliding_windows == (None,) * 3
