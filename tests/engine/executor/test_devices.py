"""Devices, compute types, and the token budget that is measured at start."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tokenspeed_engine.executor import DeviceError, ModelRunner, OfflineEngine, OutOfMemoryError, resolve_device, resolve_dtype
from tokenspeed_engine.executor.memory import memory_guard
from tokenspeed_engine.layers import ForwardBatch
from tokenspeed_engine.types import SamplingParams

CPU = torch.device("cpu")


def test_auto_takes_what_is_there() -> None:
    assert resolve_device("cpu") == CPU
    assert resolve_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")


def test_a_gpu_that_is_not_there_is_named() -> None:
    with pytest.raises(DeviceError, match=r"device 'cuda:63': torch sees \d+ CUDA device\(s\)\. Fix: use --device cpu"):
        resolve_device("cuda:63")


@pytest.mark.parametrize("config", [{}, {"dtype": "bfloat16"}, {"torch_dtype": "float16"}])
def test_a_cpu_computes_in_float32_unless_told(config: dict[str, Any]) -> None:
    assert resolve_dtype("auto", CPU, config) == torch.float32
    assert resolve_dtype("bfloat16", CPU, config) == torch.bfloat16


def test_the_measured_budget_bounds_a_chunk_not_the_number_of_sequences(tiny: ModuleType, tmp_path: Path) -> None:
    tiny.make("llama", tmp_path)
    running = OfflineEngine(str(tmp_path), device="cpu", max_model_len=300, num_pages=64, max_num_seqs=64, num_threads=1)
    assert 32 <= running.executor.max_num_batched_tokens <= 300
    assert running.scheduler.stats().num_pages == 64
    outputs = running.generate([[7] * 250] * 3, SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))
    assert len({tuple(output.token_ids) for output in outputs}) == 1


def test_a_long_context_shrinks_chunks_as_measured(tiny: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny.make("llama", tmp_path)
    # A device on which a token takes 1/200 s, and as long again for each 128 keys before it.
    probed: list[tuple[int, int]] = []

    def timed(_self: ModelRunner, batch: ForwardBatch) -> float:
        num_cached = int(batch.positions[0])
        probed.append((batch.num_tokens, num_cached))
        return sum((1 + position / 128 if num_cached else 1) for position in batch.positions.tolist()) / 200

    monkeypatch.setattr(ModelRunner, "_timed", timed)
    engine = OfflineEngine(str(tmp_path), device="cpu", max_model_len=300, num_pages=64, max_num_seqs=4, num_threads=1)
    limits = engine.executor.step_limits
    assert limits is not None
    assert limits.num_tokens == 32
    last_chunk = limits.num_tokens / (1 + 268 / limits.context_cost_scale)
    assert 0.13 <= last_chunk * (1 + 268 / 128) / 200 <= 0.17
    assert engine.scheduler.config.max_step_cost == 32
    assert max(cached for _, cached in probed) == 300 - 32
    monkeypatch.setattr(ModelRunner, "_timed", lambda _self, batch: 100.0 if int(batch.positions[0]) else 0.14)
    busy = OfflineEngine(str(tmp_path), device="cpu", max_model_len=300, num_pages=64, max_num_seqs=4, num_threads=1)
    assert busy.scheduler.config.context_cost_scale == round((300 - 32) / 5), "a busy host shrinks chunks to a sixth at most"


def test_measuring_leaves_the_cache_as_it_is(tiny: ModuleType, tmp_path: Path) -> None:
    tiny.make("llama", tmp_path)
    options: dict[str, Any] = {"device": "cpu", "max_model_len": 128, "num_pages": 16, "max_num_seqs": 2, "num_threads": 1}
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    measured = OfflineEngine(str(tmp_path), **options).generate([[5, 6, 7]], params)
    told = OfflineEngine(str(tmp_path), **options, max_num_batched_tokens=32).generate([[5, 6, 7]], params)
    assert measured[0].token_ids == told[0].token_ids


def test_only_memory_errors_are_explained() -> None:
    with pytest.raises(RuntimeError, match="something else"), memory_guard("x", CPU, {}, "y"):
        raise RuntimeError("something else")
    with (
        pytest.raises(OutOfMemoryError, match=r"on cpu while making x: .* available; held: weights 2\.00 GiB\. Fix: y"),
        memory_guard("x", CPU, {"weights": 2 * 2**30}, "y"),
    ):
        torch.empty(2**55)
