"""HTTP itself: routes, methods, bodies, keys, probes, ids; every error in one shape."""

from __future__ import annotations

import asyncio
import gzip
import json
from typing import Any

import pytest

from tokenspeed_engine.server import Limits

CHAT_PATH = "/v1/chat/completions"
CHAT = {"model": "smollm2", "messages": [{"role": "user", "content": "hi"}]}


def assert_error(answer: Any, error_type: str, code: str | None) -> None:
    assert set(answer) == {"error"}
    assert set(answer["error"]) == {"message", "type", "param", "code"}
    assert answer["error"]["type"] == error_type, answer
    assert answer["error"]["code"] == code, answer
    assert answer["error"]["message"]


async def test_unknown_routes_and_methods(server: Any) -> None:
    async with server.http.get(f"{server.url}/v1/embeddings") as response:
        assert response.status == 404
        assert_error(await response.json(), "invalid_request_error", "unknown_url")
    async with server.http.get(server.url + CHAT_PATH) as response:
        assert response.status == 405
        assert response.headers["Allow"] == "POST"
        assert_error(await response.json(), "invalid_request_error", "method_not_allowed")
    async with server.http.delete(f"{server.url}/v1/models") as response:
        assert response.status == 405


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"nothing",
        b"[]",
        b"null",
        b'"text"',
        b"5",
        b"\xff\xfe",
        b'{"model": NaN}',
        b'{"model": "smollm2",}',
        b'{"model": "smollm2"} trailing',
        b'{"model": "\\ud800"}',
        b'{"model": 1e999}',
        b"[" * 100_000,
        b'{"messages":' + b"[" * 100_000,
        b'{"a":' * 100_000,
    ],
)
async def test_malformed_bodies(server: Any, raw: bytes) -> None:
    for path in (CHAT_PATH, "/v1/completions"):
        status, answer = await server.post(path, raw)
        assert status == 400
        assert_error(answer, "invalid_request_error", "invalid_json")


async def test_body_over_the_limit(make_server: Any) -> None:
    async with make_server(max_body_bytes=2048) as server:
        server.says("ok")
        body = {**CHAT, "messages": [{"role": "user", "content": "x" * 4096}]}
        status, answer = await server.post(CHAT_PATH, body)
        assert status == 413
        assert_error(answer, "invalid_request_error", "request_too_large")
        assert "2048" in answer["error"]["message"]

        async def chunks() -> Any:
            yield json.dumps(body).encode()

        # Without a Content-Length the size shows only while reading.
        async with server.http.post(
            server.url + CHAT_PATH, data=chunks(), headers={"Content-Type": "application/json"}
        ) as response:
            assert response.status == 413
            assert_error(await response.json(), "invalid_request_error", "request_too_large")
        assert (await server.post(CHAT_PATH, CHAT))[0] == 200


async def test_compressed_bodies(make_server: Any) -> None:
    async with make_server(max_body_bytes=100_000) as server:
        server.says("ok")
        gzipped = {"Content-Encoding": "gzip"}
        assert (await server.post(CHAT_PATH, gzip.compress(json.dumps(CHAT).encode()), headers=gzipped))[0] == 200
        bomb = gzip.compress(b" " * 50_000_000)
        assert len(bomb) < 100_000
        status, answer = await server.post(CHAT_PATH, bomb, headers=gzipped)
        assert status == 413
        assert_error(answer, "invalid_request_error", "request_too_large")
        status, answer = await server.post(CHAT_PATH, b"not gzip", headers=gzipped)
        assert status == 400
        assert (await server.post(CHAT_PATH, CHAT))[0] == 200


async def test_bodies_of_all_requests_together(make_server: Any) -> None:
    async with make_server(max_body_bytes=100_000, limits=Limits(max_inflight_body_bytes=1)) as server:
        server.says("ok")
        opened = asyncio.Event()

        async def wait(*_: Any) -> None:
            await opened.wait()

        server.core.before_step = wait
        large = {**CHAT, "messages": [{"role": "user", "content": " " * 60_000}]}
        first = asyncio.create_task(server.post(CHAT_PATH, large))
        await server.core.wait(lambda: len(server.core.requests) == 1)
        status, answer = await server.post(CHAT_PATH, large)
        assert status == 429
        assert_error(answer, "rate_limit_error", "queue_full")
        opened.set()
        assert (await first)[0] == 200
        assert (await server.post(CHAT_PATH, large))[0] == 200


async def test_body_that_does_not_arrive(make_server: Any) -> None:
    async with make_server(limits=Limits(body_timeout_s=0.05)) as server:
        host, port = server.runner.addresses[0][:2]
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(
            f"POST {CHAT_PATH} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{{".encode()
        )
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 408")
        writer.close()


async def test_content_types(server: Any) -> None:
    server.says("ok")
    raw = json.dumps(CHAT).encode()
    for kind, expected in (
        ("application/json; charset=utf-8", 200),
        ("application/vnd.api+json", 200),
        ("text/plain", 415),
        ("application/x-www-form-urlencoded", 415),
        ("application/json; charset=utf-16", 415),
    ):
        status, answer = await server.post(CHAT_PATH, raw, headers={"Content-Type": kind})
        assert status == expected, kind
        if status != 200:
            assert_error(answer, "invalid_request_error", "unsupported_media_type")


