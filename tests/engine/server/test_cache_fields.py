"""`session_id` and `cache_salt`: they reach the core, in their range and where the server can honour them."""

from __future__ import annotations

from typing import Any

import pytest

PATHS = ["/v1/chat/completions", "/v1/completions"]


def body(path: str, **fields: Any) -> dict[str, Any]:
    asked = {"messages": [{"role": "user", "content": "hi"}]} if "chat" in path else {"prompt": "hi"}
    return {"model": "smollm2", "max_tokens": 4, **asked, **fields}


async def error(server: Any, path: str, **fields: Any) -> dict[str, Any]:
    status, answer = await server.post(path, body(path, **fields))
    assert status == 400, answer
    assert server.core.requests == []
    found: dict[str, Any] = answer["error"]
    return found


@pytest.mark.parametrize("path", PATHS)
async def test_they_reach_the_core(server: Any, path: str) -> None:
    server.says("ok")
    for fields in ({}, {"session_id": None, "cache_salt": None}, {"session_id": "s" * 512, "cache_salt": "é" * 128}):
        server.core.requests.clear()
        status, answer = await server.post(path, body(path, **fields))
        assert status == 200, answer
        (request,) = server.core.requests
        assert request.session_id == (fields.get("session_id") or "")
        assert request.cache_salt == (fields.get("cache_salt") or "")


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("session_id", ""),
        ("session_id", "s" * 513),
        ("session_id", 5),
        ("cache_salt", ""),
        ("cache_salt", "é" * 129),
        ("cache_salt", []),
    ],
)
async def test_out_of_range(server: Any, path: str, name: str, value: Any) -> None:
    found = await error(server, path, **{name: value})
    assert found["param"] == name


@pytest.mark.parametrize("path", PATHS)
async def test_a_session_is_one_sequence(server: Any, path: str) -> None:
    found = await error(server, path, session_id="s", n=2)
    assert found["param"] == "session_id"
    assert "2 sequences" in found["message"]
    if "chat" not in path:
        await error(server, path, session_id="s", prompt=["a", "b"])


@pytest.mark.parametrize("path", PATHS)
async def test_a_server_that_keeps_none_says_so(make_server: Any, path: str) -> None:
    async with make_server(model={"keeps_sessions": False}) as server:
        found = await error(server, path, session_id="s")
        assert (found["param"], found["code"]) == ("session_id", "unsupported_parameter")
        server.says("ok")
        status, _ = await server.post(path, body(path, cache_salt="a"))
        assert status == 200


async def test_a_salt_is_not_repeated_in_an_error(server: Any) -> None:
    found = await error(server, PATHS[1], cache_salt="secret" * 60)
    assert "secret" not in found["message"]
