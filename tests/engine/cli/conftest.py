"""The command as a user runs it, over a small random checkpoint with a real tokenizer."""

from __future__ import annotations

import json
import os
import queue
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tokenspeed_engine.checkpoint import default_model_path

COMMAND = (sys.executable, "-P", "-m", "tokenspeed_engine.cli")
READY = re.compile(r"serving (http://\S+)/v1")


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with random weights and the vocabulary of the default model's tokenizer."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=49152, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=8192, tie_word_embeddings=True, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("random-llama")
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def model_flags(checkpoint: Path) -> list[str]:
    """Flags that serve the checkpoint with small limits."""
    return [
        str(checkpoint), "--tokenizer", str(default_model_path()), "--max-model-len", "4096", "--num-pages", "2048",
        "--max-num-batched-tokens", "64", "--num-threads", "1",
    ]  # fmt: skip


class Server:
    """A running `serve`; what it prints is collected."""

    def __init__(self, flags: list[str], environment: dict[str, str] | None = None) -> None:
        self.process = subprocess.Popen(
            [*COMMAND, "serve", *flags, "--port", "0"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=tempfile.gettempdir(),
            env=os.environ | (environment or {}),
        )
        self.lines: list[str] = []
        self._queue: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.url = ""

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            self._queue.put(line)
        self._queue.put(None)

    @property
    def output(self) -> str:
        return "".join(self.lines)

    def wait_for(self, pattern: re.Pattern[str], timeout_s: float = 120.0) -> re.Match[str]:
        deadline = time.monotonic() + timeout_s
        while True:
            line = self._queue.get(timeout=max(deadline - time.monotonic(), 0.01))
            if line is None:
                raise AssertionError(f"the server ended:\n{self.output}")
            if found := pattern.search(line):
                return found

    def wait_ready(self) -> Server:
        self.url = self.wait_for(READY).group(1)
        return self

    def wait_exit(self, timeout_s: float = 60.0) -> int:
        status = self.process.wait(timeout_s)
        self._reader.join(10)
        return status

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self._reader.join(10)
        if self.process.stdout is not None:
            self.process.stdout.close()

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, timeout=30)

    def core_pid(self) -> int:
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        assert len(children) == 1
        return int(children[0])

    def metric(self, name: str) -> float:
        values = [float(line.rsplit(" ", 1)[1]) for line in self.get("/metrics").text.splitlines() if line.startswith(name + " ")]
        assert len(values) == 1, name
        return values[0]

    def body(self, prompt: Any, max_tokens: int, **more: Any) -> dict[str, Any]:
        model = self.get("/v1/models").json()["data"][0]["id"]
        return {"model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True} | more

    def complete(self, prompt: Any, max_tokens: int, **more: Any) -> httpx.Response:
        return httpx.post(self.url + "/v1/completions", json=self.body(prompt, max_tokens, **more), timeout=120)


class StreamReader(threading.Thread):
    """Reads a stream in the background; `events` grows."""

    def __init__(self, server: Server, prompt: Any, max_tokens: int) -> None:
        super().__init__(daemon=True)
        self.server = server
        self.request = server.body(prompt, max_tokens, stream=True, stream_options={"include_usage": True})
        self.events: list[Any] = []
        self.done = False
        self.failure = ""
        self.response: httpx.Response | None = None
        self.start()

    def run(self) -> None:
        try:
            with httpx.stream("POST", self.server.url + "/v1/completions", json=self.request, timeout=120) as response:
                self.response = response
                for line in response.iter_lines():
                    if line == "data: [DONE]":
                        self.done = True
                    elif line.startswith("data: "):
                        self.events.append(json.loads(line[6:]))
        except (httpx.HTTPError, OSError) as error:
            self.failure = repr(error)

    def wait_events(self, number: int) -> None:
        until(lambda: len(self.events) >= number or not self.is_alive(), f"{number} events")
        assert len(self.events) >= number, (self.events, self.failure)

    def finish_reason(self) -> str | None:
        reasons = [choice["finish_reason"] for event in self.events for choice in event.get("choices", ())]
        return reasons[-1] if reasons else None


def until(condition: Callable[[], bool], what: str, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not reached: {what}"
        time.sleep(0.02)


@pytest.fixture
def make_server(model_flags: list[str]) -> Iterator[Callable[..., Server]]:
    """Starts servers; all are ended after the test."""
    servers: list[Server] = []

    def make(*flags: str, environment: dict[str, str] | None = None) -> Server:
        servers.append(Server([*model_flags, *flags], environment))
        return servers[-1]

    yield make
    for server in servers:
        server.close()


@pytest.fixture(scope="module")
def shared_server(model_flags: list[str]) -> Iterator[Server]:
    """One server for the tests of a module that leave it as it was."""
    server = Server(model_flags).wait_ready()
    yield server
    server.terminate()
    status = server.wait_exit()
    server.close()
    assert status == 0, server.output


@pytest.fixture
def open_stream() -> Callable[[Server, Any, int], StreamReader]:
    """Opens a stream in the background."""
    return StreamReader
