"""GGUF files as checkpoints: names, order of rows, configuration, and files that are broken."""

from __future__ import annotations

import math
from pathlib import Path
from types import ModuleType
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenspeed_engine.checkpoint import (
    CheckpointError,
    CorruptCheckpointError,
    GgufCheckpoint,
    UnsupportedCheckpointError,
    default_model_path,
    open_checkpoint,
)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_tensors_come_back_under_hugging_face_names(arch: str, gguf_files: ModuleType, tmp_path: Path, rng: Any) -> None:
    values = gguf_files.tensors(arch, rng)
    checkpoint = open_checkpoint(gguf_files.write(tmp_path / "m.gguf", arch, values))
    assert set(checkpoint.names()) == set(values)
    for name, value in values.items():
        assert checkpoint.shape(name) == value.shape
        assert torch.equal(checkpoint.read(name), torch.from_numpy(value)), name
    assert checkpoint.eos_token_ids == (2,)


def test_q_and_k_of_llama_are_put_back_in_order(gguf_files: ModuleType, tmp_path: Path, rng: Any) -> None:
    values = gguf_files.tensors("llama", rng)
    path = gguf_files.write(tmp_path / "m.gguf", "llama", values)
    raw = gguf.GGUFReader(path)
    stored = next(t for t in raw.tensors if t.name == "blk.0.attn_q.weight").data
    expected = values["model.layers.0.self_attn.q_proj.weight"]
    assert not np.array_equal(stored, expected)  # or the test would show nothing
    assert np.array_equal(GgufCheckpoint(path).read("model.layers.0.self_attn.q_proj.weight").numpy(), expected)


def test_quantized_and_half_tensors(gguf_files: ModuleType, tmp_path: Path, rng: Any) -> None:
    values = gguf_files.tensors("qwen2", rng)
    kinds = {
        "model.embed_tokens.weight": gguf.GGMLQuantizationType.Q8_0,
        "model.layers.0.mlp.gate_proj.weight": gguf.GGMLQuantizationType.Q4_0,
        "model.layers.0.mlp.up_proj.weight": gguf.GGMLQuantizationType.Q4_1,
        "model.layers.0.mlp.down_proj.weight": gguf.GGMLQuantizationType.F16,
        "model.layers.1.mlp.down_proj.weight": gguf.GGMLQuantizationType.BF16,
    }
    checkpoint = GgufCheckpoint(gguf_files.write(tmp_path / "m.gguf", "qwen2", values, kinds=kinds))
    for name, kind in kinds.items():
        expected = gguf.dequantize(gguf.quantize(values[name], kind), kind)
        got = checkpoint.read(name)
        assert got.shape == values[name].shape
        assert torch.equal(got.float(), torch.from_numpy(np.ascontiguousarray(expected))), name


def test_configuration(gguf_files: ModuleType, tmp_path: Path, rng: Any) -> None:
    values = gguf_files.tensors("qwen3", rng)
    keys = {"qwen3.attention.key_length": 8, "qwen3.attention.value_length": 8}
    config = GgufCheckpoint(gguf_files.write(tmp_path / "m.gguf", "qwen3", values, keys=keys)).config
    expected = {
        "architectures": ["Qwen3ForCausalLM"],
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": 40,
        "max_position_embeddings": 128,
        "tie_word_embeddings": True,
        "rope_theta": 10000.0,
    }
    assert {key: config[key] for key in expected} == expected
    assert math.isclose(config["rms_norm_eps"], 1e-5, rel_tol=1e-6)
    values["lm_head.weight"] = values["model.embed_tokens.weight"] + 1
    untied = GgufCheckpoint(gguf_files.write(tmp_path / "u.gguf", "qwen3", values, keys=keys))
    assert untied.config["tie_word_embeddings"] is False
    assert torch.equal(untied.read("lm_head.weight"), torch.from_numpy(values["lm_head.weight"]))


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, None),
        ({"llama.rope.scaling.type": "none"}, None),
        ({"llama.rope.scale_linear": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0}, {"rope_type": "linear", "factor": 2.0}),
        (
            {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 4.0,
                "llama.rope.scaling.original_context_length": 32,
            },
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
        ),
    ],
)
def test_rope_scaling(keys: dict[str, Any], expected: Any, gguf_files: ModuleType, tmp_path: Path, rng: Any) -> None:
    path = gguf_files.write(tmp_path / "m.gguf", "llama", gguf_files.tensors("llama", rng), keys=keys)
    assert GgufCheckpoint(path).config.get("rope_scaling") == expected


def _llama3_factors(rotary: int, base: float, factor: float, original: int) -> np.ndarray:
    """The converter's table: 1 / (scaled frequency / frequency)."""
    found = []
    for i in range(0, rotary, 2):
        wavelength = 2 * math.pi * base ** (i / rotary)
        if wavelength < original / 4.0:
            found.append(1.0)
        elif wavelength > original:
            found.append(factor)
        else:
            smooth = (original / wavelength - 1.0) / 3.0
            found.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(found, dtype=np.float32)


