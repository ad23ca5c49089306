"""Nothing is ignored: what is not there is refused by name, what is out of range too, and the next request is served."""

from __future__ import annotations

from typing import Any

import pytest

from tokenspeed_engine.server.protocol import ChatCompletionRequest, CompletionRequest
from tokenspeed_engine.server.refused import CHAT, COMPLETIONS

CHAT_PATH = "/v1/chat/completions"
TEXT_PATH = "/v1/completions"
BODIES: dict[str, dict[str, Any]] = {
    CHAT_PATH: {"model": "smollm2", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4},
    TEXT_PATH: {"model": "smollm2", "prompt": "hi", "max_tokens": 4},
}
# A value that each refused parameter could really come with.
VALUES: dict[str, Any] = {
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
    "tool_choice": "required",
    "functions": [{"name": "f"}],
    "function_call": "auto",
    "parallel_tool_calls": True,
    "response_format": {"type": "json_object"},
    "modalities": ["text", "audio"],
    "audio": {"voice": "alloy", "format": "wav"},
    "prediction": {"type": "content", "content": "x"},
    "reasoning_effort": "high",
    "service_tier": "flex",
    "metadata": {"a": "b"},
    "suffix": "the end",
    "chat_template": "{{ 1 }}",
}


async def refused(server: Any, path: str, param: str, **fields: Any) -> dict[str, Any]:
    status, answer = await server.post(path, {**BODIES[path], **fields})
    assert status == 400, answer
    assert set(answer) == {"error"}
    assert set(answer["error"]) == {"message", "type", "param", "code"}
    assert answer["error"]["type"] == "invalid_request_error"
    assert answer["error"]["param"] == param, answer
    assert answer["error"]["message"]
    assert server.core.requests == []
    error: dict[str, Any] = answer["error"]
    return error


async def served(server: Any, path: str, **fields: Any) -> None:
    status, answer = await server.post(path, {**BODIES[path], **fields})
    assert status == 200, answer
    server.core.requests.clear()


@pytest.mark.parametrize(("path", "table"), [(CHAT_PATH, CHAT), (TEXT_PATH, COMPLETIONS)])
async def test_every_unsupported_parameter_is_refused_by_name(server: Any, path: str, table: Any) -> None:
    server.says("ok")
    for name, refusal in table.items():
        realistic = VALUES.get(name, True if False in refusal.neutral else "x")
        for value in (realistic, {"nested": [1]}):
            error = await refused(server, path, name, **{name: value})
            assert name in error["message"]
            assert error["code"] == "unsupported_parameter"
        for value in refusal.neutral:
            await served(server, path, **{name: value})


def test_no_parameter_is_both_known_and_refused() -> None:
    assert not set(CHAT) & set(ChatCompletionRequest.__struct_fields__)
    assert not set(COMPLETIONS) & set(CompletionRequest.__struct_fields__)


@pytest.mark.parametrize("path", list(BODIES))
async def test_unknown_parameters_are_refused_by_name(server: Any, path: str) -> None:
    server.says("ok")
    for name in ("temprature", "Temperature", "__class__", "n ", "naïve", "x" * 50):
        error = await refused(server, path, name, **{name: 1})
        assert error["code"] == "unknown_parameter"
    await refused(server, path, "stream_options.chunk_size", stream=True, stream_options={"chunk_size": 5})
    await served(server, path)


