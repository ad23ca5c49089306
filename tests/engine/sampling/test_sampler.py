"""The sampler over several steps: its own requests' parameters, whatever the batch."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from tokenspeed_engine.sampling import Sampler, SamplingParamsError
from tokenspeed_engine.sampling.feedback import InFlight
from tokenspeed_engine.types import SamplingParams
from tokenspeed_kernel.ops import sampling as ops

VOCAB = 503
GREEDY = SamplingParams(temperature=0.0, max_tokens=64)
EOS = 7


def logits_of(seed: int, rows: int = 1) -> Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def tokens(sampler: Sampler, logits: Tensor, request_ids: list[int], output_index: list[int]) -> list[int]:
    ids = np.array(request_ids, dtype=np.int64)
    return sampler.sample(logits.clone(), ids, np.array(output_index, dtype=np.int32)).token_ids.tolist()


def model(prompt: list[int], outputs: list[int]) -> Tensor:
    """Logits of a made-up model: a function of the whole sequence, in which a few tokens compete."""
    seed = hash(tuple(prompt + outputs)) % 2**31
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)) * 0.2
    logits[:12] += 4
    return logits


def generate(sampler: Sampler, plan: list[list[int]], prompts: dict[int, list[int]]) -> dict[int, list[int]]:
    """Run steps; each lists the requests of its rows."""
    outputs: dict[int, list[int]] = {one: [] for one in prompts}
    for rows in plan:
        logits = torch.stack([model(prompts[one], outputs[one]) for one in rows])
        drawn = tokens(sampler, logits, rows, [len(outputs[one]) for one in rows])
        for one, token in zip(rows, drawn, strict=True):
            outputs[one].append(token)
    return outputs


REQUESTS = {
    1: (SamplingParams(temperature=0.9, seed=1, max_tokens=64), [3, 4]),
    2: (replace(GREEDY, repetition_penalty=1.3), [5, 1, 5, 2]),
    3: (SamplingParams(temperature=1.2, top_p=0.8, top_k=30, seed=-5, frequency_penalty=0.7, max_tokens=64), [9]),
    4: (GREEDY, [1, 2]),
    5: (SamplingParams(temperature=1.0, presence_penalty=1.1, logit_bias={3: 2.5}, seed=2**63, max_tokens=64), [8]),
    6: (replace(GREEDY, min_tokens=4, logit_bias={EOS: 20.0}), [6]),
}


def all_requests(sampler: Sampler) -> dict[int, list[int]]:
    for request_id, (params, prompt) in REQUESTS.items():
        sampler.add(request_id, params, prompt)
    return {request_id: prompt for request_id, (_, prompt) in REQUESTS.items()}


def test_outputs_do_not_depend_on_batch_order_or_pauses() -> None:
    together = Sampler(VOCAB, eos_token_ids=(EOS,))
    prompts = all_requests(together)
    expected = generate(together, [list(REQUESTS)] * 12, prompts)

    alone = Sampler(VOCAB, eos_token_ids=(EOS,))
    all_requests(alone)
    assert generate(alone, [[one] for one in REQUESTS for _ in range(12)], prompts) == expected

    generator = np.random.default_rng(3)
    ragged = Sampler(VOCAB, eos_token_ids=(EOS,))
    all_requests(ragged)
    left = dict.fromkeys(REQUESTS, 12)
    plan = []
    while any(left.values()):
        ready = [one for one in left if left[one]]
        rows = generator.permutation(ready)[: generator.integers(1, len(ready) + 1)].tolist()
        plan.append(rows)
        for one in rows:
            left[one] -= 1
    assert generate(ragged, plan, prompts) == expected
    assert any(len(set(output)) > 3 for output in expected.values())


def test_seeds_make_the_difference() -> None:
    sampler = Sampler(VOCAB)
    params = SamplingParams(temperature=1.0, max_tokens=64)
    for request_id, seed in ((1, 10), (2, 11), (3, 10)):
        sampler.add(request_id, replace(params, seed=seed), [1])
    outputs = generate(sampler, [[1, 2, 3]] * 10, {1: [1], 2: [1], 3: [1]})
    assert outputs[1] == outputs[3]
    assert outputs[1] != outputs[2]


def test_greedy_rows_are_one_argmax(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = Sampler(VOCAB)
    sampler.add(1, GREEDY, [1])
    sampler.add(2, replace(GREEDY, temperature=1.0, top_k=1), [1])
    sampler.add(3, replace(GREEDY, temperature=1.0, top_p=0.0), [1])

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a greedy batch must not get here")

    for name in ("sample", "philox_uniform", "apply_penalties", "apply_logit_bias", "log_probs"):
        monkeypatch.setattr(ops, name, refuse)
    logits = logits_of(1, 3)
    assert tokens(sampler, logits, [1, 2, 3], [0, 0, 0]) == logits.argmax(-1).tolist()


def reference_penalties(logits: Tensor, params: SamplingParams, prompt: list[int], outputs: list[int]) -> Tensor:
    """Penalties over the whole vocabulary, written out."""
    counts = torch.bincount(torch.tensor(outputs, dtype=torch.int64), minlength=VOCAB)
    seen = counts > 0
    seen[torch.tensor(prompt)] = True
    scaled = torch.where(logits > 0, logits / params.repetition_penalty, logits * params.repetition_penalty)
    result = torch.where(seen, scaled, logits)
    return result - counts * params.frequency_penalty - (counts > 0) * params.presence_penalty


@pytest.mark.parametrize("late", [False, True], ids=["counted at once", "tokens still on the device"])
@pytest.mark.parametrize(
    "params",
    [
        replace(GREEDY, repetition_penalty=1.4),
        replace(GREEDY, frequency_penalty=0.3),
        replace(GREEDY, presence_penalty=0.9),
        replace(GREEDY, repetition_penalty=0.8, frequency_penalty=-0.1, presence_penalty=0.2),
    ],
    ids=["repetition", "frequency", "presence", "all"],
)
def test_penalties_count_prompt_and_output(params: SamplingParams, late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With `late`, no step's tokens are in host memory when the next step is prepared, as on a GPU that is ahead."""
    if late:
        monkeypatch.setattr(InFlight, "has_arrived", lambda self: False)
    sampler = Sampler(VOCAB)
    prompts = {1: [0, 1, 1, 2], 2: [3], 3: [4]}
    for request_id, prompt in prompts.items():
        sampler.add(request_id, GREEDY if request_id == 3 else params, prompt)
    outputs: dict[int, list[int]] = {1: [], 2: [], 3: []}
    for step in range(30):
        rows = [[1, 2, 3], [3, 2], [2, 1], [1]][step % 4]
        logits = torch.stack([model(prompts[one], outputs[one]) for one in rows])
        drawn = tokens(sampler, logits, rows, [len(outputs[one]) for one in rows])
        for row, one in enumerate(rows):
            mine = GREEDY if one == 3 else params
            expected = reference_penalties(logits[row], mine, prompts[one], outputs[one]).argmax().item()
            assert drawn[row] == expected
            outputs[one].append(drawn[row])


