"""Frequencies and magnitudes against transformers' own, and the errors of a bad configuration."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from tokenspeed_kernel import ConfigError
from tokenspeed_kernel.ops.rope import RopeConfig, inverse_frequencies, rope_cos_sin

POSITIONS = torch.tensor([0, 1, 2, 63, 511, 4095, 8191, 16384, 32767, 60000])
YARN = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 4096}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0 + 0.02 * pair for pair in range(32)],
    "long_factor": [1.0 + 0.9 * pair for pair in range(32)],
    "original_max_position_embeddings": 4096,
}
SCALINGS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.5},
    "llama3": LLAMA3,
    "yarn": YARN,
    "yarn_mscale": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
    "yarn_two_mscales": {**YARN, "mscale": 0.707, "mscale_all_dim": 1.3},
    "yarn_attention_factor": {**YARN, "attention_factor": 1.0},
    "yarn_betas": {**YARN, "beta_fast": 24.0, "beta_slow": 2.0},
    "yarn_not_truncated": {**YARN, "truncate": False},
    "longrope": LONGROPE,
    "longrope_factor": {**LONGROPE, "factor": 4.0},
    "longrope_attention_factor": {**LONGROPE, "attention_factor": 1.25},
    "proportional": {"rope_type": "proportional"},
    "proportional_part": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "factor": 2.0},
    "proportional_odd_part": {"rope_type": "proportional", "partial_rotary_factor": 0.3},
}


def model_config(scaling: dict[str, Any], **overrides: Any) -> LlamaConfig:
    settings = {"hidden_size": 512, "num_attention_heads": 8, "max_position_embeddings": 65536}
    parameters = {"rope_theta": 500000.0, **scaling}
    return LlamaConfig(**{**settings, **overrides}, rope_parameters=parameters)


@pytest.mark.parametrize("name", SCALINGS)
def test_cos_and_sin_equal_transformers(name: str) -> None:
    config = model_config(SCALINGS[name])
    embedding = LlamaRotaryEmbedding(config)
    cos, sin = embedding(torch.empty(1, dtype=torch.float32), POSITIONS[None])
    half = cos.shape[-1] // 2
    table = rope_cos_sin(RopeConfig.from_hf(config.to_dict()), POSITIONS)
    assert table.shape == (len(POSITIONS), 64)
    assert table.dtype == torch.float32
    torch.testing.assert_close(table[:, :half], cos[0, :, :half], atol=1e-6, rtol=0)
    torch.testing.assert_close(table[:, half:], sin[0, :, :half], atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", [name for name in SCALINGS if name != "default"])
@pytest.mark.parametrize("theta", [10000.0, 1000000.0])
@pytest.mark.parametrize("seq_len", [None, 100, 200000])
def test_frequencies_equal_transformers(name: str, theta: float, seq_len: int | None) -> None:
    config = model_config({**SCALINGS[name], "rope_theta": theta})
    frequencies, magnitude = ROPE_INIT_FUNCTIONS[SCALINGS[name]["rope_type"]](config, "cpu", seq_len=seq_len)
    ours = RopeConfig.from_hf(config.to_dict())
    torch.testing.assert_close(inverse_frequencies(ours, seq_len), frequencies, atol=0, rtol=0)
    assert ours.magnitude == pytest.approx(magnitude, abs=1e-12)


@pytest.mark.parametrize(
    ("scaling", "magnitude"),
    [
        ({"factor": 16.0}, 1.2772588722),
        ({"factor": 16.0, "mscale": 1.0, "mscale_all_dim": 1.0}, 1.0),
        ({"factor": 16.0, "attention_factor": 1.0}, 1.0),
    ],
)
def test_yarn_magnitude_in_both_spellings(scaling: dict[str, Any], magnitude: float) -> None:
    # Report L3.
    base = {"head_dim": 64, "max_position_embeddings": 65536}
    scaling = {"original_max_position_embeddings": 4096, **scaling}
    old = RopeConfig.from_hf({**base, "rope_theta": 5e5, "rope_scaling": {"type": "yarn", **scaling}})
    new = RopeConfig.from_hf({**base, "rope_parameters": {"rope_type": "yarn", "rope_theta": 5e5, **scaling}})
    assert old == new
    assert old.magnitude == pytest.approx(magnitude, abs=1e-10)
    table = rope_cos_sin(old, POSITIONS).double()
    torch.testing.assert_close(table[0, :32], torch.full((32,), magnitude, dtype=torch.float64), atol=1e-6, rtol=0)
    assert torch.equal(rope_cos_sin(old, POSITIONS), rope_cos_sin(new, POSITIONS))


def test_llama3_in_both_spellings() -> None:
    scaling = {name: value for name, value in LLAMA3.items() if name != "rope_type"}
    base = {"head_dim": 64, "max_position_embeddings": 131072}
    old = RopeConfig.from_hf({**base, "rope_theta": 5e5, "rope_scaling": {"type": "llama3", **scaling}})
    new = RopeConfig.from_hf({**base, "rope_parameters": {**LLAMA3, "rope_theta": 5e5}})
    assert old == new
    assert old.kind == "llama3"
    assert old.magnitude == 1.0


def test_longrope_takes_the_factors_of_the_tables_length() -> None:
    config = RopeConfig.from_hf(model_config(LONGROPE).to_dict())
    assert config.magnitude == pytest.approx(math.sqrt(1 + math.log(16) / math.log(4096)))
    short, long = (inverse_frequencies(config, length) for length in (4096, 4097))
    assert torch.equal(rope_cos_sin(config, 4096)[1, :32], (short.double().cos() * config.magnitude).float())
    assert torch.equal(rope_cos_sin(config, 4097)[1, :32], (long.double().cos() * config.magnitude).float())
    assert not torch.equal(short, long)
    old = {"head_dim": 64, "max_position_embeddings": 65536, "rope_theta": 5e5, "original_max_position_embeddings": 4096}
    scaling = {name: LONGROPE[name] for name in ("short_factor", "long_factor")}
    assert RopeConfig.from_hf({**old, "rope_scaling": {"type": "su", **scaling}}) == config


def test_sections_are_read_in_every_spelling() -> None:
    base = {"head_dim": 64, "rope_theta": 1e6}
    plain = RopeConfig.from_hf({**base, "rope_scaling": {"type": "mrope", "mrope_section": [8, 12, 12]}})
    assert (plain.kind, plain.sections, plain.interleaved_sections) == ("default", (8, 12, 12), False)
    parameters = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [8, 12, 12], "mrope_interleaved": True}
    mixed = RopeConfig.from_hf({"head_dim": 64, "rope_parameters": parameters})
    assert (mixed.kind, mixed.sections, mixed.interleaved_sections) == ("default", (8, 12, 12), True)
    part = RopeConfig.from_hf({**base, "partial_rotary_factor": 0.5, "rope_scaling": {"type": "mrope", "mrope_section": [6, 5, 5]}})
    assert (part.rotary_dim, part.sections) == (32, (6, 5, 5))


def test_partial_rotation_and_defaults() -> None:
    config = RopeConfig.from_hf({"hidden_size": 512, "num_attention_heads": 8, "partial_rotary_factor": 0.25})
    assert (config.head_dim, config.rotary_dim, config.base, config.kind) == (64, 16, 10000.0, "default")
    assert rope_cos_sin(config, 10).shape == (10, 16)
    nested = {"full_attention": {"rope_type": "default", "rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}
    both = {"head_dim": 64, "rope_parameters": nested}
    assert RopeConfig.from_hf(both, layer_type="full_attention").base == 1e6
    assert RopeConfig.from_hf(both, layer_type="sliding_attention").base == 1e4
    with pytest.raises(ConfigError, match="full_attention, sliding_attention"):
        RopeConfig.from_hf(both)


def test_yarn_factor_from_the_lengths() -> None:
    config = {"head_dim": 64, "max_position_embeddings": 65536, "rope_parameters": {**YARN, "factor": None}}
    assert RopeConfig.from_hf(config).factor == 16.0


def test_dynamic_base_is_fixed_by_the_table_length() -> None:
    config = RopeConfig(64, 64, kind="dynamic", factor=2.0, max_position=128)
    plain = RopeConfig(64, 64, max_position=128)
    assert torch.equal(rope_cos_sin(config, 128), rope_cos_sin(plain, 128))
    long = rope_cos_sin(config, 512)
    assert torch.equal(long[:100], rope_cos_sin(config, torch.arange(512))[:100])
    assert not torch.equal(long[:128], rope_cos_sin(config, 128))


def test_table_is_rows_of_its_positions() -> None:
    config = RopeConfig(64, 32, base=1e6)
    table = rope_cos_sin(config, 70)
    assert torch.equal(table[[3, 69, 0]], rope_cos_sin(config, torch.tensor([3, 69, 0], dtype=torch.int32)))
    assert rope_cos_sin(config, 0).shape == (0, 32)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rotary_dim": 65}, "rotary_dim must be even"),
        ({"rotary_dim": 128}, "rotary_dim must be even and in 2..head_dim=64"),
        ({"kind": "magic"}, "kind must be one of default, linear"),
        ({"base": 0.0}, "base must be positive"),
        ({"factor": -1.0}, "factor must be positive"),
        ({"kind": "llama3", "low_freq_factor": 4.0, "high_freq_factor": 4.0}, "0 < low < high"),
        ({"kind": "yarn", "beta_fast": 1.0, "beta_slow": 2.0}, "fast >= slow"),
        ({"kind": "dynamic", "rotary_dim": 2}, "above 2 for dynamic"),
        ({"kind": "longrope", "short_factor": (1.0,) * 32}, "long_factor must be 32 positive numbers for longrope"),
        ({"kind": "longrope", "short_factor": (1.0,) * 31, "long_factor": (1.0,) * 32}, "short_factor must be 32"),
        ({"kind": "longrope", "short_factor": (0.0,) * 32, "long_factor": (1.0,) * 32}, "short_factor must be 32 positive"),
        ({"kind": "proportional", "rotary_dim": 32}, "rotary_dim must be head_dim=64 for proportional"),
        ({"kind": "proportional", "rotated_fraction": 1.5}, r"rotated_fraction must be in 0\.\.1"),
        ({"sections": (10, 10, 10)}, "sections must be numbers of pairs whose sum is rotary_dim / 2 = 32"),
        ({"sections": (40, -8)}, "sections must be"),
    ],
)
def test_bad_fields_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RopeConfig(**{"head_dim": 64, "rotary_dim": 64, **fields})


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"head_dim": 64, "rope_scaling": {"type": "longrope"}}, "longrope.* needs 'factor'"),
        ({"head_dim": 64, "rope_scaling": {"type": "longrope", "factor": 2.0}}, "'longrope' needs 'short_factor'"),
        ({"head_dim": 64, "rope_scaling": {"type": "magic"}}, "magic"),
        ({"head_dim": 64, "rope_scaling": {"type": "linear"}}, "needs 'factor'"),
        ({"head_dim": 64, "rope_scaling": {"rope_type": "default", "mrope_section": [8, 12, 13]}}, "sections must be .* = 32"),
        ({"num_attention_heads": 8}, "hidden_size"),
    ],
)
def test_bad_model_configurations_are_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RopeConfig.from_hf(config)


def test_negative_positions_are_refused() -> None:
    with pytest.raises(ConfigError, match="not be negative"):
        rope_cos_sin(RopeConfig(64, 64), -1)
    with pytest.raises(ConfigError, match="not negative"):
        rope_cos_sin(RopeConfig(64, 64), torch.tensor([1, -1]))
