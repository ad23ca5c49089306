"""The offline engine: ends of requests, log-probabilities, errors that users can cause."""

from __future__ import annotations

import math
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tokenspeed_engine.executor import OfflineEngine, OutOfMemoryError
from tokenspeed_engine.types import FinishReason, SamplingParams
from tokenspeed_engine.weights import LoadProgress

OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "max_model_len": 128,
    "num_pages": 64,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 32,
    "num_threads": 1,
}
PROMPT = [5, 17, 99, 3, 140]


@pytest.fixture(scope="module")
def folder(tiny: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    tiny.make("llama", path)
    return path


@pytest.fixture(scope="module")
def reference(tiny: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return tiny.make("llama", tmp_path_factory.mktemp("reference"))


@pytest.fixture
def running(folder: Path) -> OfflineEngine:
    return OfflineEngine(str(folder), **OPTIONS)


def test_stop_tokens_end_a_request(running: OfflineEngine, tiny: ModuleType, reference: Any) -> None:
    expected = tiny.greedy(reference, PROMPT, 12)
    stop = expected[4]
    cut = expected.index(stop) + 1
    output = running.generate([PROMPT], SamplingParams(temperature=0, max_tokens=12, stop_token_ids=(stop,)))[0]
    assert output.token_ids == expected[:cut]
    assert output.finish_reason == FinishReason.STOP
    later = running.generate([PROMPT], SamplingParams(temperature=0, max_tokens=12, stop_token_ids=(stop,), min_tokens=12))[0]
    assert len(later.token_ids) == 12
    assert later.finish_reason == FinishReason.LENGTH


def test_the_checkpoints_own_eos_ends_a_request(folder: Path, tiny: ModuleType, reference: Any, tmp_path: Path) -> None:
    expected = tiny.greedy(reference, PROMPT, 12)
    tiny.make("llama", tmp_path, eos_token_id=expected[3])
    running = OfflineEngine(str(tmp_path), **OPTIONS)
    output = running.generate([PROMPT], SamplingParams(temperature=0, max_tokens=12))[0]
    assert output.token_ids == expected[: expected.index(expected[3]) + 1]
    ignoring = running.generate([PROMPT], SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))[0]
    assert ignoring.token_ids == expected


def test_seeded_sampling_does_not_depend_on_the_batch(running: OfflineEngine) -> None:
    params = [SamplingParams(temperature=0.9, top_p=0.9, seed=seed, max_tokens=10, ignore_eos=True) for seed in range(6)]
    together = running.generate([PROMPT] * 6, params)
    alone = [running.generate([PROMPT], p)[0] for p in params]
    assert [o.token_ids for o in together] == [o.token_ids for o in alone]
    assert len({tuple(o.token_ids) for o in together}) > 1


@pytest.mark.parametrize("chunk", [5, 32])
@pytest.mark.parametrize("num_pages", [64, 6])
def test_prompt_logprobs(chunk: int, num_pages: int, folder: Path, reference: Any) -> None:
    """Every prompt position but the first, once, whatever the chunks, and also when requests are retracted in between."""
    running = OfflineEngine(str(folder), **{**OPTIONS, "num_pages": num_pages, "prefill_chunk_size": chunk})
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(3, 211, (n,), generator=generator).tolist() for n in (1, 2, 23, 40)]
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, prompt_logprobs=3, logprobs=2)
    outputs = running.generate(prompts, params)
    assert (running.scheduler.stats().num_retractions > 0) == (num_pages == 6)
    for prompt, output in zip(prompts, outputs, strict=True):
        with torch.inference_mode():
            table = torch.log_softmax(reference(torch.tensor([prompt + output.token_ids])).logits[0].double(), -1)
        assert [entry.token_id for entry in output.prompt_logprobs] == prompt[1:]
        assert [entry.token_id for entry in output.logprobs] == output.token_ids
        entries = [*output.prompt_logprobs, *output.logprobs]
        for position, entry in enumerate(entries):
            row = table[position]
            assert math.isclose(entry.logprob, float(row[entry.token_id]), abs_tol=2e-4)
            assert entry.rank == 1 + int((row > row[entry.token_id]).sum())
            count = 3 if position < len(prompt) - 1 else 2
            assert len(entry.top_token_ids) == count
            for token, value in zip(entry.top_token_ids, entry.top_logprobs, strict=True):
                assert math.isclose(value, float(row[token]), abs_tol=2e-4)


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "message"),
    [
        ([], 4, "EMPTY"),
        ([211], 4, r"token ids in 0\.\.210, got 211"),
        ([-1], 4, r"token ids in 0\.\.210, got -1"),
        ([5] * 100, 100, "TOO_LONG"),
    ],
)
def test_prompts_that_cannot_run_are_refused(running: OfflineEngine, prompt: list[int], max_tokens: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        running.generate([prompt], SamplingParams(max_tokens=max_tokens))
    assert len(running.generate([PROMPT], SamplingParams(temperature=0, max_tokens=2, ignore_eos=True))[0].token_ids) == 2


def test_a_prompt_that_never_fits_is_refused(folder: Path) -> None:
    running = OfflineEngine(str(folder), **{**OPTIONS, "num_pages": 2})
    with pytest.raises(ValueError, match="NEVER_FITS"):
        running.generate([[5] * 40], SamplingParams(max_tokens=4))


def test_progress_covers_every_byte(folder: Path) -> None:
    seen: list[LoadProgress] = []
    OfflineEngine(str(folder), progress=seen.append, **OPTIONS)
    assert seen[-1].done_bytes == seen[-1].total_bytes > 0
    assert [p.done_bytes for p in seen] == sorted(p.done_bytes for p in seen)


def test_a_length_beyond_what_the_model_is_made_for_is_said(folder: Path) -> None:
    options: dict[str, Any] = {"device": "cpu", "num_pages": 8, "max_num_seqs": 1, "max_num_batched_tokens": 32}
    assert OfflineEngine(str(folder), max_model_len=512, **options).executor.warnings == []
    (warning,) = OfflineEngine(str(folder), max_model_len=513, **options).executor.warnings
    assert "made for 512 positions (max_position_embeddings), got 513" in warning


def test_unknown_options_are_refused(folder: Path) -> None:
    with pytest.raises(TypeError, match="num_pagez"):
        OfflineEngine(str(folder), **OPTIONS, num_pagez=3)


def test_out_of_memory_says_what_for_and_what_is_held(folder: Path) -> None:
    with pytest.raises(OutOfMemoryError, match=r"out of memory on cpu while making kv cache \(\d+\.\d\d GiB\).*held: weights.*Fix"):
        OfflineEngine(str(folder), **{**OPTIONS, "num_pages": 2_000_000_000})


def test_broken_weights_do_not_become_tokens(tiny: ModuleType, tmp_path: Path) -> None:
    model = tiny.make("llama", tmp_path)
    with torch.no_grad():
        model.model.norm.weight.fill_(float("nan"))
    model.save_pretrained(tmp_path)
    with pytest.raises(RuntimeError, match="NaN"):
        OfflineEngine(str(tmp_path), **OPTIONS).generate([PROMPT], SamplingParams(max_tokens=4))
