"""A server over HTTP: throughput and time to first token, beside the same model in one process without HTTP."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

from perf.harness import Benchmark, Context, Row


def run(context: Context) -> Iterator[Row]:
    """Streams of equal length at several concurrencies; `--set model=PATH` takes another model."""
    try:
        from tokenspeed_engine.checkpoint import ModelNotFoundError, default_model_path
        from tokenspeed_engine.commands.bench import random_prompts
    except ImportError as error:
        yield Row("http serving", None, None, "tok/s", note=f"not installed: {error}")
        return
    try:
        model = context.options.get("model") or str(default_model_path())
    except ModelNotFoundError as error:
        yield Row("http serving", None, None, "tok/s", note=str(error))
        return
    input_len, output_len = (32, 8) if context.quick else (128, 64)
    concurrencies = (1, 4) if context.quick else (1, 4, 16)
    cases = [(number, random_prompts(number, input_len, 0, seed=number)) for number in concurrencies]
    offline = [_offline_tokens_per_s(model, prompts, output_len) for _, prompts in cases]
    served = asyncio.run(_over_http(model, [prompts for _, prompts in cases], output_len))
    for number, peer, (rate, ttft_ms) in zip(concurrencies, offline, served, strict=True):
        case = f"{number} streams, {input_len} + {output_len} tokens"
        yield Row(f"{case}: generated", rate, peer, "tok/s", peer_name="the same engine in one process, without HTTP")
        yield Row(f"{case}: time to first token, median", ttft_ms, None, "ms")


async def _over_http(model: str, cases: list[list[list[int]]], output_len: int) -> list[tuple[float, float]]:
    """(generated tokens per second, median time to first token in ms) for each case, against one server."""
    from tokenspeed_engine.commands.bench import measure, own_server

    results = []
    async with own_server([model, "--no-enable-prefix-caching", "--log-level", "warning"]) as url:
        await measure(url, [[1000, 1001]], output_len=4, concurrency=1)
        for prompts in cases:
            summary, errors = await measure(url, prompts, output_len=output_len, concurrency=len(prompts))
            if errors:
                raise RuntimeError(f"a request failed: {errors[0]}")
            results.append((summary.output_tokens_per_s, summary.ttft_ms["p50"]))
    return results


def _offline_tokens_per_s(model: str, prompts: list[list[int]], output_len: int) -> float:
    from tokenspeed_engine.executor import OfflineEngine
    from tokenspeed_engine.types import SamplingParams

    engine = OfflineEngine(model, enable_prefix_caching=False)
    params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True)
    engine.generate([[1000, 1001]], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
    started_s = time.perf_counter()
    engine.generate(prompts, params)
    return len(prompts) * output_len / (time.perf_counter() - started_s)


BENCHMARK = Benchmark(
    name="serve.http",
    summary="server over HTTP: throughput and time to first token, beside the engine without HTTP",
    run=run,
)
