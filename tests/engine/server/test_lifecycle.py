"""Clients that go away or read slowly, a core that fails or dies, draining: the server's part in each."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import openai
import pytest

from tokenspeed_engine.server import EngineStatus, Limits

CHAT_PATH = "/v1/chat/completions"
TEXT_PATH = "/v1/completions"
CHAT = {"model": "smollm2", "messages": [{"role": "user", "content": "hi"}]}
TEXT = {"model": "smollm2", "prompt": "hi", "max_tokens": 64}


class Gate:
    """Lets the core's steps through up to a number, and all of them when opened."""

    def __init__(self, server: Any, steps: int) -> None:
        self.opened = asyncio.Event()
        self._steps = steps
        server.core.before_step = self._wait

    async def _wait(self, _: Any, step: int) -> None:
        if step >= self._steps:
            await self.opened.wait()


async def read_events(response: Any, count: int) -> list[Any]:
    events = []
    while len(events) < count:
        line = (await response.content.readline()).decode().strip()
        if line:
            events.append(line.removeprefix("data: "))
    return events


async def status_of(server: Any, path: str) -> int:
    async with server.http.get(server.url + path) as response:
        return int(response.status)


@pytest.mark.parametrize("fields", [{"stream": True}, {"stream": True, "n": 3}, {"stream": False}, {"stream": False, "n": 3}])
async def test_a_client_that_goes_away_frees_its_requests(server: Any, fields: dict[str, Any]) -> None:
    server.says("word " * 64)
    Gate(server, 4)
    request = asyncio.create_task(server.http.post(server.url + TEXT_PATH, json={**TEXT, **fields}))
    num_choices = fields.get("n", 1)
    await server.core.wait(lambda: len(server.core.requests) == num_choices)
    if fields["stream"]:
        response = await request
        await read_events(response, 2)
        response.close()
    else:
        request.cancel()
    await server.core.wait(lambda: len(server.core.aborted) == num_choices)
    assert server.client.num_active == 0
    assert server.core.finished == []
    server.core.before_step = None
    assert (await server.post(TEXT_PATH, TEXT))[0] == 200


async def test_a_client_that_goes_away_before_the_first_token(server: Any) -> None:
    server.says("word " * 64)
    Gate(server, 0)
    for stream in (False, True):
        server.core.aborted.clear()
        server.core.requests.clear()
        request = asyncio.create_task(server.http.post(server.url + TEXT_PATH, json={**TEXT, "stream": stream}))
        await server.core.wait(lambda: bool(server.core.requests))
        request.cancel()
        await server.core.wait(lambda: bool(server.core.aborted))
    assert server.client.num_active == 0


async def slow_reader(server: Any, body: dict[str, Any]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Send a request and take nothing of its answer but what the smallest buffers hold."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, server.runner.addresses[0][:2])
    reader, writer = await asyncio.open_connection(sock=sock, limit=1024)
    raw = json.dumps(body).encode()
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"
        + f"Content-Length: {len(raw)}\r\n\r\n".encode()
        + raw
    )
    return reader, writer


async def test_a_slow_reader_holds_nothing_up_and_gets_everything(make_server: Any) -> None:
    """While a reader sleeps, the core finishes, and what waits is merged: fewer events, the same text."""
    text = "All work and no play makes a dull stream. " * 200
    async with make_server(send_buffer_bytes=4096) as server:
        server.says(text)
        reader, writer = await slow_reader(server, {**TEXT, "max_tokens": 8000, "stream": True})
        await server.core.wait(lambda: len(server.core.finished) == 1)
        assert (await server.post(TEXT_PATH, TEXT))[0] == 200
        assert server.client.num_active == 1
        await reader.readuntil(b"\r\n\r\n")
        payload = b""
        while size := int((await reader.readline()).strip(), 16):
            payload += await reader.readexactly(size)
            await reader.readexactly(2)
        writer.close()
        events = [line.removeprefix("data: ") for line in payload.decode().split("\n\n") if line]
        assert events[-1] == "[DONE]"
        parsed = [json.loads(event) for event in events[:-1]]
        assert "".join(event["choices"][0]["text"] for event in parsed) == text
        assert len(parsed) < len(server.tokenizer.encode(text)) // 2
        assert server.client.num_active == 0


