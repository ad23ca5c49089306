"""`/v1/chat/completions`: answers, streams, roles, choices, log-probabilities."""

from __future__ import annotations

from typing import Any

import pytest

PATH = "/v1/chat/completions"
QUESTION = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "smollm2", "messages": QUESTION, **fields}


async def test_official_client_whole(server: Any) -> None:
    server.says("The capital of France is Paris.")
    answer = await server.openai.chat.completions.create(**body(temperature=0))
    assert answer.choices[0].message.content == "The capital of France is Paris."
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.object == "chat.completion"
    assert answer.model == "smollm2"
    assert answer.id.startswith("chatcmpl-")
    assert answer.system_fingerprint.startswith("fp_")
    # The number that llama.cpp and transformers give for this prompt.
    assert answer.usage.prompt_tokens == 42
    assert answer.usage.completion_tokens == 8
    assert answer.usage.total_tokens == 50


async def test_official_client_stream(server: Any) -> None:
    server.says("The capital of France is Paris.")
    stream = await server.openai.chat.completions.create(**body(stream=True, stream_options={"include_usage": True}))
    chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert all(chunk.choices[0].delta.role is None for chunk in chunks[1:-1])
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == "The capital of France is Paris."
    assert [c.choices[0].finish_reason for c in chunks[:-1]] == [None] * (len(chunks) - 2) + ["stop"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage.prompt_tokens == 42
    assert len({chunk.id for chunk in chunks}) == 1
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}


async def test_stream_without_usage_has_no_usage(server: Any) -> None:
    server.says("Yes.")
    streamed = await server.stream(PATH, body())
    assert streamed.done
    assert all("usage" not in event for event in streamed.events)
    assert all(event["choices"] for event in streamed.events)


@pytest.mark.parametrize("chunks", [(1,), (2, 1, 3), (64,)])
async def test_stream_joins_to_whole(server: Any, chunks: tuple[int, ...]) -> None:
    text = "Zwölf 🌶️ Boxkämpfer, 👩‍👩‍👧 und 漢字 jagen.\n\tEnde"
    server.says(text, chunks)
    whole = await server.both(PATH, body(logprobs=True, top_logprobs=2))
    choice = whole["choices"][0]
    assert choice["message"]["content"] == text
    content = choice["logprobs"]["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in content) == text.encode()
    assert all(len(entry["top_logprobs"]) == 2 for entry in content)
    assert all(entry["top_logprobs"][0]["logprob"] >= entry["logprob"] for entry in content)


async def test_logprobs_without_top(server: Any) -> None:
    server.says("Paris")
    whole = await server.both(PATH, body(logprobs=True))
    assert [e["top_logprobs"] for e in whole["choices"][0]["logprobs"]["content"]] == [[]]
    assert (await server.both(PATH, body()))["choices"][0]["logprobs"] is None


async def test_max_tokens_ends_with_length(server: Any) -> None:
    server.says("one two three four five")
    for name in ("max_tokens", "max_completion_tokens"):
        whole = await server.both(PATH, body(logprobs=True, **{name: 3}))
        assert whole["choices"][0]["finish_reason"] == "length"
        assert whole["choices"][0]["stop_reason"] is None
        assert whole["choices"][0]["message"]["content"] == "one two three"
        assert whole["usage"]["completion_tokens"] == 3
        assert len(whole["choices"][0]["logprobs"]["content"]) == 3
    assert server.core.requests[-1].params.max_tokens == 3


async def test_default_max_tokens_is_the_rest_of_the_context(make_server: Any) -> None:
    async with make_server(model={"max_model_len": 100}) as server:
        server.says("hi " * 200)
        whole = await server.both(PATH, body())
        assert whole["choices"][0]["finish_reason"] == "length"
        assert whole["usage"]["total_tokens"] == 100


async def test_choices_have_their_own_seeds(server: Any) -> None:
    words = [server.pieces(word) for word in ("zero", "one", "two")]
    script = type(server.core.script(None))
    server.core.script = lambda request: script(words[request.params.seed - 7])
    whole = await server.both(PATH, body(n=3, seed=7, logprobs=True))
    assert [c["message"]["content"] for c in whole["choices"]] == ["zero", "one", "two"]
    assert [r.params.seed for r in server.core.requests[:3]] == [7, 8, 9]
    assert len({r.request_id for r in server.core.requests}) == 6
    assert len({r.prompt_token_ids for r in server.core.requests}) == 1
    # A prompt counts once, however many choices it has.
    assert whole["usage"]["prompt_tokens"] == 42


async def test_a_seed_is_drawn_when_none_is_given(server: Any) -> None:
    server.says("x")
    for _ in range(4):
        await server.post(PATH, body())
    assert len({r.params.seed for r in server.core.requests}) == 4
    await server.post(PATH, body(seed=-1))
    assert 0 <= server.core.requests[-1].params.seed < 2**63


async def test_the_servers_seed_decides_those_that_are_drawn(make_server: Any) -> None:
    drawn = []
    for seed in (5, 5, 6, 0, 0):
        async with make_server(seed=seed) as server:
            server.says("x")
            await server.post(PATH, body(seed=3))  # takes none
            for _ in range(3):
                await server.post(PATH, body())
            drawn.append(tuple(r.params.seed for r in server.core.requests[1:]))
    assert drawn[0] == drawn[1]
    assert len(set(drawn)) == 4


async def test_usage_reports_cached_tokens(server: Any) -> None:
    script = type(server.core.script(None))
    server.core.script = lambda request: script((), cached=32 if request.request_id.endswith("-1") else 16)
    _, answer = await server.post(PATH, body(n=2))
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 16, "host_cached_tokens": 0, "external_cached_tokens": 0}


