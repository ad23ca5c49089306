"""Stacking, sharding, tied heads (public report L1), and checkpoints that do not fit the model."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tokenspeed_engine.checkpoint import open_checkpoint
from tokenspeed_engine.executor import LoadedModel, OfflineEngine, load_model
from tokenspeed_engine.models import build_model
from tokenspeed_engine.parallel import Mesh, Parameter, Shard
from tokenspeed_engine.types import SamplingParams
from tokenspeed_engine.weights import MissingTensorsError, WeightsError, load_weights

CPU = torch.device("cpu")


def _load(folder: Path) -> LoadedModel:
    return load_model(open_checkpoint(folder), max_model_len=64, device=CPU, dtype=torch.float32)


def _edit(
    folder: Path, config: dict[str, Any] | None = None, drop: tuple[str, ...] = (), **tensors: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Change a saved checkpoint; keys of `tensors` have `__` for `.`. Returns the tensors."""
    file = folder / "model.safetensors"
    state = {name: value.clone() for name, value in load_file(file).items() if name not in drop}
    state |= {name.replace("__", "."): value for name, value in tensors.items()}
    save_file(state, file)
    path = folder / "config.json"
    whole = json.loads(path.read_text())
    whole |= config or {}
    path.write_text(json.dumps({key: value for key, value in whole.items() if value is not ...}))
    return state


