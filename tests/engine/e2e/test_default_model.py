"""The default model over the OpenAI API, through the official client."""

from __future__ import annotations

import json
import re
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import openai
import pytest

QUESTION = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
ANSWER = "The capital of France is Paris."
LONG = [{"role": "user", "content": "Tell me a very long story about a lighthouse, a storm and a ship."}]


@pytest.fixture
def client(server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120)


@pytest.fixture
def model(client: openai.OpenAI) -> str:
    return client.models.list().data[0].id


def test_answer(client: openai.OpenAI, model: str) -> None:
    completion = client.chat.completions.create(model=model, messages=QUESTION, temperature=0, max_tokens=40)
    assert completion.choices[0].message.content == ANSWER
    assert completion.choices[0].finish_reason == "stop"
    assert completion.usage is not None
    assert completion.usage.prompt_tokens == 42
    assert completion.usage.total_tokens == 42 + completion.usage.completion_tokens


def test_the_line_of_the_readme_gets_an_answer(server, repository: Path) -> None:
    found = re.search(r"^    (curl .*\n.*\}')$", (repository / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert found is not None
    line = found.group(1).replace("http://127.0.0.1:8000", server.url)
    assert server.url in line
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=120, check=True)
    assert json.loads(done.stdout)["choices"][0]["message"]["content"] == ANSWER, done.stdout


def test_streamed_answer(client: openai.OpenAI, model: str) -> None:
    stream = client.chat.completions.create(
        model=model, messages=QUESTION, temperature=0, max_tokens=40, stream=True, stream_options={"include_usage": True}
    )
    text, finish, usage, deltas = "", None, None, 0
    for chunk in stream:
        if chunk.usage is not None:
            usage = chunk.usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            deltas += bool(choice.delta.content)
            finish = choice.finish_reason or finish
    assert (text, finish) == (ANSWER, "stop")
    assert usage is not None and usage.prompt_tokens == 42
    assert deltas >= 5, "the answer was not streamed token by token"


def test_the_second_turn_hits_the_prefix_cache(client: openai.OpenAI, model: str) -> None:
    messages = [*QUESTION, {"role": "assistant", "content": ANSWER}, {"role": "user", "content": "And of Italy?"}]
    first = client.chat.completions.create(model=model, messages=messages, temperature=0, max_tokens=12)
    again = client.chat.completions.create(model=model, messages=messages, temperature=0, max_tokens=12)
    assert first.choices[0].message.content == again.choices[0].message.content
    assert again.usage is not None and again.usage.prompt_tokens_details is not None
    cached = again.usage.prompt_tokens_details.cached_tokens
    assert cached is not None and 0 < cached < again.usage.prompt_tokens
    assert cached >= again.usage.prompt_tokens - 17, "all but the last page should come from the cache"


def test_seeded_sampling_repeats_and_other_seeds_differ(client: openai.OpenAI, model: str) -> None:
    def sample(seed: int) -> str | None:
        return (
            client.completions.create(model=model, prompt="Once upon a time", temperature=1.0, seed=seed, max_tokens=24)
            .choices[0]
            .text
        )

    with ThreadPoolExecutor(4) as pool:
        texts = list(pool.map(sample, [7, 7, 8, 9]))
    assert texts[0] == texts[1] == sample(7)
    assert len(set(texts)) == 3


def test_n_choices_share_the_prompt(client: openai.OpenAI, model: str) -> None:
    completion = client.chat.completions.create(model=model, messages=LONG, temperature=1.0, seed=1, n=3, max_tokens=8)
    assert [choice.index for choice in completion.choices] == [0, 1, 2]
    assert completion.usage is not None and completion.usage.completion_tokens == 24
    assert len({choice.message.content for choice in completion.choices}) == 3


def test_sixteen_at_once_answer_as_one_alone(client: openai.OpenAI, model: str) -> None:
    prompts = [f"Count from {i} to {i + 5}:" for i in range(16)]

    def greedy(prompt: str) -> str:
        return client.completions.create(model=model, prompt=prompt, temperature=0, max_tokens=16).choices[0].text

    alone = [greedy(prompt) for prompt in prompts]
    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(greedy, prompts)) == alone


def test_logprobs_of_prompt_and_answer(client: openai.OpenAI, model: str) -> None:
    completion = client.completions.create(
        model=model, prompt="The capital of France is", temperature=0, max_tokens=3, logprobs=2, echo=True
    )
    choice = completion.choices[0]
    assert choice.text.startswith("The capital of France is")
    assert choice.logprobs is not None
    values = choice.logprobs.token_logprobs
    assert values is not None and values[0] is None and all(v is not None and v <= 0 for v in values[1:])
    assert choice.logprobs.text_offset is not None and choice.logprobs.tokens is not None
    position = 0
    for offset, token in zip(choice.logprobs.text_offset, choice.logprobs.tokens, strict=True):
        assert offset == position
        position += len(token)


def test_a_client_that_goes_away_frees_its_pages(server) -> None:
    def owned() -> float:
        return server.metrics()['tokenspeed:kv_cache_pages{state="owned"}']

    model = httpx.get(f"{server.url}/v1/models", timeout=30).json()["data"][0]["id"]
    body = {"messages": LONG, "model": model, "max_tokens": 2000, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body, timeout=60) as response:
        assert response.status_code == 200
        lines = response.iter_lines()  # kept: the connection is closed with the iterator
        for _ in range(9):
            next(lines)
        assert owned() > 0
    gone = time.monotonic()
    server.wait_for(lambda: owned() == 0, 10, "pages of the client that went away")
    assert time.monotonic() - gone < 1.5  # a second, and the time that polling takes


def test_what_is_not_supported_is_refused_by_name(client: openai.OpenAI, model: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model=model, messages=QUESTION, tools=[{"type": "function", "function": {"name": "f"}}])
    assert refused.value.param == "tools"
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model=model, prompt="word " * 9000, max_tokens=1)
    assert refused.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="no-such-model", prompt="a", max_tokens=1)


def test_health_and_metrics_are_open(server) -> None:
    assert httpx.get(f"{server.url}/health", timeout=30).status_code == 200
    assert httpx.get(f"{server.url}/readiness", timeout=30).status_code == 200
    assert "tokenspeed" in httpx.get(f"{server.url}/metrics", timeout=30).text
    assert httpx.get(f"{server.url}/v1/models", timeout=30).json()["object"] == "list"
