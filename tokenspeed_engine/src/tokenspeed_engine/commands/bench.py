"""`tokenspeed-engine bench`: concurrent streams against a server; time to first token, time between tokens, throughput."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import os
import random
import re
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass, field

import aiohttp

from tokenspeed_engine.config import ConfigError, given_flags
from tokenspeed_engine.launch import EXIT_FAILED, EXIT_OK

_READY_TIMEOUT_S = 1800.0
_STOP_TIMEOUT_S = 60.0
_READY_LINE = re.compile(r"serving (http://\S+)/v1")
# Ids that any vocabulary has, and that are seldom special.
_FIRST_ID, _LAST_ID = 1000, 20000


class BenchError(Exception):
    """The server cannot be measured; the text says why."""


@dataclass(slots=True)
class Stream:
    """What was measured of one request; times in seconds since its start."""

    ttft_s: float = math.nan
    gaps_s: list[float] = field(default_factory=list)
    e2e_s: float = math.nan
    num_output_tokens: int = 0
    num_prompt_tokens: int = 0
    error: str = ""


@dataclass(frozen=True, slots=True)
class Summary:
    """Figures over all streams. Percentiles are by nearest rank; times in milliseconds, rates per second."""

    num_requests: int
    num_failed: int
    concurrency: int
    duration_s: float
    prompt_tokens: int
    output_tokens: int
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    ttft_ms: dict[str, float]
    itl_ms: dict[str, float]
    e2e_ms: dict[str, float]


def run_bench(arguments: argparse.Namespace) -> int:
    """Run the command. Raises ConfigError; returns the exit status, EXIT_FAILED when a request failed."""
    for flag, value, least in (
        ("--num-prompts", arguments.num_prompts, 1),
        ("--concurrency", arguments.concurrency, 1),
        ("--input-len", arguments.input_len, 1),
        ("--output-len", arguments.output_len, 1),
        ("--prefix-len", arguments.prefix_len, 0),
    ):
        if value < least:
            raise ConfigError(flag, value, expected=f"{least} or more", remedy="correct the value")
    if arguments.prefix_len > arguments.input_len:
        raise ConfigError(
            "--prefix-len", arguments.prefix_len, expected="at most --input-len", remedy="lower it, or raise --input-len"
        )
    try:
        summary, errors = asyncio.run(_bench(arguments))
    except (BenchError, aiohttp.ClientError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return EXIT_FAILED
    print(json.dumps(asdict(summary)) if arguments.json else format_summary(summary))
    for text in sorted(set(errors)):
        print(f"failed request: {text}", file=sys.stderr)
    return EXIT_FAILED if errors else EXIT_OK


async def measure(
    url: str, prompts: Sequence[Sequence[int]], *, output_len: int, concurrency: int, api_key: str = ""
) -> tuple[Summary, list[str]]:
    """Send prompts to a server, so many at the same time, each as a stream of exactly output_len tokens.

    Args:
        url: of the server, without `/v1`.
        prompts: token ids.
        output_len: tokens to generate; the model's own end is ignored.
        concurrency: streams at the same time.
        api_key: sent when not empty.
    Returns:
        the figures, and the errors of requests that failed.
    Raises:
        BenchError: the server does not answer.
    """
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=10)
    async with aiohttp.ClientSession(headers=headers, timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
        model = await _model_of(session, url)
        places = asyncio.Semaphore(concurrency)
        started_s = time.perf_counter()
        streams = await asyncio.gather(
            *(_one(session, places, f"{url}/v1/completions", model, prompt, output_len) for prompt in prompts)
        )
        duration_s = time.perf_counter() - started_s
    return summarize(streams, concurrency, duration_s), [stream.error for stream in streams if stream.error]


def summarize(streams: Sequence[Stream], concurrency: int, duration_s: float) -> Summary:
    """Figures of the streams that did not fail."""
    good = [stream for stream in streams if not stream.error]
    output_tokens = sum(stream.num_output_tokens for stream in good)
    prompt_tokens = sum(stream.num_prompt_tokens for stream in good)
    return Summary(
        num_requests=len(streams),
        num_failed=len(streams) - len(good),
        concurrency=concurrency,
        duration_s=duration_s,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        requests_per_s=len(good) / duration_s,
        output_tokens_per_s=output_tokens / duration_s,
        total_tokens_per_s=(output_tokens + prompt_tokens) / duration_s,
        ttft_ms=_percentiles([stream.ttft_s for stream in good]),
        itl_ms=_percentiles([gap for stream in good for gap in stream.gaps_s]),
        e2e_ms=_percentiles([stream.e2e_s for stream in good]),
    )


def format_summary(summary: Summary) -> str:
    """The figures as a table."""
    lines = [
        f"requests          {summary.num_requests} ({summary.num_failed} failed), {summary.concurrency} at the same time",
        f"duration          {summary.duration_s:.2f} s",
        f"tokens            {summary.prompt_tokens} prompt, {summary.output_tokens} generated",
        f"throughput        {summary.requests_per_s:.2f} requests/s, {summary.output_tokens_per_s:.1f} generated tokens/s, "
        f"{summary.total_tokens_per_s:.1f} tokens/s in all",
        f"{'milliseconds':<26}{'mean':>10}{'p50':>10}{'p90':>10}{'p99':>10}",
    ]
    for name, figures in (
        ("time to first token", summary.ttft_ms),
        ("between tokens", summary.itl_ms),
        ("whole request", summary.e2e_ms),
    ):
        lines.append(f"{name:<26}" + "".join(f"{figures.get(key, math.nan):>10.1f}" for key in ("mean", "p50", "p90", "p99")))
    return "\n".join(lines)


def random_prompts(number: int, input_len: int, prefix_len: int, seed: int) -> list[list[int]]:
    """Prompts of random token ids that share a prefix."""
    source = random.Random(seed)
    prefix = [source.randint(_FIRST_ID, _LAST_ID) for _ in range(prefix_len)]
    return [prefix + [source.randint(_FIRST_ID, _LAST_ID) for _ in range(input_len - prefix_len)] for _ in range(number)]


async def _bench(arguments: argparse.Namespace) -> tuple[Summary, list[str]]:
    prompts = random_prompts(arguments.num_prompts, arguments.input_len, arguments.prefix_len, arguments.bench_seed)
    server_flags = ([arguments.model] if arguments.model else []) + given_flags(arguments)
    async with contextlib.AsyncExitStack() as stack:
        url = arguments.url.rstrip("/").removesuffix("/v1") or await stack.enter_async_context(own_server(server_flags))
        return await measure(
            url,
            prompts,
            output_len=arguments.output_len,
            concurrency=arguments.concurrency,
            api_key=os.environ.get("TOKENSPEED_API_KEY", ""),
        )


@contextlib.asynccontextmanager
async def own_server(flags: Sequence[str]) -> AsyncIterator[str]:
    """A server of this installation on a free port, until the end of the block.

    Args:
        flags: arguments of `serve`; `--port` is added.
    Yields:
        its URL, when it is ready.
    Raises:
        BenchError: it did not start.
    """
    command = (sys.executable, "-P", "-m", "tokenspeed_engine.cli", "serve", *flags, "--port", "0")
    process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
    if process.stderr is None:
        raise RuntimeError("bench: the server has no standard error")
    try:
        async with asyncio.timeout(_READY_TIMEOUT_S):
            url = await _url_of(process.stderr)
        forward = asyncio.create_task(_forward(process.stderr))
        yield url
        process.terminate()
        await asyncio.wait_for(process.wait(), _STOP_TIMEOUT_S)
        await forward
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def _url_of(stream: asyncio.StreamReader) -> str:
    while line := await stream.readline():
        text = line.decode(errors="replace")
        sys.stderr.write(text)
        if found := _READY_LINE.search(text):
            return found.group(1)
    raise BenchError("the server ended before it was ready; its last lines say why")


async def _forward(stream: asyncio.StreamReader) -> None:
    """Read on, so that the server never waits for a full pipe; warnings and errors are shown."""
    while line := await stream.readline():
        if b" WARNING " in line or b" ERROR " in line or b" CRITICAL " in line:
            sys.stderr.write(line.decode(errors="replace"))


async def _model_of(session: aiohttp.ClientSession, url: str) -> str:
    try:
        async with session.get(f"{url}/v1/models") as response:
            body = await response.json(content_type=None)
            if response.status != 200:
                raise BenchError(f"GET {url}/v1/models: expected status 200, got {response.status}: {body}")
            return str(body["data"][0]["id"])
    except (aiohttp.ClientError, ValueError, KeyError, IndexError) as error:
        got = f"{type(error).__name__}: {error}"
        raise BenchError(f"GET {url}/v1/models: expected an OpenAI-compatible server, got {got}") from error


async def _one(
    session: aiohttp.ClientSession,
    places: asyncio.Semaphore,
    url: str,
    model: str,
    prompt: Sequence[int],
    output_len: int,
) -> Stream:
    body = {
        "model": model,
        "prompt": list(prompt),
        "max_tokens": output_len,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    stream = Stream()
    async with places:
        started_s = time.perf_counter()
        try:
            async with session.post(url, json=body) as response:
                if response.status != 200:
                    stream.error = f"status {response.status}: {(await response.text())[:300]}"
                    return stream
                await _read_events(response, stream, started_s)
        except aiohttp.ClientError as error:
            stream.error = repr(error)
        stream.e2e_s = time.perf_counter() - started_s
        if not stream.error and stream.num_output_tokens != output_len:
            stream.error = f"expected {output_len} tokens, got {stream.num_output_tokens}"
    return stream


async def _read_events(response: aiohttp.ClientResponse, stream: Stream, started_s: float) -> None:
    last_s = math.nan
    async for line in response.content:
        if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
            continue
        event = json.loads(line[6:])
        if "error" in event:
            stream.error = str(event["error"])
            return
        if event.get("usage"):
            stream.num_prompt_tokens = event["usage"]["prompt_tokens"]
            stream.num_output_tokens = event["usage"]["completion_tokens"]
        if event.get("choices"):
            now_s = time.perf_counter()
            if math.isnan(stream.ttft_s):
                stream.ttft_s = now_s - started_s
            else:
                stream.gaps_s.append(now_s - last_s)
            last_s = now_s


def _percentiles(values_s: Sequence[float]) -> dict[str, float]:
    """Mean and percentiles in milliseconds; empty without values."""
    ordered = sorted(value for value in values_s if not math.isnan(value))
    if not ordered:
        return {}
    figures = {"mean": sum(ordered) / len(ordered) * 1e3}
    for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99)):
        figures[name] = ordered[max(math.ceil(share * len(ordered)) - 1, 0)] * 1e3
    return figures
