"""The whole engine on a GPU, in float32 with IEEE products, against transformers on the CPU."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch

from tokenspeed_engine.executor import OfflineEngine
from tokenspeed_engine.types import SamplingParams

pytestmark = pytest.mark.gpu
SIZES = {"head_dim": 32, "hidden_size": 192}
NUM_NEW = 16


@pytest.mark.parametrize("case", ["llama", "llama-rope-yarn", "mistral-window", "qwen2", "qwen3-window-biased"])
@pytest.mark.parametrize("pipeline_depth", [1, 2])
@pytest.mark.parametrize("num_pages", [256, 40])
def test_greedy_ids_equal_transformers(
    case: str, pipeline_depth: int, num_pages: int, tiny: ModuleType, tmp_path: Path
) -> None:
    model = tiny.make(case, tmp_path, **SIZES)
    generator = torch.Generator().manual_seed(7)
    prompts = [torch.randint(3, 211, (n,), generator=generator).tolist() for n in (1, 2, 15, 16, 17, 33, 64, 100)]
    running = OfflineEngine(
        str(tmp_path),
        device="cuda",
        dtype="float32",
        max_model_len=128,
        page_size=4,
        num_pages=num_pages,
        max_num_seqs=8,
        max_num_batched_tokens=48,
        pipeline_depth=pipeline_depth,
    )
    params = SamplingParams(temperature=0.0, max_tokens=NUM_NEW, ignore_eos=True)
    outputs = running.generate(prompts, params)
    for prompt, output in zip(prompts, outputs, strict=True):
        expected = tiny.greedy(model, prompt, NUM_NEW)
        tiny.assert_same_ids(model, prompt, output.token_ids, expected, f"prompt of {len(prompt)}")
    assert (running.scheduler.stats().num_retractions > 0) == (num_pages == 40)


def test_bfloat16_logprobs_are_close(tiny: ModuleType, tmp_path: Path) -> None:
    model = tiny.make("llama", tmp_path, **SIZES)
    prompt = torch.randint(3, 211, (60,), generator=torch.Generator().manual_seed(1)).tolist()
    running = OfflineEngine(
        str(tmp_path), device="cuda", dtype="bfloat16", max_model_len=128, num_pages=16, max_num_seqs=1, max_num_batched_tokens=32
    )
    output = running.generate([prompt], SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0))[0]
    got = torch.tensor([entry.logprob for entry in output.prompt_logprobs])
    with torch.inference_mode():
        table = torch.log_softmax(model(torch.tensor([prompt])).logits[0], -1)
    expected = table[torch.arange(59), torch.tensor(prompt[1:])]
    assert float(torch.cosine_similarity(got, expected, dim=0)) > 0.999
