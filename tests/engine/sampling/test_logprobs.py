"""Log-probabilities are those of the model's own distribution."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tokenspeed_engine.sampling import Sampler, prompt_logprobs
from tokenspeed_engine.types import SamplingParams

VOCAB = 301
PLAIN = SamplingParams(temperature=0.0, max_tokens=8)


def test_only_who_asks_gets_them() -> None:
    sampler = Sampler(VOCAB)
    sampler.add(1, PLAIN, [1])
    sampler.add(2, replace(PLAIN, logprobs=3), [1])
    sampler.add(3, replace(PLAIN, logprobs=0, temperature=1.0), [1])
    logits = torch.randn(3, VOCAB)
    assert sampler.sample(logits[:1].clone(), [1], [0]).logprobs is None
    output = sampler.sample(logits.clone(), [1, 2, 3], [0, 0, 0])
    entries = output.logprobs
    assert entries is not None
    assert entries[0] is None
    assert entries[1] is not None and entries[2] is not None
    assert entries[1].token_id == output.token_ids[1] == entries[1].top_token_ids[0]
    assert (entries[1].rank, len(entries[1].top_token_ids), entries[2].top_token_ids) == (1, 3, ())
    expected = logits.log_softmax(-1)
    assert entries[1].top_logprobs == pytest.approx(expected[1].topk(3).values.tolist(), abs=1e-5)
    token = entries[2].token_id
    assert token == output.token_ids[2]
    assert entries[2].logprob == pytest.approx(expected[2, token].item(), abs=1e-5)
    assert entries[2].rank == int((expected[2] >= expected[2, token]).sum())
    assert output.logprobs is entries, "read once"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_penalties_bias_and_temperature_do_not_change_them(dtype: torch.dtype) -> None:
    sampler = Sampler(VOCAB, eos_token_ids=(4,))
    changes = {"repetition_penalty": 1.8, "frequency_penalty": 1.0, "logit_bias": {7: 30.0, 5: -100.0}, "min_tokens": 3}
    sampler.add(1, replace(PLAIN, logprobs=5, temperature=0.3, top_k=40, seed=3, **changes), [5, 6])  # type: ignore[arg-type]
    sampler.add(2, replace(PLAIN, frequency_penalty=1.0), [5])
    logits = torch.randn(2, VOCAB).to(dtype)
    logits[0, 4] = 20.0
    expected = logits.float().log_softmax(-1)[0]
    for index in range(3):
        entries = sampler.sample(logits.clone(), [1, 2], [index, index]).logprobs
        assert entries is not None
        entry = entries[0]
        assert entry is not None and entry.token_id == 7
        assert entry.logprob == pytest.approx(expected[7].item(), abs=1e-4)
        assert entry.top_token_ids[0] == 4
        assert entry.top_logprobs[0] == pytest.approx(expected[4].item(), abs=1e-4)


def test_prompt_logprobs() -> None:
    logits = torch.randn(5, VOCAB)
    prompt = [9, 300, 0, 17, 4, 9]
    entries = prompt_logprobs(logits, prompt[1:], 2)
    expected = logits.log_softmax(-1)
    assert [entry.token_id for entry in entries] == prompt[1:]
    for row, entry in enumerate(entries):
        assert entry.logprob == pytest.approx(expected[row, prompt[row + 1]].item(), abs=1e-5)
        assert entry.rank == 1 + int((logits[row] > logits[row, prompt[row + 1]]).sum())
        assert list(entry.top_token_ids) == logits[row].topk(2).indices.tolist()
    parts = prompt_logprobs(logits[:2], prompt[1:3], 2) + prompt_logprobs(logits[2:], prompt[3:], 2)
    assert parts == entries, "chunks give what the whole gives, bit for bit"
    assert prompt_logprobs(logits[:0], [], 2) == []


def test_prompt_logprobs_refuses_lengths_that_differ() -> None:
    with pytest.raises(ValueError, match="one next token for each of 2 positions, got 3"):
        prompt_logprobs(torch.randn(2, VOCAB), [1, 2, 3], 0)


def test_ties_go_to_the_lower_id() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, [20, 10, 30]] = 1.0
    (entry,) = prompt_logprobs(logits, [20], 3)
    assert entry.top_token_ids == (10, 20, 30)
    assert entry.rank == 2
