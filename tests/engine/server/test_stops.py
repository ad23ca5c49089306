"""Stop strings and stop tokens, over every border, in streams and whole answers."""

from __future__ import annotations

from typing import Any

import pytest

PATH = "/v1/completions"
CHUNKS = [(1,), (2,), (3,), (1, 2, 3), (64,)]


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "smollm2", "prompt": "Thought:", "max_tokens": 64, **fields}


def force(server: Any, chunks: tuple[int, ...], *texts: str) -> None:
    script = type(server.core.script(None))
    ids = server.pieces(*texts)
    server.core.script = lambda _: script(ids, chunks)


@pytest.mark.parametrize("chunks", CHUNKS)
async def test_stop_string_over_chunk_borders(server: Any, chunks: tuple[int, ...]) -> None:
    """Case S3."""
    force(server, chunks, "abc", "Obser", "vation", "x")
    choice = (await server.both(PATH, body(stop=["Observation"], logprobs=0)))["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("abc", "stop", "Observation")
    # Log-probabilities say nothing of what was cut away.
    assert choice["logprobs"]["tokens"] == ["abc"]

    choice = (await server.both(PATH, body(stop=["Observation"], include_stop_str_in_output=True, logprobs=0)))["choices"][0]
    assert choice["text"] == "abcObservation"
    assert "".join(choice["logprobs"]["tokens"]) == "abcObservation"

    choice = (await server.both(PATH, body(stop=["\nUser:"])))["choices"][0]
    assert (choice["text"], choice["stop_reason"]) == ("abcObservationx", None)


@pytest.mark.parametrize("chunks", CHUNKS)
async def test_near_miss_is_released(server: Any, chunks: tuple[int, ...]) -> None:
    force(server, chunks, "abc", "Obser", "ver", " looks")
    choice = (await server.both(PATH, body(stop=["Observation"], logprobs=0)))["choices"][0]
    assert choice["text"] == "abcObserver looks"
    assert "".join(choice["logprobs"]["tokens"]) == "abcObserver looks"
    force(server, chunks, "abc", "\n", "User", " says")
    choice = (await server.both(PATH, body(stop=["\nUser:"])))["choices"][0]
    assert choice["text"] == "abc\nUser says"


async def test_stop_string_is_held_back_while_it_may_still_come(server: Any) -> None:
    force(server, (1,), "abc", "Obser", "vation", "x")
    streamed = await server.stream(PATH, body(stop=["Observation"]))
    assert [event["choices"][0]["text"] for event in streamed.events] == ["abc", ""]


async def test_stop_string_aborts_the_core(server: Any) -> None:
    force(server, (1,), "abc", "STOP", *["more"] * 50)
    await server.post(PATH, body(stop="STOP"))
    request_id = server.core.requests[-1].request_id
    await server.core.wait(lambda: request_id in server.core.aborted)


async def test_stop_string_at_the_length_limit(server: Any) -> None:
    force(server, (1,), "abc", "Obs")
    choice = (await server.both(PATH, body(stop=["Observation"], max_tokens=2)))["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("abcObs", "length")


@pytest.mark.parametrize("chunks", CHUNKS)
async def test_stop_token_ids(server: Any, chunks: tuple[int, ...]) -> None:
    force(server, chunks, "one", " two", " three")
    two = server.pieces(" two")[0]
    whole = await server.both(PATH, body(stop_token_ids=[two], logprobs=0))
    choice = whole["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("one", "stop", two)
    assert choice["logprobs"]["tokens"] == ["one"]
    assert whole["usage"]["completion_tokens"] == 2
    shown = (await server.both(PATH, body(stop_token_ids=[two], include_stop_str_in_output=True, logprobs=0)))["choices"][0]
    assert shown["text"] == "one two"
    assert shown["logprobs"]["tokens"] == ["one", " two"]


async def test_ignore_eos_and_min_tokens(server: Any) -> None:
    script = type(server.core.script(None))
    ids = [*server.pieces("a"), server.core.eos, *server.pieces("b")]
    server.core.script = lambda _: script(ids)
    assert (await server.both(PATH, body()))["choices"][0]["text"] == "a"
    ignoring = await server.both(PATH, body(ignore_eos=True, max_tokens=5, logprobs=0))
    assert ignoring["choices"][0]["text"] == "ab"
    assert ignoring["choices"][0]["finish_reason"] == "length"
    assert len(ignoring["choices"][0]["logprobs"]["tokens"]) == 5


async def test_most_stop_strings(server: Any) -> None:
    force(server, (1,), "abc", "q7", "x")
    stops = [f"q{i}" for i in range(16)]
    assert (await server.both(PATH, body(stop=stops)))["choices"][0]["stop_reason"] == "q7"
    status, answer = await server.post(PATH, body(stop=[*stops, "q16"]))
    assert (status, answer["error"]["param"]) == (400, "stop")
