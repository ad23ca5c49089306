"""An engine with real processes: client, supervisor, and a core whose executor is scripted."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tokenspeed_engine.checkpoint import default_model_path
from tokenspeed_engine.client import CoreClient
from tokenspeed_engine.config import CacheConfig, CoreConfig, ModelConfig, ProcessConfig, SchedulingConfig
from tokenspeed_engine.metrics import EngineMetrics
from tokenspeed_engine.supervisor import CoreSupervisor
from tokenspeed_engine.tokenizer import Tokenizer, load_tokenizer
from tokenspeed_engine.types import FinishReason, SamplingParams, TextDelta, TokenizedRequest

SCRIPTED = (sys.executable, "-P", str(Path(__file__).with_name("scripted_core.py")))


class Engine:
    """Client and supervisor, wired as the launcher does, with short time limits."""

    def __init__(self, tokenizer: Tokenizer, config: CoreConfig) -> None:
        self.metrics = EngineMetrics()
        self.config = config
        self.client = CoreClient(self.metrics, max_requests=config.scheduling.max_requests)
        self.client.set_tokenizer(tokenizer)
        self.supervisor = CoreSupervisor(config, self.client, command=SCRIPTED)
        self.client.attach(self.supervisor.send)
        self.watch: asyncio.Task[None] | None = None

    async def start(self, wait_ready: bool = True) -> Engine:
        self.watch = await self.supervisor.start()
        if wait_ready:
            await self.ready()
        return self

    async def ready(self) -> None:
        """Wait until requests are taken, or the core's failure."""
        assert self.watch is not None
        ready = asyncio.create_task(self.client.ready.wait())
        await asyncio.wait({ready, self.watch}, timeout=60, return_when=asyncio.FIRST_COMPLETED)
        if self.watch.done():
            ready.cancel()
            self.watch.result()
        assert ready.done(), "not ready within a minute"

    async def stop(self) -> None:
        await self.supervisor.stop()
        assert self.supervisor.core_pid is None

    def request(self, name: str, prompt: list[int], max_tokens: int = 8, **params: Any) -> TokenizedRequest:
        return TokenizedRequest(name, tuple(prompt), SamplingParams(max_tokens=max_tokens, **params))

    async def collect(self, request: TokenizedRequest) -> list[TextDelta]:
        return [delta async for delta in self.client.generate(request)]

    async def tokens(self, name: str, prompt: list[int], max_tokens: int = 8, **params: Any) -> list[int]:
        deltas = await self.collect(self.request(name, prompt, max_tokens, **params))
        assert deltas[-1].finish_reason is not FinishReason.RUNNING
        return [token for delta in deltas for token in delta.token_ids]

    async def until(self, condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
        async with asyncio.timeout(timeout_s):
            while not condition():
                await asyncio.sleep(0.01)


MakeEngine = Callable[..., Awaitable[Engine]]


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return load_tokenizer(default_model_path())


@pytest.fixture
async def make_engine(tokenizer: Tokenizer) -> AsyncIterator[MakeEngine]:
    """Makes engines, and ends them and their cores after the test."""
    engines: list[Engine] = []

    async def make(
        words: str = "",
        *,
        wait_ready: bool = True,
        scheduling: dict[str, Any] | None = None,
        cache: dict[str, Any] | None = None,
        **limits: Any,
    ) -> Engine:
        process = ProcessConfig(
            heartbeat_interval_s=0.05, restart_backoff_s=0.05, restart_backoff_max_s=0.2, startup_timeout_s=60.0
        )
        config = CoreConfig(
            model=ModelConfig(model=words, max_model_len=512),
            cache=CacheConfig(**({"num_pages": 256} | (cache or {}))),
            scheduling=SchedulingConfig(**({"max_num_seqs": 64, "max_queue": 1024} | (scheduling or {}))),
            process=replace(process, **limits),
        )
        engine = Engine(tokenizer, config)
        engines.append(engine)
        return await engine.start(wait_ready)

    yield make
    for engine in engines:
        pid = engine.supervisor.core_pid
        with contextlib.suppress(Exception):
            await engine.stop()
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, 9)
