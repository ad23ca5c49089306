"""Steps before the first request."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from tokenspeed_engine.executor import ModelExecutor, OfflineEngine
from tokenspeed_engine.types import SamplingParams
from tokenspeed_kernel import dispatch

OPTIONS: dict[str, Any] = {"device": "cpu", "num_threads": 1, "num_pages": 64, "page_size": 4}


@pytest.fixture
def no_kernel_bound() -> Iterator[None]:
    dispatch.reset()
    yield
    dispatch.reset()


def _bound() -> dict[str, int]:
    return {op.contract.name: len(op.table) for op in dispatch.bound_ops()}


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"temperature": 1.0, "top_p": 0.9, "top_k": 40}])
def test_a_first_request_finds_its_kernels_chosen(
    tiny: ModuleType, tmp_path: Path, no_kernel_bound: None, params: dict[str, Any]
) -> None:
    tiny.make("llama", tmp_path)
    engine = OfflineEngine(str(tmp_path), **OPTIONS)
    before = _bound()
    assert before["attention.mha_extend"] and before["attention.mha_decode"]
    engine.generate([[1, 2, 3, 4, 5]], SamplingParams(max_tokens=3, ignore_eos=True, **params))
    assert _bound() == before


def test_the_steps_are_those_of_a_request_and_leave_nothing(
    tiny: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny.make("llama", tmp_path)
    seen: list[tuple[int, int]] = []
    execute = ModelExecutor.execute

    def watched(self: ModelExecutor, plan: Any, page_table: Any) -> Any:
        seen.append((plan.num_tokens - plan.num_decodes, plan.num_decodes))
        return execute(self, plan, page_table)

    monkeypatch.setattr(ModelExecutor, "execute", watched)
    engine = OfflineEngine(str(tmp_path), **OPTIONS, max_num_batched_tokens=48, max_num_seqs=4)
    assert sum(tokens for tokens, _ in seen) == 48
    assert sum(decodes for _, decodes in seen) == 2
    stats = engine.scheduler.stats()
    assert (stats.free_pages, stats.cached_pages, stats.num_submitted) == (64, 0, 0)
    # The same ids are free again for a request of the engine's own.
    engine.executor.add_request(1, SamplingParams(), [1])


@pytest.mark.parametrize("limits", [{"max_model_len": 2}, {"num_pages": 1, "page_size": 1}, {"max_num_seqs": 1}])
def test_the_smallest_engines_start(tiny: ModuleType, tmp_path: Path, limits: dict[str, Any]) -> None:
    tiny.make("llama", tmp_path)
    engine = OfflineEngine(str(tmp_path), **{**OPTIONS, **limits})
    (output,) = engine.generate([[3]], SamplingParams(temperature=0, max_tokens=1, ignore_eos=True))
    assert np.asarray(output.token_ids).shape == (1,)