async def test_a_reader_that_takes_nothing_is_cut_off(make_server: Any, caplog: pytest.LogCaptureFixture) -> None:
    async with make_server(send_buffer_bytes=4096, limits=Limits(write_timeout_s=0.1)) as server:
        server.says("All work and no play makes a dull stream. " * 200)
        _, writer = await slow_reader(server, {**TEXT, "max_tokens": 8000, "stream": True, "n": 3})
        await server.core.wait(lambda: len(server.core.requests) == 3)
        async with asyncio.timeout(20):
            while server.client.num_active:
                await asyncio.sleep(0.02)
        assert "took nothing for 0.1 s" in caplog.text
        writer.close()


async def test_a_sequence_that_fails_ends_its_stream_with_an_error(server: Any) -> None:
    script = type(server.core.script(None))
    ids = server.pieces("one two three")
    server.core.script = lambda _: script(ids, fail_after=2)
    for path, body in ((CHAT_PATH, CHAT), (TEXT_PATH, TEXT)):
        streamed = await server.stream(path, body)
        assert not streamed.done
        assert streamed.events[-1]["error"]["type"] == "server_error"
        assert "NaN" in streamed.events[-1]["error"]["message"]
        status, answer = await server.post(path, body)
        assert status == 500
        assert "NaN" in answer["error"]["message"]
    stream = await server.openai.chat.completions.create(**CHAT, stream=True)
    with pytest.raises(openai.APIError, match="NaN"):
        async for _ in stream:
            pass


async def test_one_choice_that_fails_ends_the_others(server: Any) -> None:
    script = type(server.core.script(None))
    ids = server.pieces("word " * 30)
    server.core.script = lambda r: script(ids, fail_after=1 if r.request_id.endswith("-1") else None)
    Gate(server, 4)
    status, _ = await server.post(TEXT_PATH, {**TEXT, "n": 3})
    assert status == 500
    await server.core.wait(lambda: len(server.core.aborted) == 2)
    assert server.client.num_active == 0


async def test_core_death(server: Any) -> None:
    """Open streams end with an error event, waiting answers with 503, readiness goes red, liveness stays green."""
    server.says("word " * 64)
    Gate(server, 3)
    stream = await server.http.post(server.url + CHAT_PATH, json={**CHAT, "stream": True})
    await read_events(stream, 3)
    whole = asyncio.create_task(server.post(TEXT_PATH, TEXT))
    await server.core.wait(lambda: len(server.core.requests) == 2)
    server.client.on_down("the core was killed by signal 9")

    rest = (await stream.content.read()).decode().strip().split("\n\n")
    assert json.loads(rest[-1].removeprefix("data: "))["error"] == {
        "message": "the core was killed by signal 9",
        "type": "server_error",
        "param": None,
        "code": "engine_dead",
    }
    status, answer = await whole
    assert (status, answer["error"]["code"]) == (503, "engine_dead")
    assert await status_of(server, "/readiness") == 503
    assert await status_of(server, "/health") == 200
    status, answer = await server.post(CHAT_PATH, CHAT)
    assert (status, answer["error"]["code"]) == (503, "engine_dead")

    server.client.on_starting()
    status, answer = await server.post(CHAT_PATH, CHAT)
    assert (status, answer["error"]["code"]) == (503, "engine_starting")


async def test_starting(make_server: Any) -> None:
    async with make_server(ready=False) as server:
        assert server.client.status is EngineStatus.STARTING
        assert await status_of(server, "/health") == 200
        assert await status_of(server, "/metrics") == 200
        assert await status_of(server, "/readiness") == 503
        assert await status_of(server, "/v1/models") == 503
        async with server.http.post(server.url + CHAT_PATH, json=CHAT) as response:
            assert response.status == 503
            assert int(response.headers["Retry-After"]) >= 1
            assert (await response.json())["error"]["code"] == "engine_starting"
    async with make_server(ready=False, served_model_names=("a",)) as server:
        assert await status_of(server, "/v1/models") == 200


