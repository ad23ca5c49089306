"""A real server with the default model, started the way a user starts it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest


@dataclass
class Server:
    """A running `tokenspeed-engine serve`.

    Attributes:
        process: the front end.
        url: its address, without `/v1`.
        lines: everything that it printed so far.
    """

    process: subprocess.Popen[str]
    url: str
    lines: list[str] = field(default_factory=list)

    def metrics(self) -> dict[str, float]:
        """The metrics page as sample -> value."""
        text = httpx.get(f"{self.url}/metrics", timeout=30).text
        samples = (line.rsplit(" ", 1) for line in text.splitlines() if line and not line.startswith("#"))
        return {name: float(value) for name, value in samples}

    def metric(self, name: str) -> float:
        """The sum of all samples of one metric."""
        found = [value for sample, value in self.metrics().items() if sample.split("{")[0] == name]
        assert found, f"/metrics has no {name}"
        return sum(found)

    def wait_for(self, condition: Callable[[], bool], timeout_s: float, what: str) -> float:
        """Poll until `condition` holds; returns the seconds that it took."""
        start = time.monotonic()
        while not condition():
            assert time.monotonic() - start < timeout_s, f"not within {timeout_s} s: {what}\n" + "".join(self.lines[-40:])
            time.sleep(0.05)
        return time.monotonic() - start


def start_server(*arguments: str, timeout_s: float = 180, **environment: str) -> Server:
    """Start a server on a free port and wait until it says that it is ready."""
    process = subprocess.Popen(
        [str(Path(sys.executable).with_name("tokenspeed-engine")), "serve", "--port", "0", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=tempfile.gettempdir(),
        env={**os.environ, **environment},
    )
    server = Server(process, "")
    ready = threading.Event()

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            server.lines.append(line)
            found = re.search(r"http://127\.0\.0\.1:\d+", line)
            if found and not server.url:
                server.url = found.group(0)
                ready.set()
        ready.set()

    threading.Thread(target=read, daemon=True).start()
    assert ready.wait(timeout_s), "the server did not print its address:\n" + "".join(server.lines[-40:])
    assert server.url, f"the server ended with {process.poll()}:\n" + "".join(server.lines[-40:])

    def is_ready() -> bool:
        try:
            return httpx.get(f"{server.url}/readiness", timeout=10).status_code == 200
        except httpx.HTTPError:
            return False

    server.wait_for(is_ready, timeout_s, "readiness")
    return server


def stop_server(server: Server) -> int:
    """SIGTERM, then wait; returns the exit status."""
    if server.process.poll() is None:
        server.process.send_signal(signal.SIGTERM)
        try:
            server.process.wait(60)
        except subprocess.TimeoutExpired:
            server.process.kill()
            server.process.wait(10)
    return server.process.returncode


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """One server with the default model for all tests of a module."""
    running = start_server()
    yield running
    assert stop_server(running) == 0