def _logits(loaded: LoadedModel, hidden: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return loaded.model.logits(hidden)


@pytest.fixture
def folder(tiny: ModuleType, tmp_path: Path) -> Path:
    tiny.make("llama", tmp_path)
    return tmp_path


HIDDEN = torch.randn(5, 60, generator=torch.Generator().manual_seed(0))


def test_a_tied_head_is_the_embedding(tiny: ModuleType, tmp_path: Path) -> None:
    """Case L1 (a): tie true, no head in the checkpoint."""
    tiny.make("llama-tied-biased", tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    assert "lm_head.weight" not in checkpoint
    loaded = _load(tmp_path)
    assert loaded.report.warnings == []
    embedding = checkpoint.read("model.embed_tokens.weight")
    torch.testing.assert_close(_logits(loaded, HIDDEN), HIDDEN @ embedding.T, rtol=1e-5, atol=1e-5)


def test_no_head_and_not_tied_fails_and_names_the_tensor(folder: Path) -> None:
    """Case L1 (b): tie false, no head in the checkpoint."""
    _edit(folder, drop=("lm_head.weight",))
    with pytest.raises(MissingTensorsError, match=r"'lm_head\.weight'.*tie_word_embeddings is not true") as caught:
        _load(folder)
    assert caught.value.names == ("lm_head.weight",)


def test_tied_only_in_a_nested_config(folder: Path) -> None:
    """Case L1 (c): tie stands in text_config alone."""
    state = _edit(folder, {"tie_word_embeddings": ..., "text_config": {"tie_word_embeddings": True}}, drop=("lm_head.weight",))
    assert "tie_word_embeddings" not in json.loads((folder / "config.json").read_text())
    loaded = _load(folder)
    torch.testing.assert_close(_logits(loaded, HIDDEN), HIDDEN @ state["model.embed_tokens.weight"].T, rtol=1e-5, atol=1e-5)


def test_tied_with_another_head_uses_the_head_and_warns(folder: Path) -> None:
    """Case L1 (d): tie true and a head that differs."""
    state = _edit(folder, {"tie_word_embeddings": True})
    loaded = _load(folder)
    assert len(loaded.report.warnings) == 1
    assert "differs from 'model.embed_tokens.weight': 'lm_head.weight' is used" in loaded.report.warnings[0]
    torch.testing.assert_close(_logits(loaded, HIDDEN), HIDDEN @ state["lm_head.weight"].T, rtol=1e-5, atol=1e-5)


def test_tied_with_the_same_head_does_not_warn(folder: Path) -> None:
    embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"].clone()
    _edit(folder, {"tie_word_embeddings": True}, lm_head__weight=embedding)
    assert _load(folder).report.warnings == []


def test_a_missing_bias_is_an_error_and_an_absent_one_is_none(tiny: ModuleType, tmp_path: Path, folder: Path) -> None:
    """Case L1 (e): a bias that the configuration does not ask for is absent, one that it asks for must be there."""
    biased = tmp_path / "biased"
    tiny.make("qwen2", biased)
    _edit(biased, drop=("model.layers.1.self_attn.k_proj.bias",))
    with pytest.raises(MissingTensorsError, match=r"model\.layers\.1\.self_attn\.k_proj\.bias"):
        _load(biased)
    assert _load(folder).model.head.bias is None


def test_all_missing_tensors_are_named(folder: Path) -> None:
    gone = ("model.layers.0.mlp.up_proj.weight", "model.norm.weight")
    _edit(folder, drop=gone)
    with pytest.raises(MissingTensorsError) as caught:
        _load(folder)
    assert sorted(caught.value.names) == sorted(gone)
    assert all(name in str(caught.value) for name in gone)
    assert str(folder) in str(caught.value)


def test_unexpected_tensors_are_reported_and_derived_ones_are_not(folder: Path) -> None:
    _edit(folder, model__extra__weight=torch.zeros(2), model__layers__0__self_attn__rotary_emb__inv_freq=torch.zeros(5))
    report = _load(folder).report
    assert report.unexpected == ("model.extra.weight",)
    assert "1 tensor(s) are not used by the model: model.extra.weight" in report.warnings[0]
    options = {"device": "cpu", "max_model_len": 64, "num_pages": 8, "max_num_seqs": 2, "max_num_batched_tokens": 8}
    running = OfflineEngine(str(folder), **options)
    assert running.executor.warnings == report.warnings
    assert running.generate([[3, 4]], SamplingParams(temperature=0, max_tokens=2, ignore_eos=True))[0].token_ids


def test_a_wrong_shape_names_tensor_and_shapes(folder: Path) -> None:
    _edit(folder, {"intermediate_size": 96})
    name = r"'model\.layers\.0\.mlp\.gate_proj\.weight'"
    with pytest.raises(WeightsError, match=name + r": expected shape \(96, 60\).*got \(92, 60\)"):
        _load(folder)


@pytest.mark.parametrize("size", [1, 2])
def test_each_rank_gets_its_share_of_every_stacked_piece(size: int, tiny: ModuleType, tmp_path: Path) -> None:
    tiny.make("llama", tmp_path, vocab_size=212)
    checkpoint = open_checkpoint(tmp_path)
    model = build_model(checkpoint.config)
    parts = []
    for rank in range(size):
        parameters = dict(model.named_parameters())
        mesh = Mesh(size, rank, group=object() if size > 1 else None)
        load_weights(parameters, model.weight_map(), checkpoint, device=CPU, dtype=torch.float32, mesh=mesh)
        parts.append({name: parameter.tensor() for name, parameter in parameters.items()})
    state = load_file(tmp_path / "model.safetensors")
    gate, up = (state[f"model.layers.1.mlp.{n}_proj.weight"] for n in ("gate", "up"))
    down = state["model.layers.1.mlp.down_proj.weight"]
    for rank, part in enumerate(parts):
        rows = slice(rank * 92 // size, (rank + 1) * 92 // size)
        assert torch.equal(part["layers.1.mlp.gate_up.weight"], torch.cat((gate[rows], up[rows])))
        assert torch.equal(part["layers.1.mlp.down.weight"], down[:, rows])
        assert torch.equal(part["norm.weight"], state["model.norm.weight"])
    heads = torch.cat([part["layers.0.attention.qkv.weight"][: 60 // size] for part in parts])
    assert torch.equal(heads, state["model.layers.0.self_attn.q_proj.weight"])
    vocabulary = torch.cat([part["embed.weight"] for part in parts])
    assert torch.equal(vocabulary, state["model.embed_tokens.weight"])


def test_a_dimension_that_does_not_divide_is_named() -> None:
    with pytest.raises(ValueError, match="7 along dimension 0 does not divide by 2 ranks"):
        Parameter((15, 4), Shard(0), (8, 7)).local_shape(Mesh(2, 0, group=object()))