async def test_draining(server: Any) -> None:
    """Case M3: running streams end as if nothing happened; new requests go elsewhere."""
    server.says("word " * 64)
    gate = Gate(server, 5)
    stream = await server.http.post(server.url + TEXT_PATH, json={**TEXT, "stream": True})
    await read_events(stream, 5)
    gone = await server.http.post(server.url + TEXT_PATH, json={**TEXT, "stream": True})
    await read_events(gone, 1)
    server.client.begin_drain()

    async with server.http.post(server.url + TEXT_PATH, json=TEXT) as response:
        assert response.status == 503
        assert "Retry-After" in response.headers
        assert response.headers["Connection"] == "close"
        assert (await response.json())["error"]["code"] == "engine_draining"
    assert await status_of(server, "/readiness") == 503
    assert await status_of(server, "/health") == 200
    gone.close()
    await server.core.wait(lambda: len(server.core.aborted) == 1)
    gate.opened.set()
    rest = (await stream.content.read()).decode().strip().split("\n\n")
    assert rest[-1] == "data: [DONE]"
    assert json.loads(rest[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
    async with asyncio.timeout(5):
        await server.client.wait_idle()


async def test_a_full_queue_is_a_429(make_server: Any) -> None:
    async with make_server(max_requests=2) as server:
        server.says("word " * 64)
        gate = Gate(server, 1)
        first = asyncio.create_task(server.post(TEXT_PATH, TEXT))
        await server.core.wait(lambda: len(server.core.requests) == 1)
        for stream in (False, True):
            async with server.http.post(server.url + TEXT_PATH, json={**TEXT, "n": 2, "stream": stream}) as response:
                if response.status == 200:
                    # One of the two choices had already begun to stream.
                    assert '"queue_full"' in await response.text()
                    continue
                assert response.status == 429
                assert int(response.headers["Retry-After"]) >= 1
                error = (await response.json())["error"]
                assert (error["type"], error["code"]) == ("rate_limit_error", "queue_full")
        assert server.client.num_active == 1
        gate.opened.set()
        assert (await first)[0] == 200
        with pytest.raises(openai.RateLimitError):
            await server.openai.completions.create(**TEXT, n=3)


async def test_the_servers_own_gate(make_server: Any) -> None:
    async with make_server(limits=Limits(max_inflight_requests=1)) as server:
        server.says("word")
        gate = Gate(server, 0)
        first = asyncio.create_task(server.post(TEXT_PATH, TEXT))
        await server.core.wait(lambda: len(server.core.requests) == 1)
        status, answer = await server.post(TEXT_PATH, TEXT)
        assert (status, answer["error"]["code"]) == (429, "queue_full")
        assert await status_of(server, "/health") == 200
        gate.opened.set()
        assert (await first)[0] == 200
        assert (await server.post(TEXT_PATH, TEXT))[0] == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_choices_wait_for_the_prompt_that_they_share(server: Any, stream: bool) -> None:
    """The first computes the prompt; the others begin when it is in the prefix cache."""
    server.says("one two three")
    gate = Gate(server, 0)
    prompts = ["a long prompt " * 20, "another long prompt " * 20, "short"]
    body = {**TEXT, "prompt": prompts, "n": 3, "stream": stream}
    response = asyncio.create_task(server.http.post(server.url + TEXT_PATH, json=body))
    # One of each long prompt, and all three of the short one, which fills no page.
    await server.core.wait(lambda: len(server.core.requests) == 5)
    for _ in range(20):
        await asyncio.sleep(0)
    assert len(server.core.requests) == 5
    gate.opened.set()
    answer = await (await response).text()
    assert len(server.core.requests) == 9
    assert answer.count('"finish_reason":"stop"') == 9

    gate.opened.clear()
    server.core.requests.clear()
    scoring = {**TEXT, "prompt": prompts[0], "n": 2, "echo": True, "logprobs": 1}
    response = asyncio.create_task(server.http.post(server.url + TEXT_PATH, json=scoring))
    await server.core.wait(lambda: len(server.core.requests) == 2)
    gate.opened.set()
    assert (await response).status == 200


async def test_a_first_choice_that_fails_starts_no_other(server: Any) -> None:
    script = type(server.core.script(None))
    server.core.script = lambda _: script((), fail_after=0)
    assert (await server.post(TEXT_PATH, {**TEXT, "prompt": "a long prompt " * 20, "n": 3}))[0] == 500
    assert len(server.core.requests) == 1
    assert server.client.num_active == 0
