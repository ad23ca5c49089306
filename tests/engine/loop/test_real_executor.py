"""The loop with the real executor: the same greedy ids whether a step is committed before or after the next one is run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tokenspeed_engine.config import CacheConfig, CoreConfig, ModelConfig, SchedulingConfig
from tokenspeed_engine.core_build import build_core
from tokenspeed_engine.ipc import LoadProgress, Progress, Shutdown, StepOutputs, SubmitRequest
from tokenspeed_engine.loop import EngineLoop
from tokenspeed_engine.types import FinishReason, SamplingParams, TokenizedRequest

VOCAB = 199


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import transformers

    torch.manual_seed(1)
    torch.set_num_threads(1)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=12, max_position_embeddings=256, initializer_range=0.3, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("llama")
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


class Link:
    """Gives the requests at once, and Shutdown when the loop would wait for ever."""

    def __init__(self, requests: Sequence[SubmitRequest]) -> None:
        self.requests = list(requests)
        self.sent: list[Any] = []

    def receive(self, timeout_s: float | None) -> list[Any]:
        given, self.requests = self.requests, []
        return given or ([Shutdown()] if timeout_s is None else [])

    def send(self, message: Any) -> bool:
        self.sent.append(message)
        return True


def run(checkpoint: Path, prompts: Sequence[Sequence[int]], depth: int, num_pages: int) -> dict[str, list[int]]:
    reports: list[LoadProgress] = []
    config = CoreConfig(
        model=ModelConfig(model=str(checkpoint), device="cpu", num_threads=1),
        cache=CacheConfig(page_size=4, num_pages=num_pages),
        scheduling=SchedulingConfig(max_num_seqs=8, max_num_batched_tokens=24, pipeline_depth=depth),
    )
    parts = build_core(config, reports.append)
    (weights,) = (report for report in reports if report.total and report.done == report.total)
    assert weights.stage == "weights"
    assert reports[-1].stage == "warm-up"
    requests = [
        SubmitRequest(TokenizedRequest(f"r{n}", tuple(prompt), SamplingParams(temperature=0, max_tokens=40)))
        for n, prompt in enumerate(prompts)
    ]
    link = Link(requests)
    EngineLoop(parts.scheduler, parts.executor, link, Progress(), parts.model_info, pipeline_depth=depth).run()
    assert parts.scheduler.stats().free_pages + parts.scheduler.stats().evictable_pages == num_pages
    outputs = [output for message in link.sent if isinstance(message, StepOutputs) for output in message.outputs]
    assert sum(output.finish_reason is not FinishReason.RUNNING for output in outputs) == len(prompts)
    tokens: dict[str, list[int]] = {}
    for output in outputs:
        tokens.setdefault(output.request_id, []).extend(output.token_ids)
    return tokens


@pytest.mark.parametrize("num_pages", [512, 40], ids=["roomy", "retracting"])
def test_depth_does_not_change_the_ids(checkpoint: Path, num_pages: int) -> None:
    source = torch.Generator().manual_seed(3)
    prompts = [torch.randint(3, VOCAB, (1 + 7 * n,), generator=source).tolist() for n in range(10)]
    expected = {f"r{n}": run(checkpoint, [prompt], 1, 512)["r0"] for n, prompt in enumerate(prompts)}
    for depth in (1, 2):
        assert run(checkpoint, prompts, depth, num_pages) == expected