async def test_parameters_reach_the_engine(server: Any) -> None:
    server.says("x")
    fields = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.05,
        "presence_penalty": 1.5,
        "frequency_penalty": -1.5,
        "repetition_penalty": 1.1,
        "seed": 123,
        "min_tokens": 2,
        "max_tokens": 9,
        "stop": ["END", "\n\n"],
        "stop_token_ids": [7, 8],
        "ignore_eos": True,
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
    }
    status, answer = await server.post(PATH, body(logit_bias={"5": 1, "6": -100}, **fields))
    assert status == 200, answer
    params = server.core.requests[-1].params
    for name, value in fields.items():
        assert getattr(params, name) == (tuple(value) if isinstance(value, list) else value), name
    assert dict(params.logit_bias) == {5: 1.0, 6: -100.0}


async def test_null_is_not_given(server: Any) -> None:
    server.says("x")
    nulls = dict.fromkeys(("temperature", "stop", "n", "tools", "response_format", "logprobs", "user", "no_such_field"))
    status, answer = await server.post(PATH, body(**nulls))
    assert status == 200, answer
    assert server.core.requests[-1].params.temperature == 1.0


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"top_k": -1}, {"top_k": 0}),
        ({"top_k": 10**6}, {"top_k": 0}),
        ({"top_p": 0}, {"top_p": 1.0, "top_k": 1}),
        ({"stop": "a"}, {"stop": ("a",)}),
        ({"stop": []}, {"stop": ()}),
        ({"stop": ["a", "a"]}, {"stop": ("a",)}),
    ],
)
async def test_equivalent_values(server: Any, fields: dict[str, Any], expected: dict[str, Any]) -> None:
    server.says("x")
    assert (await server.post(PATH, body(**fields)))[0] == 200
    for name, value in expected.items():
        assert getattr(server.core.requests[-1].params, name) == value


async def prompt_of(server: Any, messages: list[dict[str, Any]], **fields: Any) -> str:
    status, answer = await server.post(PATH, body(messages=messages, **fields))
    assert status == 200, answer
    text: str = server.tokenizer.decode(server.core.requests[-1].prompt_token_ids, skip_special_tokens=False)
    return text


async def test_roles_and_content_arrays(server: Any) -> None:
    parts = [{"type": "text", "text": "first"}, {"type": "text", "text": "second"}]
    prompt = await prompt_of(
        server,
        [
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": parts, "name": "ann"},
            {
                "role": "assistant",
                "content": None,
                "refusal": None,
                "annotations": [],
                "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}],
            },
            {"role": "tool", "content": "42", "tool_call_id": "c1"},
            {"role": "assistant", "content": "done", "tool_calls": []},
            {"role": "user", "content": "thanks"},
        ],
    )
    assert "<|im_start|>system\nBe brief.<|im_end|>" in prompt
    assert "<|im_start|>user\nfirst\nsecond<|im_end|>" in prompt
    assert "<|im_start|>tool\n42<|im_end|>" in prompt
    assert prompt.endswith("<|im_start|>user\nthanks<|im_end|>\n<|im_start|>assistant\n")


async def test_add_generation_prompt(server: Any) -> None:
    assert (await prompt_of(server, QUESTION, add_generation_prompt=False)).endswith("<|im_end|>\n")


@pytest.mark.parametrize(
    ("messages", "param", "code"),
    [
        ([], "messages", "invalid_value"),
        ("hi", "messages", "invalid_value"),
        ([1], "messages[0]", "invalid_value"),
        ([{"content": "x"}], "messages[0].role", "missing_required_parameter"),
        ([{"role": "robot", "content": "x"}], "messages[0].role", "invalid_value"),
        ([{"role": "user"}], "messages[0].content", "invalid_value"),
        ([*QUESTION, {"role": "user", "content": 5}], "messages[1].content", "invalid_value"),
        ([{"role": "user", "content": []}], "messages[0].content", "invalid_value"),
        ([{"role": "user", "content": "x", "weight": 1}], "messages[0].weight", "unknown_parameter"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}],
            "messages[0].content[0].type",
            "unsupported_content",
        ),
        (
            [{"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "input_audio"}]}],
            "messages[0].content[1].type",
            "unsupported_content",
        ),
        ([{"role": "tool", "content": "x"}], "messages[0].tool_call_id", "missing_required_parameter"),
        ([{"role": "user", "content": "x", "tool_call_id": "c"}], "messages[0].tool_call_id", "invalid_value"),
        ([{"role": "assistant", "content": None}], "messages[0].content", "invalid_value"),
    ],
)
async def test_bad_messages(server: Any, messages: Any, param: str, code: str) -> None:
    status, answer = await server.post(PATH, body(messages=messages))
    assert status == 400
    assert answer["error"]["param"] == param, answer
    assert answer["error"]["code"] == code, answer
    assert answer["error"]["type"] == "invalid_request_error"
    assert server.core.requests == []


async def test_a_template_that_refuses_is_a_400(server: Any) -> None:
    status, answer = await server.post(PATH, body(chat_template_kwargs={"self": 1}))
    assert (status, answer["error"]["param"]) == (400, "chat_template_kwargs.self")
    status, answer = await server.post(PATH, body(chat_template_kwargs={"enable_thinking": False}))
    assert status == 200, answer


async def test_an_unknown_model_is_a_404(server: Any) -> None:
    status, answer = await server.post(PATH, body(model="gpt-4"))
    assert status == 404
    assert answer["error"]["code"] == "model_not_found"
    assert answer["error"]["param"] == "model"
    assert "smollm2" in answer["error"]["message"]
