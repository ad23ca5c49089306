"""The default model: greedy ids against transformers with the same dequantized weights, in float32."""

from __future__ import annotations

import pydoc_data.topics
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
import torch

from tokenspeed_engine.checkpoint import Checkpoint, open_checkpoint
from tokenspeed_engine.executor import OfflineEngine
from tokenspeed_engine.tokenizer import load_tokenizer
from tokenspeed_engine.types import FinishReason, SamplingParams

QUESTION = "What is the capital of France? Answer in one sentence."
# Ratio 1.3 apart, ends included.
ALL_LENGTHS = sorted({1, 2, 3, *(round(4 * (3000 / 4) ** (i / 28)) for i in range(29))})


def transformers_model(checkpoint: Checkpoint) -> Any:
    """transformers' Llama with the checkpoint's weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = {key: value for key, value in checkpoint.config.items() if key not in ("architectures", "model_type")}
    model = LlamaForCausalLM(LlamaConfig(**config)).float().eval()
    state = {name: checkpoint.read(name).float() for name in checkpoint.names()}
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state)
    return model


@dataclass
class Set:
    """Prompts and what transformers generates."""

    model: Any
    prompts: list[list[int]]
    num_new: int
    expected: list[list[int]]


def _set(tiny: ModuleType, lengths: list[int], num_new: int) -> Set:
    checkpoint = open_checkpoint()
    tokenizer = load_tokenizer(checkpoint.path)
    topics = [text for _, text in sorted(pydoc_data.topics.topics.items()) if len(text) > 400]
    prompts = []
    for index, length in enumerate(lengths):
        text, ids = index, []
        while len(ids) < length:  # English prose with code and tables in it
            ids += tokenizer.encode(topics[text % len(topics)], add_special_tokens=False)
            text += len(lengths)
        prompts.append(list(ids[:length]))
    model = transformers_model(checkpoint)
    return Set(model, prompts, num_new, [tiny.greedy(model, prompt, num_new) for prompt in prompts])


@pytest.fixture(scope="module")
def few(tiny: ModuleType) -> Set:
    torch.set_num_threads(1)
    return _set(tiny, [1, 9, 33, 120], 12)


@pytest.fixture(scope="module")
def full(tiny: ModuleType) -> Set:
    return _set(tiny, ALL_LENGTHS, 64)


def _check(wanted: Set, tiny: ModuleType, *, one_by_one: bool = False, twice: bool = False, **options: Any) -> OfflineEngine:
    defaults: dict[str, Any] = {"device": "cpu", "max_model_len": 3100, "max_num_seqs": 16, "max_num_batched_tokens": 256}
    defaults["quantization"] = "none"  # the peer has dequantized weights
    page_size = options.get("page_size", 16)
    engine = OfflineEngine(**{**defaults, "num_pages": 16384 // page_size, **options})
    params = SamplingParams(temperature=0.0, max_tokens=wanted.num_new, ignore_eos=True)
    for _ in range(2 if twice else 1):
        groups = [[prompt] for prompt in wanted.prompts] if one_by_one else [wanted.prompts]
        outputs = [output for group in groups for output in engine.generate(group, params)]
        for prompt, output, expected in zip(wanted.prompts, outputs, wanted.expected, strict=True):
            tiny.assert_same_ids(wanted.model, prompt, output.token_ids, expected, f"prompt of {len(prompt)} tokens, {options}")
    return engine


def test_the_capital_of_france() -> None:
    engine = OfflineEngine(device="cpu", max_model_len=128, num_pages=16, max_num_seqs=1, max_num_batched_tokens=64)
    tokenizer = load_tokenizer(engine.executor.path)
    messages = [{"role": "user", "content": QUESTION}]
    rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    prompt = tokenizer.encode(rendered, add_special_tokens=False) if isinstance(rendered, str) else list(rendered)
    assert len(prompt) == 42
    output = engine.generate([prompt], SamplingParams(temperature=0.0, max_tokens=32))[0]
    assert output.finish_reason == FinishReason.STOP
    assert tokenizer.decode(output.token_ids, skip_special_tokens=False) == "The capital of France is Paris.<|im_end|>"


@pytest.mark.parametrize(
    "options",
    [
        {"one_by_one": True},
        {"twice": True, "prefill_chunk_size": 16},
        {"page_size": 1, "prefill_chunk_size": 7, "enable_prefix_caching": False},
        {"page_size": 4, "num_pages": 48, "max_model_len": 160, "pipeline_depth": 2},
    ],
    ids=["batch 1", "cached, chunk 16", "page 1, chunk 7", "retracted"],
)
def test_a_few_prompts(options: dict[str, Any], few: Set, tiny: ModuleType) -> None:
    engine = _check(few, tiny, **options)
    if "num_pages" in options:
        assert engine.scheduler.stats().num_retractions > 0


FULL: dict[str, dict[str, Any]] = {
    "batch 1": {"one_by_one": True},
    "16 concurrent": {},
    "prefix cache off": {"enable_prefix_caching": False},
    "prefix cache hit": {"twice": True, "num_pages": 2048},
    "chunk 7": {"prefill_chunk_size": 7},
    "chunk 16": {"prefill_chunk_size": 16},
    "chunk 64": {"prefill_chunk_size": 64},
    "chunk 4096": {"prefill_chunk_size": 4096, "max_num_batched_tokens": 4096},
    "page 1": {"page_size": 1},
    "page 64": {"page_size": 64},
    "retraction": {"num_pages": 220, "max_num_seqs": 32},
    "planned ahead": {"pipeline_depth": 2},
}


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", FULL)
def test_the_full_set(name: str, full: Set, tiny: ModuleType) -> None:
    assert len(full.prompts) >= 32
    assert (len(full.prompts[0]), len(full.prompts[-1])) == (1, 3000)
    engine = _check(full, tiny, **FULL[name])
    if name == "retraction":
        assert engine.scheduler.stats().num_retractions > 0
