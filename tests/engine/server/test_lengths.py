"""Prompts that do not fit are answered at once, with numbers."""

from __future__ import annotations

from typing import Any

import pytest

from tokenspeed_engine.tokenizer import Tokenizer

CHAT_PATH = "/v1/chat/completions"
TEXT_PATH = "/v1/completions"
EXCEEDED = "context_length_exceeded"


def text(**fields: Any) -> dict[str, Any]:
    return {"model": "smollm2", **fields}


async def test_over_long_chat_prompt(server: Any) -> None:
    """Case Z4: a 400 with a code that clients know, not a 500 that they retry."""
    server.says("ok")
    message = {"role": "user", "content": "word " * 9000}
    status, answer = await server.post(CHAT_PATH, text(messages=[message]))
    assert status == 400
    assert answer["error"]["code"] == EXCEEDED
    assert answer["error"]["type"] == "invalid_request_error"
    assert answer["error"]["param"] == "messages"
    assert "8192" in answer["error"]["message"]
    assert "90" in answer["error"]["message"]
    assert server.core.requests == []
    streamed, _ = await server.post(CHAT_PATH, text(messages=[message], stream=True))
    assert streamed == 400
    assert (await server.post(TEXT_PATH, text(prompt="hi")))[0] == 200


async def test_prompt_and_answer_together(make_server: Any) -> None:
    async with make_server(model={"max_model_len": 32}) as server:
        server.says("a b c d e f " * 8)
        prompt = list(range(100, 130))
        status, answer = await server.post(TEXT_PATH, text(prompt=prompt, max_tokens=3))
        assert (status, answer["error"]["code"], answer["error"]["param"]) == (400, EXCEEDED, "max_tokens")
        for number in ("32", "33", "30", "3", "2"):
            assert number in answer["error"]["message"]
        status, answer = await server.post(TEXT_PATH, text(prompt=prompt, max_tokens=2))
        assert (status, answer["usage"]["total_tokens"]) == (200, 32)
        # The default of 16 is nobody's wish: it is cut to the room.
        status, answer = await server.post(TEXT_PATH, text(prompt=prompt))
        assert (status, answer["usage"]["completion_tokens"]) == (200, 2)
        status, answer = await server.post(TEXT_PATH, text(prompt=[*prompt, 130, 131], max_tokens=1))
        assert (status, answer["error"]["code"]) == (400, EXCEEDED)


@pytest.mark.parametrize(("num_tokens", "fits"), [(100, False), (65, False), (64, True), (63, True), (48, True), (10, True)])
async def test_prompt_against_the_page_pool(make_server: Any, num_tokens: int, fits: bool) -> None:
    """Case C1: a pool of 4 pages of 16 under a context of 4096."""
    async with make_server(model={"max_model_len": 4096, "num_pages": 4, "page_size": 16}) as server:
        server.says("x")
        status, answer = await server.post(TEXT_PATH, text(prompt=[100] * num_tokens, max_tokens=1))
        assert status == (200 if fits else 400), answer
        if not fits:
            assert answer["error"]["code"] == EXCEEDED
            assert "64" in answer["error"]["message"]
            assert server.core.requests == []
        assert (await server.post(TEXT_PATH, text(prompt=[100] * 10)))[0] == 200


async def test_one_long_prompt_among_several(server: Any) -> None:
    status, answer = await server.post(TEXT_PATH, text(prompt=["hi", "word " * 9000]))
    assert (status, answer["error"]["code"]) == (400, EXCEEDED)
    assert server.core.requests == []


async def test_what_the_core_refuses_is_a_400(server: Any) -> None:
    from tokenspeed_engine.ipc import RequestRejected

    server.core.script = lambda r: RequestRejected(r.request_id, "never_fits", "needs 9 pages, the pool has 4")
    for stream in (False, True):
        status, answer = await server.post(TEXT_PATH, text(prompt="hi", stream=stream, n=2))
        assert status == 400
        assert answer["error"]["code"] == "never_fits"
        assert answer["error"]["message"] == "needs 9 pages, the pool has 4"


@pytest.mark.parametrize("path", [CHAT_PATH, TEXT_PATH])
async def test_a_prompt_of_megabytes_is_refused_without_tokenizing(
    make_server: Any, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def encode(*_args: object, **_kwargs: object) -> None:
        raise AssertionError("tokenized")

    async with make_server(model={"max_model_len": 4096}) as server:
        monkeypatch.setattr(Tokenizer, "encode", encode)
        words = "word " * 500_000
        fields = {"prompt": words} if path == TEXT_PATH else {"messages": [{"role": "user", "content": words}]}
        status, answer = await server.post(path, text(**fields))
        assert (status, answer["error"]["code"]) == (400, EXCEEDED)
        assert answer["error"]["param"] == next(iter(fields))
        assert "4096 tokens" in answer["error"]["message"]
        assert "the prompt has 2500" in answer["error"]["message"]
