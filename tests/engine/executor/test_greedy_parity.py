"""Greedy ids of the whole engine against transformers, however the work is cut: batch, chunks, pages, cache, retraction."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tokenspeed_engine.executor import OfflineEngine
from tokenspeed_engine.types import FinishReason, SamplingParams

NUM_NEW = 20
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_NEW, ignore_eos=True)
LENGTHS = (1, 2, 7, 8, 15, 16, 17, 31, 33, 48, 64, 65, 90, 100, 127, 150)


@dataclass(frozen=True)
class Reference:
    """A checkpoint, prompts, and what transformers makes of them."""

    folder: Path
    model: Any
    prompts: list[list[int]]
    expected: list[list[int]]


@pytest.fixture(scope="module")
def references(tiny: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Reference]:
    torch.set_num_threads(1)
    found = {}
    for case in ("llama", "mistral-window", "qwen2", "qwen3"):
        folder = tmp_path_factory.mktemp(case)
        model = tiny.make(case, folder)
        generator = torch.Generator().manual_seed(7)
        prompts = [torch.randint(3, 211, (n,), generator=generator).tolist() for n in LENGTHS]
        # The second half shares a beginning, so that the prefix cache has something to find.
        prompts = prompts[:8] + [prompts[-1][:40] + prompt[40:] if len(prompt) > 40 else prompt for prompt in prompts[8:]]
        found[case] = Reference(folder, model, prompts, [tiny.greedy(model, prompt, NUM_NEW) for prompt in prompts])
    return found


def engine(reference: Reference, **options: Any) -> OfflineEngine:
    defaults: dict[str, Any] = {
        "device": "cpu",
        "max_model_len": 256,
        "num_pages": 512,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 64,
        "num_threads": 1,
    }
    return OfflineEngine(str(reference.folder), **{**defaults, **options})


def check(reference: Reference, running: OfflineEngine, tiny: ModuleType, *, one_by_one: bool = False) -> None:
    """Generate and compare; afterwards no page may be owned."""
    if one_by_one:
        outputs = [running.generate([prompt], GREEDY)[0] for prompt in reference.prompts]
    else:
        outputs = running.generate(reference.prompts, GREEDY)
    for prompt, output, expected in zip(reference.prompts, outputs, reference.expected, strict=True):
        assert output.finish_reason == FinishReason.LENGTH
        tiny.assert_same_ids(reference.model, prompt, output.token_ids, expected, f"prompt of {len(prompt)}")
    stats = running.scheduler.stats()
    assert stats.owned_pages == 0
    assert stats.free_pages + stats.cached_pages == stats.num_pages


@pytest.mark.parametrize("case", ["llama", "mistral-window", "qwen2", "qwen3"])
@pytest.mark.parametrize("one_by_one", [True, False], ids=["batch1", "batch16"])
def test_batch_size_does_not_matter(case: str, one_by_one: bool, references: Any, tiny: ModuleType) -> None:
    check(references[case], engine(references[case]), tiny, one_by_one=one_by_one)


@pytest.mark.parametrize("chunk", [7, 16, 64, 4096])
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_chunks_and_pages_do_not_matter(chunk: int, page_size: int, references: Any, tiny: ModuleType) -> None:
    running = engine(
        references["llama"],
        page_size=page_size,
        num_pages=8192 // page_size,
        prefill_chunk_size=chunk,
        max_num_batched_tokens=max(chunk, 32),
    )
    check(references["llama"], running, tiny)


@pytest.mark.parametrize("enable", [True, False])
def test_the_prefix_cache_does_not_matter(enable: bool, references: Any, tiny: ModuleType) -> None:
    running = engine(references["qwen3"], enable_prefix_caching=enable)
    check(references["qwen3"], running, tiny)
    check(references["qwen3"], running, tiny)
    hits = running.scheduler.stats().prefix_hit_tokens
    assert hits > 500 if enable else hits == 0


@pytest.mark.parametrize("page_size", [1, 16])
def test_retraction_does_not_matter(page_size: int, references: Any, tiny: ModuleType) -> None:
    running = engine(references["llama"], page_size=page_size, num_pages=256 // page_size, prefill_chunk_size=16)
    check(references["llama"], running, tiny)
    assert running.scheduler.stats().num_retractions > 0


@pytest.mark.parametrize("num_pages", [512, 16])
def test_planning_before_the_last_commit_does_not_matter(num_pages: int, references: Any, tiny: ModuleType) -> None:
    """The next step is planned and run before the tokens of the one before are committed: they come from the device."""
    running = engine(references["qwen2"], pipeline_depth=2, num_pages=num_pages)
    check(references["qwen2"], running, tiny)
    assert (running.scheduler.stats().num_retractions > 0) == (num_pages == 16)