def test_llama3_scaling_is_recovered_from_its_table(gguf_files: ModuleType, tmp_path: Path, rng: Any) -> None:
    base = 500000.0
    table = _llama3_factors(8, base, 32.0, 8192)
    values = gguf_files.tensors("llama", rng)
    # The writer sets rope_freq_base to 10000; head_dim 8 with that base never leaves the short wavelengths.
    path = gguf_files.write(tmp_path / "m.gguf", "llama", values, extra={"rope_freqs.weight": _llama3_factors(8, 1e4, 8.0, 2048)})
    assert "rope_freqs.weight" not in GgufCheckpoint(path).names()
    from tokenspeed_engine.checkpoint.gguf_config import _llama3_scaling

    scaling = _llama3_scaling("m", torch.from_numpy(_llama3_factors(128, base, 32.0, 8192)), 128, base)
    assert scaling["original_max_position_embeddings"] == 8192
    assert math.isclose(scaling["factor"], 32.0, rel_tol=1e-6)
    assert table[-1] == 32.0
    with pytest.raises(UnsupportedCheckpointError, match=r"rope_freqs\.weight"):
        _llama3_scaling("m", torch.rand(64) + 1.5, 128, base)


def test_sliding_window_of_llama_is_mistral(gguf_files: ModuleType, tmp_path: Path, rng: Any) -> None:
    values = gguf_files.tensors("llama", rng)
    path = gguf_files.write(tmp_path / "m.gguf", "llama", values, keys={"llama.attention.sliding_window": 16})
    config = GgufCheckpoint(path).config
    assert (config["architectures"], config["sliding_window"]) == (["MistralForCausalLM"], 16)


def test_unknown_architecture_and_scaling_are_named(gguf_files: ModuleType, tmp_path: Path, rng: Any) -> None:
    values = gguf_files.tensors("qwen2", rng)
    path = gguf_files.write(tmp_path / "m.gguf", "gptj", values)
    with pytest.raises(UnsupportedCheckpointError, match="'gptj'; expected one of llama, mistral, qwen2, qwen3"):
        GgufCheckpoint(path)
    keys = {"qwen2.rope.scaling.type": "longrope"}
    path = gguf_files.write(tmp_path / "r.gguf", "qwen2", values, keys=keys)
    with pytest.raises(UnsupportedCheckpointError, match="longrope"):
        GgufCheckpoint(path)
    path = gguf_files.write(tmp_path / "x.gguf", "qwen2", values, keys={"qwen2.expert_count": 8})
    with pytest.raises(UnsupportedCheckpointError, match="experts"):
        GgufCheckpoint(path)


def test_unreadable_tensor_type_is_named(gguf_files: ModuleType, tmp_path: Path, rng: Any) -> None:
    values = gguf_files.tensors("qwen2", rng)
    kinds = {"model.layers.1.mlp.up_proj.weight": gguf.GGMLQuantizationType.Q5_0}
    path = gguf_files.write(tmp_path / "m.gguf", "qwen2", values, kinds=kinds)
    with pytest.raises(UnsupportedCheckpointError, match=r"blk.1.ffn_up.weight.*GGML type 6.*Q4_K"):
        GgufCheckpoint(path)


def test_a_cut_file_names_file_and_tensor(gguf_files: ModuleType, tmp_path: Path, rng: Any) -> None:
    path = gguf_files.write(tmp_path / "m.gguf", "llama", gguf_files.tensors("llama", rng))
    data = path.read_bytes()
    path.write_bytes(data[:-64])
    with pytest.raises(CorruptCheckpointError, match=r"m\.gguf.*tensor 'blk\.1\.ffn_down\.weight' needs bytes"):
        GgufCheckpoint(path)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_damage_is_an_error_or_harmless_never_a_crash(data: st.DataObject, tmp_path_factory: Any, gguf_files: ModuleType) -> None:
    folder = tmp_path_factory.getbasetemp() / "damage"
    folder.mkdir(exist_ok=True)
    original = folder / "original.gguf"
    if not original.exists():
        gguf_files.write(original, "llama", gguf_files.tensors("llama", np.random.default_rng(0)))
    content = bytearray(original.read_bytes())
    header_bytes = 4096
    if data.draw(st.booleans(), label="cut"):
        content = content[: data.draw(st.integers(0, len(content) - 1), label="length")]
    for _ in range(data.draw(st.integers(0, 4), label="flips")):
        if content:
            at = data.draw(st.integers(0, min(header_bytes, len(content)) - 1), label="at")
            content[at] = data.draw(st.integers(0, 255), label="byte")
    damaged = folder / "damaged.gguf"
    damaged.write_bytes(content)
    fault = ""
    try:
        checkpoint = GgufCheckpoint(damaged)
        for name in checkpoint.names():
            checkpoint.read(name)
    except CheckpointError as error:
        fault = str(error)
    assert not fault or "damaged.gguf" in fault


def test_the_default_model() -> None:
    checkpoint = open_checkpoint()
    assert checkpoint.path == str(default_model_path())
    assert checkpoint.config["num_hidden_layers"] == 30
    assert checkpoint.config["tie_word_embeddings"] is True
    assert checkpoint.eos_token_ids == (2,)
    embedding = checkpoint.read("model.embed_tokens.weight")
    assert embedding.shape == (49152, 576)
    assert 0.05 < float(embedding.std()) < 0.5
