"""One client's large request does not hold up the streams of the others."""

from __future__ import annotations

import gc
import threading
from typing import Any

import msgspec
import pytest

from tokenspeed_engine.server import Limits, strict_json
from tokenspeed_engine.server.prompts import chat_prompt, encode_completion_prompts
from tokenspeed_engine.server.protocol import ChatCompletionRequest

LIMITS = Limits(inline_encode_chars=100)


class Codec:
    """Notes which thread tokenizes."""

    def __init__(self) -> None:
        self.threads: set[int] = set()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        self.threads.add(threading.get_ident())
        return [len(text)]

    def max_chars(self, num_tokens: int) -> int | None:
        return None

    def apply_chat_template(self, messages: Any, tools: Any = None, add_generation_prompt: bool = True, **kwargs: Any) -> str:
        self.threads.add(threading.get_ident())
        return "short"


@pytest.mark.parametrize(("texts", "inline"), [(["a" * 99], True), (["a" * 101], False), (["a" * 60, "b" * 60], False)])
async def test_all_prompts_of_a_request_count_together(texts: list[str], inline: bool) -> None:
    codec: Any = Codec()
    given = [texts[0], (7, 8), *texts[1:]]
    prompts = await encode_completion_prompts(given, codec, add_special_tokens=True, limits=LIMITS, max_model_len=99)
    assert [prompt.token_ids for prompt in prompts] == [(len(texts[0]),), (7, 8), *((len(text),) for text in texts[1:])]
    assert [prompt.text for prompt in prompts] == [texts[0], None, *texts[1:]]
    assert (codec.threads == {threading.get_ident()}) == inline


@pytest.mark.parametrize("where", ["content", "parts", "arguments", "reasoning_content"])
@pytest.mark.parametrize("num_chars", [10, 200])
async def test_every_text_of_a_chat_counts(where: str, num_chars: int) -> None:
    text = "a" * num_chars
    message: dict[str, Any] = {"role": "assistant", "content": "x"}
    if where == "arguments":
        message["tool_calls"] = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": text}}]
    else:
        message["content" if where == "parts" else where] = [{"type": "text", "text": text}] if where == "parts" else text
    body = msgspec.convert({"model": "m", "messages": [message]}, ChatCompletionRequest)
    codec: Any = Codec()
    prompt = await chat_prompt(body, codec, LIMITS, 99)
    assert prompt.token_ids == (5,)
    # The template runs elsewhere; what it made is short, and is tokenized here.
    assert (codec.threads == {threading.get_ident()}) == (num_chars == 10)


def test_the_collector_rests_while_a_body_is_decoded() -> None:
    """Millions of lists made it run again and again, and all streams waited six times as long."""
    runs: list[str] = []

    def note(phase: str, _: Any) -> None:
        runs.append(phase)

    raw = b"[" + b"[]," * 100_000 + b"1]"
    gc.callbacks.append(note)
    try:
        gc.collect(0)
        runs.clear()
        value = strict_json.decode(raw)
        assert runs.count("start") <= 1, "once afterwards is fine; it was 140 times"
        assert gc.isenabled()
    finally:
        gc.callbacks.remove(note)
    assert len(value) == 100_001
    with pytest.raises(msgspec.DecodeError):
        strict_json.decode(b"{")
    assert gc.isenabled()
