"""Front end and core as two real processes: requests, ends, refusals, bounds."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tokenspeed_engine.server.engine_client import EngineDeadError, EngineStatus, QueueFullError, RequestRefused
from tokenspeed_engine.supervisor import CoreFailedError
from tokenspeed_engine.types import FinishReason

_SPEC = importlib.util.spec_from_file_location("scripted_core", Path(__file__).with_name("scripted_core.py"))
assert _SPEC is not None
assert _SPEC.loader is not None
scripted = importlib.util.module_from_spec(_SPEC)
sys.modules[_SPEC.name] = scripted
_SPEC.loader.exec_module(scripted)
Command, token_of = scripted.Command, scripted.token_of


def wanted(prompt: list[int], count: int) -> list[int]:
    return [token_of(prompt, index) for index in range(count)]


async def test_a_request_gets_its_tokens_and_its_text(make_engine: Any) -> None:
    engine = await make_engine()
    assert engine.client.status is EngineStatus.READY
    assert engine.client.model_info.num_pages == 256
    prompt = [7000, 7001, 7002]
    deltas = await engine.collect(engine.request("r", prompt, 8))
    tokens = [token for delta in deltas for token in delta.token_ids]
    assert tokens == wanted(prompt, 8)
    assert "".join(delta.text for delta in deltas) == engine.client.tokenizer.decode(tokens)
    assert deltas[-1].finish_reason is FinishReason.LENGTH
    assert deltas[-1].num_prompt_tokens == 3
    assert all(delta.finish_reason is FinishReason.RUNNING for delta in deltas[:-1])
    assert engine.client.num_active == 0


async def test_a_stop_string_ends_the_text_and_the_request_at_the_core(make_engine: Any) -> None:
    engine = await make_engine("step=0.005")
    prompt = [7100]
    whole = engine.client.tokenizer.decode(wanted(prompt, 6))
    stop = whole[3:9]
    deltas = await engine.collect(engine.request("r", prompt, 400, stop=(stop,)))
    assert "".join(delta.text for delta in deltas) == whole[:3]
    assert deltas[-1].finish_reason is FinishReason.STOP
    assert deltas[-1].stop_reason == stop
    stats = await engine.client.stats()
    assert stats.num_running == 0
    assert stats.num_aborts == 1


async def test_closing_the_iterator_frees_the_pages(make_engine: Any) -> None:
    engine = await make_engine("step=0.005")
    stream = engine.client.generate(engine.request("r", [7200] * 40, 400))
    async for delta in stream:
        if delta.token_ids:
            break
    assert (await engine.client.stats()).num_owned_pages > 0
    await stream.aclose()
    stats = await engine.client.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_owned_pages) == (0, 0, 0)
    assert engine.client.num_active == 0


async def test_cancelling_the_reader_frees_the_pages(make_engine: Any) -> None:
    engine = await make_engine("step=0.005")
    readers = [asyncio.create_task(engine.tokens(f"r{n}", [7300 + n] * 40, 200)) for n in range(8)]
    await engine.until(lambda: engine.client.last_stats.num_running == 8)
    for reader in readers[:-1]:
        reader.cancel()
    await asyncio.gather(*readers[:-1], return_exceptions=True)
    stats = await engine.client.stats()
    assert stats.num_running == 1
    assert await readers[-1] == wanted([7307] * 40, 200)
    assert (await engine.client.stats()).num_owned_pages == 0


async def test_a_slow_reader_gets_everything_in_merged_deltas(make_engine: Any) -> None:
    engine = await make_engine()
    prompt = [7400]
    stream = engine.client.generate(engine.request("slow", prompt, 300))
    first = await anext(stream)
    await engine.tokens("other", [7401], 400)
    rest = [delta async for delta in stream]
    assert len(rest) < 50
    tokens = [token for delta in (first, *rest) for token in delta.token_ids]
    assert tokens == wanted(prompt, 300)
    assert "".join(delta.text for delta in (first, *rest)) == engine.client.tokenizer.decode(tokens)


async def test_refusals_of_the_core_concern_one_request(make_engine: Any) -> None:
    engine = await make_engine()
    cases = {
        "refused": ([int(Command.REFUSE)], 8, "this request cannot run"),
        "long": ([7500] * 500, 100, "at most 512 tokens"),
        "token": ([scripted.VOCAB], 8, "expected ids from 0"),
    }
    good = asyncio.create_task(engine.tokens("good", [7501], 100))
    for name, (prompt, count, message) in cases.items():
        with pytest.raises(RequestRefused, match=message):
            await engine.tokens(name, prompt, count)
    assert await good == wanted([7501], 100)
    assert engine.client.num_active == 0


async def test_an_oversized_request_is_refused(make_engine: Any) -> None:
    engine = await make_engine(max_message_bytes=4096)
    with pytest.raises(RequestRefused, match="--max-message-bytes") as caught:
        await engine.tokens("r", [7600] * 4000)
    assert caught.value.code == "request_too_large"
    assert await engine.tokens("s", [7601], 3) == wanted([7601], 3)


async def test_the_queue_is_bounded(make_engine: Any) -> None:
    engine = await make_engine("step=0.01", scheduling={"max_num_seqs": 2, "max_queue": 3})
    readers = [asyncio.create_task(engine.tokens(f"r{n}", [7700 + n], 20)) for n in range(5)]
    await engine.until(lambda: engine.client.num_active == 5)
    with pytest.raises(QueueFullError, match="--max-queue"):
        await engine.tokens("sixth", [7777])
    assert [await reader for reader in readers] == [wanted([7700 + n], 20) for n in range(5)]
    assert await engine.tokens("sixth", [7777], 3) == wanted([7777], 3)


async def test_an_id_in_use_is_refused(make_engine: Any) -> None:
    engine = await make_engine("step=0.01")
    reader = asyncio.create_task(engine.tokens("r", [7800], 20))
    await engine.until(lambda: engine.client.num_active == 1)
    with pytest.raises(RequestRefused, match="in use"):
        await engine.tokens("r", [7801])
    assert await reader == wanted([7800], 20)


async def test_draining_refuses_new_and_ends_old(make_engine: Any) -> None:
    engine = await make_engine("step=0.01")
    reader = asyncio.create_task(engine.tokens("r", [7900], 30))
    await engine.until(lambda: engine.client.num_active == 1)
    engine.client.begin_drain()
    assert engine.client.status is EngineStatus.DRAINING
    with pytest.raises(EngineDeadError, match="shutting down"):
        await engine.tokens("s", [7901])
    await engine.client.wait_idle()
    assert await reader == wanted([7900], 30)


async def test_a_model_that_cannot_be_loaded_is_not_tried_again(make_engine: Any) -> None:
    with pytest.raises(CoreFailedError, match="Fix: choose another model") as caught:
        await make_engine("unloadable")
    assert not caught.value.was_ready


async def test_a_crash_while_loading_gives_its_cause(make_engine: Any) -> None:
    with pytest.raises(CoreFailedError, match="KeyError: 'broken while loading'"):
        await make_engine("broken")


async def test_a_negative_statistic_disturbs_nobody(make_engine: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Case M1: cached tokens reported as -1 during streams."""
    engine = await make_engine("negative-hit")
    prompts = {f"r{n}": [8000 + n] * (n + 1) for n in range(5)}
    results = await asyncio.gather(*(engine.tokens(name, prompt, 10) for name, prompt in prompts.items()))
    assert results == [wanted(prompt, 10) for prompt in prompts.values()]
    samples = {
        (sample.name, sample.labels.get("source", "")): sample.value
        for family in text_string_to_metric_families(engine.metrics.render().decode())
        for sample in family.samples
    }
    by_source = [value for (name, _), value in samples.items() if name == "tokenspeed:prompt_tokens_by_source_total"]
    assert sum(by_source) == samples["tokenspeed:prompt_tokens_total", ""] == sum(map(len, prompts.values()))
    assert samples["tokenspeed:prompt_tokens_by_source_total", "local_cache_hit"] == 0
    assert len([record for record in caplog.records if "increment of 0 or more" in record.message]) == 1
