"""Whatever a client sends, it gets an answer that is not a 500, and the next one is served."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tokenspeed_engine.server.protocol import ChatCompletionRequest, CompletionRequest
from tokenspeed_engine.server.refused import CHAT, COMPLETIONS

TEXT_PATH = "/v1/completions"
CHAT_PATH = "/v1/chat/completions"
PATHS: dict[str, tuple[dict[str, Any], Any, Any]] = {
    CHAT_PATH: ({"messages": [{"role": "user", "content": "hi"}]}, ChatCompletionRequest, CHAT),
    TEXT_PATH: ({"prompt": "hi"}, CompletionRequest, COMPLETIONS),
}
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-(2**65), 2**65)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20)
)
JSON = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3), max_leaves=8
)
MESSAGES = st.lists(st.dictionaries(st.sampled_from(["role", "content", "name", "tool_calls", "tool_call_id"]), JSON), max_size=3)
SETTINGS = settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
Run = Callable[[Coroutine[Any, Any, None]], None]


@contextmanager
def running(make_server: Any) -> Iterator[tuple[Any, Run]]:
    """A server in a loop of its own: hypothesis is not asynchronous, so each example runs that loop for a while."""
    with asyncio.Runner() as runner:
        context = make_server()
        server = runner.run(context.__aenter__())
        try:
            yield server, runner.run
        finally:
            runner.run(context.__aexit__(None, None, None))


@st.composite
def bodies(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    path = draw(st.sampled_from(sorted(PATHS)))
    minimal, body_type, refusals = PATHS[path]
    names = st.sampled_from(sorted({*body_type.__struct_fields__, *refusals, "role", "unknown"}))
    return path, {"model": "smollm2", "max_tokens": 2, **minimal, **draw(st.dictionaries(names, JSON, max_size=4))}


async def assert_answered(server: Any, path: str, body: Any) -> None:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with server.http.post(server.url + path, data=raw, headers={"Content-Type": "application/json"}) as response:
        assert response.status in (200, 400, 404), await response.text()
        if response.content_type == "text/event-stream":
            assert (await response.text()).endswith("data: [DONE]\n\n")
        elif response.status != 200:
            answer = await response.json()
            assert set(answer["error"]) == {"message", "type", "param", "code"}
            assert answer["error"]["message"]
    status, answer = await server.post(TEXT_PATH, {"model": "smollm2", "prompt": "hi"})
    assert status == 200, answer
    assert server.client.num_active == 0


def test_any_fields(make_server: Any) -> None:
    with running(make_server) as (server, run):

        @SETTINGS
        @given(request=bodies())
        def check(request: tuple[str, dict[str, Any]]) -> None:
            run(assert_answered(server, *request))

        check()


def test_any_bytes(make_server: Any) -> None:
    with running(make_server) as (server, run):

        @SETTINGS
        @given(path=st.sampled_from(sorted(PATHS)), raw=st.binary(max_size=64) | st.text(max_size=64).map(str.encode))
        def check(path: str, raw: bytes) -> None:
            run(assert_answered(server, path, raw))

        check()


def test_any_messages(make_server: Any) -> None:
    with running(make_server) as (server, run):

        @SETTINGS
        @given(messages=MESSAGES)
        def check(messages: list[Any]) -> None:
            run(assert_answered(server, CHAT_PATH, {"model": "smollm2", "messages": messages, "max_tokens": 2}))

        check()


SNIPPETS = ("Obser", "vation", "a", "🌶", "é", " the", "\n", "User:", "<|im_start|>", "漢", "字 ", "b")


def test_streams_join_to_whole_answers(make_server: Any) -> None:
    """Random outputs, chunkings, stop strings, echo and log-probabilities: `both` compares every field."""
    with running(make_server) as (server, run):
        script = type(server.core.script(None))
        # Whole snippets, and tokens that are parts of characters.
        alphabet = sorted({i for text in SNIPPETS for i in server.pieces(text)})

        @SETTINGS
        @given(
            ids=st.lists(st.sampled_from(alphabet), max_size=14),
            prompt=st.lists(st.sampled_from(alphabet), min_size=1, max_size=5),
            chunks=st.lists(st.integers(1, 4), min_size=1, max_size=4),
            stop=st.lists(st.sampled_from(["Observation", "User", "a the", "é", "漢字", "\n\n"]), max_size=2, unique=True),
            flags=st.fixed_dictionaries(
                {name: st.booleans() for name in ("echo", "include_stop_str_in_output", "skip_special_tokens", "ignore_eos")}
            ),
            logprobs=st.none() | st.integers(0, 3),
        )
        def check(ids: Any, prompt: Any, chunks: Any, stop: Any, flags: Any, logprobs: Any) -> None:
            server.core.script = lambda _: script(ids, chunks)
            body = {"model": "smollm2", "prompt": prompt, "stop": stop, "logprobs": logprobs, "max_tokens": 12, **flags}
            run(joined(server, body))

        async def joined(server: Any, body: dict[str, Any]) -> None:
            choice = (await server.both(TEXT_PATH, body))["choices"][0]
            shown = choice["logprobs"]
            if shown is None:
                return
            offsets = shown["text_offset"]
            assert offsets == sorted(offsets)
            assert all(0 <= offset <= len(choice["text"]) for offset in offsets)
            for offset, token in zip(offsets, shown["tokens"], strict=True):
                hidden = body["skip_special_tokens"] and token.startswith("<|")
                cut = isinstance(choice["stop_reason"], str) and offset + len(token) > len(choice["text"])
                if not (hidden or cut or token.startswith("bytes:")):
                    assert choice["text"].startswith(token, offset), (choice, offset, token)

        check()
