"""`priority`, and whose share a request uses: what reaches the core."""

from __future__ import annotations

from typing import Any

import pytest

PATHS = ["/v1/chat/completions", "/v1/completions"]


def body(path: str, **fields: Any) -> dict[str, Any]:
    asked = {"messages": [{"role": "user", "content": "hi"}]} if "chat" in path else {"prompt": "hi"}
    return {"model": "smollm2", "max_tokens": 4, **asked, **fields}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("given", "expected"), [({}, 0), ({"priority": None}, 0), ({"priority": -100}, -100), ({"priority": 7}, 7)]
)
async def test_priority_reaches_the_core(server: Any, path: str, given: dict[str, Any], expected: int) -> None:
    server.says("ok")
    status, answer = await server.post(path, body(path, **given))
    assert status == 200, answer
    (request,) = server.core.requests
    assert request.priority == expected


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("value", [101, -101, 2**40, 0.5, "high", True])
async def test_other_priorities_are_refused(server: Any, path: str, value: Any) -> None:
    status, answer = await server.post(path, body(path, priority=value))
    assert status == 400, answer
    assert answer["error"]["param"] == "priority"
    assert server.core.requests == []


@pytest.mark.parametrize("path", PATHS)
async def test_without_keys_each_user_is_a_tenant(server: Any, path: str) -> None:
    server.says("ok")
    for user in ({}, {"user": "ann"}, {"user": "bob"}, {"user": "ann"}):
        await server.post(path, body(path, **user))
    none, ann, bob, again = (request.tenant for request in server.core.requests)
    assert none == ""
    assert ann == again
    assert len({none, ann, bob}) == 3


async def test_with_several_keys_each_is_a_tenant_whatever_user_says(make_server: Any) -> None:
    async with make_server(api_keys=("one", "two")) as server:
        server.says("ok")
        for key, user in (("one", "ann"), ("one", "bob"), ("two", "ann")):
            status, answer = await server.post(PATHS[1], body(PATHS[1], user=user), headers={"Authorization": f"Bearer {key}"})
            assert status == 200, answer
        first, second, third = (request.tenant for request in server.core.requests)
        assert first == second != third
        assert "one" not in first
        assert "two" not in third