async def test_api_keys(make_server: Any) -> None:
    async with make_server(api_keys=("sk-one", "sk-two")) as server:
        server.says("ok")
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "sk-one"}, {"Authorization": "Basic sk-one"}):
            for path in (CHAT_PATH, "/v1/completions", "/v1/nothing"):
                status, answer = await server.post(path, CHAT, headers=headers)
                assert status == 401
                assert_error(answer, "authentication_error", "invalid_api_key")
            async with server.http.get(f"{server.url}/v1/models", headers=headers) as response:
                assert response.status == 401
                assert response.headers["WWW-Authenticate"] == "Bearer"
        for key in ("sk-one", "sk-two"):
            assert (await server.post(CHAT_PATH, CHAT, headers={"Authorization": f"Bearer {key}"}))[0] == 200
        assert (await server.openai.chat.completions.create(**CHAT)).choices[0].message.content == "ok"
        # Probes and scrapers have no keys.
        for path in ("/health", "/readiness", "/metrics"):
            async with server.http.get(server.url + path) as response:
                assert response.status == 200


async def test_models(make_server: Any) -> None:
    async with make_server(served_model_names=("a", "org/b")) as server:
        server.says("ok")
        names = [model.id async for model in await server.openai.models.list()]
        assert names == ["a", "org/b"]
        model = await server.openai.models.retrieve("org/b")
        assert (model.id, model.object, model.max_model_len) == ("org/b", "model", 8192)
        for name in names:
            assert (await server.post(CHAT_PATH, {**CHAT, "model": name}))[1]["model"] == name
        assert (await server.post(CHAT_PATH, CHAT))[0] == 404
        async with server.http.get(f"{server.url}/v1/models/c") as response:
            assert response.status == 404
            assert_error(await response.json(), "invalid_request_error", "model_not_found")


async def test_request_ids(server: Any) -> None:
    server.says("ok")
    url = server.url + CHAT_PATH
    for body in (CHAT, {**CHAT, "stream": True}, {**CHAT, "n": 0}):
        async with server.http.post(url, json=body, headers={"X-Request-Id": "my-id"}) as response:
            assert response.headers["X-Request-Id"] == "my-id"
            assert response.headers["Server"] == "tokenspeed-engine"
        async with server.http.post(url, json=body) as one, server.http.post(url, json=body) as other:
            assert one.headers["X-Request-Id"] != other.headers["X-Request-Id"]
    async with server.http.post(url, json=CHAT, headers={"X-Request-Id": "x" * 600}) as response:
        assert response.headers["X-Request-Id"] != "x" * 600


async def test_probes_and_metrics(server: Any) -> None:
    server.says("ok")
    await server.post(CHAT_PATH, CHAT)
    for path in ("/health", "/readiness"):
        async with server.http.get(server.url + path) as response:
            assert response.status == 200
            assert (await response.json())["status"] in ("ok", "ready")
    async with server.http.get(f"{server.url}/metrics") as response:
        assert response.status == 200
        assert response.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        assert "tokenspeed:" in await response.text()


async def test_a_fault_of_ours_is_a_500_without_its_cause(server: Any, caplog: pytest.LogCaptureFixture) -> None:
    server.core.send = None
    server.client._send = None  # the client itself breaks
    status, answer = await server.post(CHAT_PATH, CHAT)
    assert status == 500
    assert_error(answer, "server_error", "internal_error")
    assert "NoneType" not in answer["error"]["message"]
    assert "NoneType" in caplog.text
    async with server.http.get(f"{server.url}/health") as response:
        assert response.status == 200


async def test_answers_do_not_quote_megabytes(server: Any) -> None:
    huge = "x" * 1_000_000
    for body in (
        {**CHAT, huge: 1},
        {**CHAT, "model": huge},
        {**CHAT, "messages": [{"role": huge, "content": "hi"}]},
        {**CHAT, "user": huge},
    ):
        status, answer = await server.post(CHAT_PATH, body)
        assert status in (400, 404)
        assert len(json.dumps(answer)) < 5000


async def test_a_path_cannot_forge_log_lines(server: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="tokenspeed_engine.server.middleware"):
        async with server.http.get(f"{server.url}/v1/a%0AFORGED") as response:
            assert response.status == 404
    assert "a%0AFORGED" in caplog.text
    assert "\nFORGED" not in caplog.text


async def test_a_content_encoding_that_nobody_decodes_is_refused(server: Any) -> None:
    status, answer = await server.post(CHAT_PATH, CHAT, headers={"Content-Encoding": "rot13"})
    assert status == 415
    assert_error(answer, "invalid_request_error", "unsupported_media_type")
    assert "rot13" in answer["error"]["message"]
    assert (await server.post(CHAT_PATH, CHAT, headers={"Content-Encoding": "identity"}))[0] == 200


@pytest.mark.parametrize(
    "raw",
    [
        b"GET \xff\xfe HTTP/1.1\r\nHost: x\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nContent-Encoding: gzip\r\n\r\nabc",
    ],
)
async def test_broken_http_is_one_line_in_the_log(server: Any, raw: bytes, caplog: pytest.LogCaptureFixture) -> None:
    host, port = server.runner.addresses[0][:2]
    with caplog.at_level("INFO"):
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(raw)
        answer = await asyncio.wait_for(reader.read(), 20)
        writer.close()
    assert b" 400 " in answer.split(b"\r\n")[0]
    records = [record for record in caplog.records if record.name.endswith("http_log")]
    assert records
    for record in records:
        assert record.levelname == "INFO"
        assert record.exc_info is None
        assert record.getMessage().startswith("a client sent what is no HTTP: ")
        assert "\n" not in record.getMessage()
