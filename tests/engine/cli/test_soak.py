"""Many requests of random lengths, with aborts and disconnects, over HTTP: no error but those asked for, no page lost."""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import dataclass
from typing import Any

import httpx

CONCURRENCY = 64


@dataclass
class Outcome:
    """What became of one request."""

    kind: str
    status: int = 0
    num_tokens: int = 0
    expected_tokens: int = 0
    error: str = ""


async def one(client: httpx.AsyncClient, url: str, body: dict[str, Any], kind: str, source: random.Random) -> Outcome:
    outcome = Outcome(kind, expected_tokens=body["max_tokens"])
    if kind == "plain":
        response = await client.post(url, json=body)
        outcome.status = response.status_code
        if response.status_code == 200:
            outcome.num_tokens = response.json()["usage"]["completion_tokens"]
        else:
            outcome.error = response.text
        return outcome
    body = body | {"stream": True, "stream_options": {"include_usage": True}}
    leave_after = source.randint(0, 6) if kind == "disconnect" else None
    async with client.stream("POST", url, json=body) as response:
        outcome.status = response.status_code
        events = 0
        async for line in response.aiter_lines():
            if leave_after is not None and events >= leave_after:
                return outcome
            if line.startswith("data: {"):
                events += 1
                event = json.loads(line[6:])
                outcome.error = str(event.get("error", "")) or outcome.error
                if event.get("usage"):
                    outcome.num_tokens = event["usage"]["completion_tokens"]
    return outcome


async def cancelled(client: httpx.AsyncClient, url: str, body: dict[str, Any], delay_s: float) -> Outcome:
    """A request whose client gives up after a while, wherever it then is."""
    try:
        async with asyncio.timeout(delay_s):
            await client.post(url, json=body | {"max_tokens": 2000})
    except TimeoutError:
        pass
    return Outcome("cancel")


def random_body(server: Any, source: random.Random, model: str) -> dict[str, Any]:
    # Some prompts begin alike, so that pages are shared while requests come and go.
    prefix = list(range(1000, 1000 + source.choice([0, 0, 16, 48, 200])))
    prompt = prefix + [source.randint(1000, 20000) for _ in range(source.randint(1, 80))]
    return {
        "model": model, "prompt": prompt, "max_tokens": source.randint(1, 40), "ignore_eos": True,
        "temperature": source.choice([0, 0.7]), "seed": source.randint(0, 2**31), "top_p": source.choice([1, 0.9]),
    }  # fmt: skip


async def soak(server: Any, number: int, seed: int) -> list[Outcome]:
    source = random.Random(seed)
    model = server.get("/v1/models").json()["data"][0]["id"]
    places = asyncio.Semaphore(CONCURRENCY)
    url = server.url + "/v1/completions"
    limits = httpx.Limits(max_connections=CONCURRENCY * 2, max_keepalive_connections=CONCURRENCY)
    async with httpx.AsyncClient(timeout=600, limits=limits) as client:

        async def place(kind: str, body: dict[str, Any], delay_s: float) -> Outcome:
            async with places:
                if kind == "cancel":
                    return await cancelled(client, url, body, delay_s)
                return await one(client, url, body, kind, source)

        kinds = [source.choices(["plain", "stream", "disconnect", "cancel"], [4, 4, 2, 2])[0] for _ in range(number)]
        return list(
            await asyncio.gather(*(place(kind, random_body(server, source, model), source.uniform(0.0, 1.0)) for kind in kinds))
        )


def check(server: Any, outcomes: list[Outcome], num_pages: int) -> None:
    for outcome in outcomes:
        if outcome.kind in ("plain", "stream"):
            assert (outcome.status, outcome.error) == (200, ""), outcome
            assert outcome.num_tokens == outcome.expected_tokens
    page = 'tokenspeed:kv_cache_pages{state="%s"}'
    deadline = 200
    while server.metric("tokenspeed:num_requests_running") or server.metric(page % "owned"):
        deadline -= 1
        assert deadline, "pages are still held"
        httpx.get(server.url + "/health")
    assert server.metric(page % "free") + server.metric(page % "cached") == num_pages
    assert server.metric("tokenspeed:num_requests_waiting") == 0
    assert server.metric("tokenspeed:engine_restarts_total") == 0


async def burst(server: Any) -> list[Outcome]:
    """Requests that start small and all grow at the same time, to more than the pool holds."""
    url, body = server.url + "/v1/completions", server.body([0], 120)
    async with httpx.AsyncClient(timeout=600) as client:
        bodies = [body | {"prompt": [1000 + n]} for n in range(40)]
        return list(await asyncio.gather(*(one(client, url, body, "plain", random.Random(0)) for body in bodies)))


def test_a_thousand_requests(make_server: Any) -> None:
    sizes = ["--block-size", "4", "--num-pages", "800", "--max-model-len", "2400", "--max-num-batched-tokens", "256"]
    server = make_server(*sizes).wait_ready()
    check(server, asyncio.run(burst(server)), 800)
    assert server.metric("tokenspeed:num_preemptions_total") > 0
    outcomes = asyncio.run(soak(server, 1000, seed=1000))
    check(server, outcomes, 800)
    assert {outcome.kind for outcome in outcomes} == {"plain", "stream", "disconnect", "cancel"}
    assert server.metric("tokenspeed:request_aborts_total") > 0
    assert server.metric("tokenspeed:prefix_cache_hits_total") > 0
    server.terminate()
    assert server.wait_exit() == 0
    assert "Traceback" not in server.output