RANGES: list[tuple[str, Any]] = [
    ("temperature", -0.1),
    ("temperature", 2.1),
    ("temperature", "hot"),
    ("temperature", True),
    ("top_p", -0.1),
    ("top_p", 1.01),
    ("top_k", -2),
    ("top_k", 1.5),
    ("top_k", 10**30),
    ("min_p", -0.1),
    ("min_p", 1.1),
    ("presence_penalty", 2.5),
    ("presence_penalty", -2.5),
    ("frequency_penalty", 2.5),
    ("frequency_penalty", -2.5),
    ("repetition_penalty", 0),
    ("repetition_penalty", 1e-45),
    ("repetition_penalty", -1),
    ("repetition_penalty", 11),
    ("n", 0),
    ("n", -1),
    ("n", 129),
    ("n", 1.0),
    ("seed", 2**63),
    ("seed", -(2**63) - 1),
    ("seed", 1.5),
    ("seed", "7"),
    ("max_tokens", -1),
    ("max_tokens", 2**31),
    ("max_tokens", "many"),
    ("min_tokens", -1),
    ("min_tokens", 5),
    ("stop", ""),
    ("stop", ["a", ""]),
    ("stop", "s" * 513),
    ("stop", [str(i) for i in range(17)]),
    ("stop", 5),
    ("stop", {"a": 1}),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", [49152]),
    ("stop_token_ids", list(range(129))),
    ("stop_token_ids", 2),
    ("logit_bias", {"a": 1}),
    ("logit_bias", {"-1": 1}),
    ("logit_bias", {" 1": 1}),
    ("logit_bias", {"1_0": 1}),
    ("logit_bias", {"49152": 1}),
    ("logit_bias", {"9" * 30: 1}),
    ("logit_bias", {"5": 100.5}),
    ("logit_bias", {"5": -100.5}),
    ("logit_bias", {"5": 1, "05": 1}),
    ("logit_bias", {str(i): 1 for i in range(1025)}),
    ("logit_bias", [1]),
    ("stream", "yes"),
    ("stream_options", {"include_usage": True}),
    ("user", 5),
    ("user", "u" * 513),
    ("safety_identifier", "u" * 513),
    ("ignore_eos", "no"),
    ("skip_special_tokens", 1),
    ("model", 5),
]


@pytest.mark.parametrize("path", list(BODIES))
async def test_values_out_of_range_are_refused_by_name(server: Any, path: str) -> None:
    server.says("ok")
    for name, value in RANGES:
        await refused(server, path, name, **{name: value})
    await served(server, path)


async def test_top_logprobs(server: Any) -> None:
    """Case O3: one bad request is answered, and harms nobody."""
    server.says("ok")
    for fields in (
        {"logprobs": True, "top_logprobs": 1_000_000},
        {"logprobs": True, "top_logprobs": -1},
        {"logprobs": True, "top_logprobs": 21},
        {"logprobs": False, "top_logprobs": 5},
        {"top_logprobs": 5},
        {"logprobs": True, "top_logprobs": 1.5},
    ):
        await refused(server, CHAT_PATH, "top_logprobs", **fields)
        await served(server, CHAT_PATH)
    await refused(server, CHAT_PATH, "logprobs", logprobs=5)
    await served(server, CHAT_PATH, logprobs=True, top_logprobs=20)
    await served(server, CHAT_PATH, logprobs=False, top_logprobs=0)
    for value in (1_000_000, -1, 21, True, "5"):
        await refused(server, TEXT_PATH, "logprobs", logprobs=value)
        await served(server, TEXT_PATH)
    await served(server, TEXT_PATH, logprobs=20)


async def test_top_logprobs_of_a_small_vocabulary(make_server: Any) -> None:
    async with make_server(model={"vocab_size": 10}) as server:
        await refused(server, CHAT_PATH, "top_logprobs", logprobs=True, top_logprobs=11)


async def test_two_names_of_one_limit(server: Any) -> None:
    server.says("ok")
    await refused(server, CHAT_PATH, "max_tokens", max_tokens=5, max_completion_tokens=6)
    await served(server, CHAT_PATH, max_tokens=5, max_completion_tokens=5)
    await refused(server, TEXT_PATH, "max_completion_tokens", max_completion_tokens=5)


async def test_too_many_sequences(server: Any) -> None:
    await refused(server, TEXT_PATH, "prompt", prompt=["x"] * 257)
    await refused(server, TEXT_PATH, "prompt", prompt=["x"] * 100, n=3)


async def test_callers_identifiers_are_logged_and_nothing_else(server: Any, caplog: pytest.LogCaptureFixture) -> None:
    server.says("ok")
    with caplog.at_level("INFO", logger="tokenspeed_engine.server.middleware"):
        await served(server, CHAT_PATH, user="ann\nforged line", safety_identifier="s-1")
    line = next(r.getMessage() for r in caplog.records if "/v1/chat" in r.getMessage())
    assert "user 'ann\\nforged line'" in line
    assert "s-1" in line