@pytest.mark.parametrize("late", [False, True])
def test_a_position_that_comes_again_counts_once(late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if late:
        monkeypatch.setattr(InFlight, "has_arrived", lambda self: False)
    params, prompt = replace(GREEDY, frequency_penalty=0.3, repetition_penalty=1.2), [1, 2]
    straight, repeated = Sampler(VOCAB), Sampler(VOCAB)
    straight.add(1, params, prompt)
    repeated.add(1, params, prompt)
    expected = generate(straight, [[1]] * 10, {1: prompt})[1]
    outputs: list[int] = []
    for index in (0, 1, 2, 2, 2, 3, 4, 5, 3, 4, 5, 5, 6, 7, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9):
        del outputs[index:]
        outputs += tokens(repeated, model(prompt, outputs)[None], [1], [index])
    assert outputs == expected


def test_min_tokens_hold_back_every_stop_token() -> None:
    sampler = Sampler(VOCAB, eos_token_ids=(EOS, 8))
    sampler.add(1, replace(GREEDY, min_tokens=2, stop_token_ids=(9,)), [1])
    sampler.add(2, replace(GREEDY, min_tokens=2, stop_token_ids=(9,), ignore_eos=True), [1])
    logits = torch.zeros(2, VOCAB)
    logits[:, 11], logits[:, 9], logits[:, 8], logits[:, EOS] = 1, 2, 3, 4
    for index, expected in ((0, [11, EOS]), (1, [11, EOS]), (2, [EOS, EOS])):
        assert tokens(sampler, logits, [1, 2], [index, index]) == expected
    logits[:, EOS] = logits[:, 8] = 0
    assert tokens(sampler, logits, [1, 2], [1, 1]) == [11, 11]


def test_logit_bias_forces_and_forbids() -> None:
    sampler = Sampler(VOCAB)
    sampler.add(1, replace(GREEDY, logit_bias={400: 100.0}), [1])
    sampler.add(2, replace(GREEDY, logit_bias={5: -100.0}), [1])
    sampler.add(3, GREEDY, [1])
    logits = logits_of(4, 3)
    logits[:, 5], logits[:, 6] = 50, 40
    assert tokens(sampler, logits, [1, 2, 3], [0, 0, 0]) == [400, 6, 5]


def test_a_row_that_cannot_be_sampled_is_reported_and_harms_no_other() -> None:
    sampler = Sampler(VOCAB)
    for request_id, params in enumerate((GREEDY, replace(GREEDY, temperature=1.0), replace(GREEDY, frequency_penalty=1.0))):
        sampler.add(request_id, params, [1])
    sampler.add(9, GREEDY, [1])
    logits = logits_of(6, 4)
    logits[:3, 100] = float("nan")
    assert tokens(sampler, logits, [0, 1, 2, 9], [0] * 4) == [-1, -1, -1, int(logits[3].argmax())]
    assert tokens(sampler, logits[[0, 3]], [0, 9], [1, 1])[0] == -1


def test_state_is_reused_after_removal() -> None:
    sampler = Sampler(VOCAB)
    for request_id in range(200):
        sampler.add(request_id, replace(GREEDY, temperature=float(request_id % 2), seed=request_id), [1])
    for request_id in range(0, 200, 3):
        sampler.remove(request_id)
        sampler.remove(request_id)  # an abort may come twice
    assert len(sampler) == 200 - 67
    for request_id in range(1000, 1100):
        sampler.add(request_id, GREEDY, [1])
    logits = logits_of(8, 2)
    assert tokens(sampler, logits, [1000, 1099], [0, 0]) == logits.argmax(-1).tolist()
    with pytest.raises(KeyError):
        tokens(sampler, logits, [0, 1000], [0, 0])


def test_parameters_of_a_reused_slot_are_the_new_ones() -> None:
    """The arrays of a batch are kept from step to step; a new request in an old slot must not get the old values."""
    sampler, fresh = Sampler(VOCAB), Sampler(VOCAB)
    sampler.add(1, SamplingParams(temperature=0.5, seed=1, max_tokens=64), [1])
    tokens(sampler, logits_of(1), [1], [0])
    sampler.remove(1)
    for one in (sampler, fresh):
        one.add(2, SamplingParams(temperature=1.5, seed=2, max_tokens=64), [1])
    for index in range(20):
        assert tokens(sampler, logits_of(index), [2], [index]) == tokens(fresh, logits_of(index), [2], [index])


def test_empty_step() -> None:
    output = Sampler(VOCAB).sample(torch.empty(0, VOCAB), [], [])
    assert output.token_ids.shape == (0,)
    assert output.token_ids.dtype == torch.int32
    assert output.logprobs is None


def test_refusals() -> None:
    sampler = Sampler(VOCAB)
    sampler.add(1, GREEDY, [1])
    with pytest.raises(ValueError, match="request 1 was added already"):
        sampler.add(1, GREEDY, [1])
    with pytest.raises(SamplingParamsError, match=r"top_p: expected 0 to 1, got 1\.5"):
        sampler.add(2, replace(GREEDY, top_p=1.5), [1])
    assert len(sampler) == 1
    with pytest.raises(ValueError, match=r"expected logits \[1, 503\], got \[1, 504\]"):
        sampler.sample(torch.zeros(1, VOCAB + 1), [1], [0])


@pytest.mark.gpu
def test_the_gpu_chooses_as_the_cpu() -> None:
    """All kinds of requests, fed with the same logits; the GPU's tokens are not waited for between steps."""
    on_cpu, on_gpu = Sampler(VOCAB, eos_token_ids=(EOS,)), Sampler(VOCAB, "cuda", eos_token_ids=(EOS,))
    prompts = all_requests(on_cpu)
    all_requests(on_gpu)
    expected = generate(on_cpu, [list(REQUESTS)] * 12, prompts)
    rows = list(REQUESTS)
    steps = [torch.stack([model(prompts[one], expected[one][:step]) for one in rows]) for step in range(12)]
    on_device = [one.cuda() for one in steps]
    drawn = [on_gpu.sample(logits, rows, [step] * len(rows)).token_ids for step, logits in enumerate(on_device)]
    assert torch.stack(drawn).cpu().T.tolist() == list(expected.values())
