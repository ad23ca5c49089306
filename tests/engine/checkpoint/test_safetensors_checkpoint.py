"""Safetensors folders and files: one, sharded, and broken."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tokenspeed_engine.checkpoint import (
    CheckpointError,
    CorruptCheckpointError,
    SafetensorsCheckpoint,
    UnsupportedCheckpointError,
    open_checkpoint,
)

TENSORS = {
    "a.weight": torch.arange(12, dtype=torch.float32).view(3, 4),
    "b.weight": torch.arange(6, dtype=torch.bfloat16).view(2, 3),
    "c.bias": torch.arange(5, dtype=torch.float16),
}


def _folder(path: Path, config: dict[str, Any] | None = None) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config or {"architectures": ["LlamaForCausalLM"], "eos_token_id": 2}))
    return path


def _sharded(path: Path) -> Path:
    folder = _folder(path)
    save_file({"a.weight": TENSORS["a.weight"]}, folder / "model-00001-of-00002.safetensors")
    save_file({k: TENSORS[k] for k in ("b.weight", "c.bias")}, folder / "model-00002-of-00002.safetensors")
    index = {n: f"model-0000{1 if n == 'a.weight' else 2}-of-00002.safetensors" for n in TENSORS}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return folder


def _single(path: Path) -> Path:
    folder = _folder(path)
    save_file(TENSORS, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("make", [_single, _sharded, lambda p: _single(p) / "model.safetensors"])
def test_reads_what_was_saved(make: Any, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(make(tmp_path / "m"))
    assert set(checkpoint.names()) == set(TENSORS)
    for name, expected in TENSORS.items():
        assert name in checkpoint
        assert checkpoint.shape(name) == tuple(expected.shape)
        assert checkpoint.size_bytes(name) == expected.numel() * expected.itemsize
        got = checkpoint.read(name)
        assert got.dtype == expected.dtype
        assert torch.equal(got, expected)


def test_generation_config_adds_stop_tokens(tmp_path: Path) -> None:
    folder = _single(tmp_path / "m")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 2]}))
    assert SafetensorsCheckpoint(folder).eos_token_ids == (7, 2)


def test_a_cut_file_names_file_and_tensor(tmp_path: Path) -> None:
    folder = _single(tmp_path / "m")
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(CorruptCheckpointError, match=r"model\.safetensors.*tensor '(a\.weight|b\.weight|c\.bias)' ends at byte"):
        SafetensorsCheckpoint(folder)


@pytest.mark.parametrize("length", [0, 4, 8, 40])
def test_a_cut_header_is_an_error(length: int, tmp_path: Path) -> None:
    folder = _single(tmp_path / "m")
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:length])
    with pytest.raises(CorruptCheckpointError, match=r"model\.safetensors.*header"):
        SafetensorsCheckpoint(folder)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    folder = _sharded(tmp_path / "m")
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.safetensors \(holds 'b\.weight'\) is missing"):
        SafetensorsCheckpoint(folder)


@pytest.mark.parametrize("target", ["../other.safetensors", "/etc/passwd", "weights.bin"])
def test_the_index_cannot_lead_elsewhere(target: str, tmp_path: Path) -> None:
    folder = _sharded(tmp_path / "m")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a.weight": target}}))
    with pytest.raises(CorruptCheckpointError, match="not a file of this folder"):
        SafetensorsCheckpoint(folder)


def test_a_tensor_that_the_shard_lacks_is_named(tmp_path: Path) -> None:
    folder = _sharded(tmp_path / "m")
    index = folder / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    weight_map["d.weight"] = "model-00001-of-00002.safetensors"
    index.write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CorruptCheckpointError, match=r"tensor 'd\.weight' of the index is not in it"):
        SafetensorsCheckpoint(folder)


def test_integer_tensors_are_refused_by_name(tmp_path: Path) -> None:
    folder = _folder(tmp_path / "m")
    save_file({"q.weight": torch.zeros(2, 2, dtype=torch.int8)}, folder / "model.safetensors")
    with pytest.raises(UnsupportedCheckpointError, match=r"'q\.weight' is I8; expected one of F64, F32, F16, BF16"):
        SafetensorsCheckpoint(folder)


def test_config_json_must_be_there_and_be_json(tmp_path: Path) -> None:
    folder = _single(tmp_path / "m")
    (folder / "config.json").write_text("{")
    with pytest.raises(CorruptCheckpointError, match=r"config\.json: not JSON"):
        SafetensorsCheckpoint(folder)
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config\.json is missing"):
        SafetensorsCheckpoint(folder)
