"""Conversations in a pool that is too small for them: the same text with and without the tiers behind it, hits from each of them.

The model is real, and so is the server; what is small in the short run is the number of conversations.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

TOPICS = ("Rome", "the moon", "bread", "whales", "Mozart", "glass", "volcanoes", "chess", "bees", "Lisbon")
QUESTIONS = ("Tell me about {}.", "What else?", "Why is that?", "An example?", "Who found out?", "When?", "Where?", "Sum it up.")


def _start(*arguments: str) -> Any:
    """A server as in the other tests of this folder; their conftest is no module that can be imported."""
    spec = importlib.util.spec_from_file_location("e2e_server", Path(__file__).with_name("conftest.py"))
    assert spec is not None and spec.loader is not None
    module = sys.modules.get("e2e_server") or importlib.util.module_from_spec(spec)
    if "e2e_server" not in sys.modules:
        sys.modules["e2e_server"] = module
        spec.loader.exec_module(module)
    return module.start_server(*arguments), module.stop_server


@dataclass
class Conversations:
    """So many conversations, one turn of each at a time.

    Attributes:
        url: of the server.
        count: conversations.
        texts: answers by (conversation, turn).
        details: what the usage says of the prompt, likewise.
        messages: by conversation.
        lines: what the server printed.
    """

    url: str
    count: int
    max_tokens: int
    texts: dict[tuple[int, int], str] = field(default_factory=dict)
    details: dict[tuple[int, int], dict[str, int]] = field(default_factory=dict)
    messages: dict[int, list[dict[str, str]]] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)

    def turn(self, number: int) -> None:
        """Ask the next question in all conversations, four at a time."""
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda index: self._ask(index, number), range(self.count)))

    def _ask(self, index: int, number: int) -> None:
        history = self.messages.setdefault(index, [])
        topic = f"{TOPICS[index % len(TOPICS)]} {index // len(TOPICS)}"
        history.append({"role": "user", "content": QUESTIONS[number % len(QUESTIONS)].format(topic)})
        text, details = self._complete(history)
        self.texts[index, number], self.details[index, number] = text, details
        history.append({"role": "assistant", "content": text})

    def _complete(self, history: list[dict[str, str]]) -> tuple[str, dict[str, int]]:
        body = {"model": "m", "messages": history, "temperature": 0, "max_tokens": self.max_tokens}
        answer = httpx.post(f"{self.url}/v1/chat/completions", json=body, timeout=300).json()
        assert "choices" in answer, answer
        return answer["choices"][0]["message"]["content"], answer["usage"]["prompt_tokens_details"]

    def tokens(self, name: str) -> int:
        """Sum over all turns."""
        return sum(details.get(name, 0) for details in self.details.values())


@dataclass(frozen=True)
class Size:
    """How much is done."""

    conversations: int
    turns: int
    max_tokens: int
    pages: int
    max_len: int

    def run(self, *flags: str, after: Callable[[Any, Conversations], None] | None = None) -> Conversations:
        """All turns through a server of its own; `after` looks at it before it ends."""
        server, stop = _start(
            "--served-model-name", "m", "--num-pages", str(self.pages), "--max-model-len", str(self.max_len), *flags
        )  # fmt: skip
        try:
            done = Conversations(server.url, self.conversations, self.max_tokens)
            for number in range(self.turns):
                done.turn(number)
            if after is not None:
                after(server, done)
        finally:
            status = stop(server)
        assert status == 0, "".join(server.lines[-30:])
        done.lines = server.lines
        return done


SHORT = Size(conversations=4, turns=3, max_tokens=16, pages=14, max_len=192)
LONG = Size(conversations=20, turns=8, max_tokens=24, pages=80, max_len=1024)


@pytest.fixture(scope="module", params=["short", pytest.param("long", marks=pytest.mark.slow)])
def size(request: pytest.FixtureRequest) -> Size:
    return SHORT if request.param == "short" else LONG


@pytest.fixture(scope="module")
def alone(size: Size) -> Conversations:
    """What is answered with the device's cache alone."""
    return size.run()


def _core_of(server: Any) -> psutil.Process:
    (core,) = [one for one in psutil.Process(server.process.pid).children() if "core_process" in " ".join(one.cmdline())]
    return core


@pytest.mark.parametrize("policy", ["write-through", pytest.param("write-back", marks=pytest.mark.slow)])
def test_the_host_gives_back_what_the_device_had_no_room_for(size: Size, alone: Conversations, policy: str) -> None:
    done = size.run("--host-cache-gib", "1", "--host-cache-write-policy", policy)
    assert done.texts == alone.texts
    assert done.tokens("host_cached_tokens") > 0
    assert done.tokens("cached_tokens") > alone.tokens("cached_tokens")


def test_files_outlive_a_core_that_is_killed_and_are_not_trusted(size: Size, alone: Conversations, tmp_path: Path) -> None:
    flags = ("--host-cache-gib", "0.25", "--external-cache", "file", "--external-cache-path", str(tmp_path))

    def kill_and_ask(server: Any, done: Conversations) -> None:
        last = size.turns - 1
        server.wait_for(lambda: _pages_in(tmp_path) > 0, 30, "pages in files")
        time.sleep(0.5)
        os.kill(_core_of(server).pid, signal.SIGKILL)
        server.wait_for(lambda: _readiness(server) != 200, 30, "the core's end to be seen")
        server.wait_for(lambda: _readiness(server) == 200, 120, "a new core")
        again = Conversations(server.url, size.conversations, size.max_tokens, messages=done.messages)
        for index in range(size.conversations):
            text, details = again._complete(done.messages[index][: 2 * last + 1])
            assert text == alone.texts[index, last]
            again.details[index, last] = details
        assert again.tokens("external_cached_tokens") > 0, again.details

    done = size.run(*flags, after=kill_and_ask)
    assert done.texts == alone.texts
    # Every page is damaged: what is read is found out, and computed anew.
    for path in tmp_path.rglob("*.kv"):
        with open(path, "r+b") as file:
            for where in range(1 << 20, path.stat().st_size, 1 << 18):  # entries stand before; a page has more than that
                file.seek(where)
                byte = file.read(1)[0]
                file.seek(where)
                file.write(bytes([byte ^ 0x55]))
    damaged = size.run(*flags)
    assert damaged.texts == alone.texts
    assert any("is damaged and dropped" in line for line in damaged.lines)


def _readiness(server: Any) -> int:
    return httpx.get(f"{server.url}/readiness", timeout=10).status_code


def _pages_in(folder: Path) -> int:
    return sum(path.read_bytes().count(b"TSKVPAGE") for path in folder.rglob("*.kv"))
