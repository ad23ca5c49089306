"""`/v1/completions`: prompts in all forms, echo, log-probabilities with their offsets."""

from __future__ import annotations

from typing import Any

import pytest

PATH = "/v1/completions"


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "smollm2", "prompt": "Hello", **fields}


async def test_official_client(server: Any) -> None:
    server.says(" world, and all.")
    answer = await server.openai.completions.create(**body(max_tokens=32))
    assert answer.object == "text_completion"
    assert answer.id.startswith("cmpl-")
    assert answer.choices[0].text == " world, and all."
    assert answer.choices[0].finish_reason == "stop"
    stream = await server.openai.completions.create(**body(max_tokens=32, stream=True))
    assert "".join([chunk.choices[0].text async for chunk in stream]) == " world, and all."


async def test_sixteen_tokens_when_nothing_is_asked_for(server: Any) -> None:
    server.says("a b " * 100)
    whole = await server.both(PATH, body())
    assert whole["usage"]["completion_tokens"] == 16
    assert whole["choices"][0]["finish_reason"] == "length"


async def test_prompt_forms(server: Any) -> None:
    server.says("!")
    ids = server.pieces("Hello")
    for prompt, expected in (
        ("Hello", [ids]),
        (ids, [ids]),
        (["Hello", "Hello there"], [ids, server.pieces("Hello there")]),
        ([ids, [5, 6, 7]], [ids, [5, 6, 7]]),
        (["Hello"], [ids]),
        ([ids], [ids]),
    ):
        server.core.requests.clear()
        status, answer = await server.post(PATH, body(prompt=prompt))
        assert status == 200, answer
        assert [list(r.prompt_token_ids) for r in server.core.requests] == expected
        assert answer["usage"]["prompt_tokens"] == sum(map(len, expected))
        assert [c["index"] for c in answer["choices"]] == list(range(len(expected)))


async def test_choices_are_ordered_by_prompt(server: Any) -> None:
    script = type(server.core.script(None))
    server.core.script = lambda r: script([*r.prompt_token_ids, *server.pieces(str(r.params.seed))])
    whole = await server.both(PATH, body(prompt=["A", "B"], n=2, seed=3))
    assert [c["text"] for c in whole["choices"]] == ["A3", "A4", "B3", "B4"]
    assert whole["usage"]["prompt_tokens"] == 2


@pytest.mark.parametrize(
    "prompt",
    [[], [[]], [[], [1]], ["a", 1], ["a", [1]], [1, [1]], [-1], [49152], [[1], [49152]], "", ["a", ""], 5, {"a": 1}, [True], [1.5]],
)
async def test_bad_prompts(server: Any, prompt: Any) -> None:
    status, answer = await server.post(PATH, body(prompt=prompt))
    assert status == 400
    assert answer["error"]["param"].startswith("prompt")
    assert server.core.requests == []


async def test_a_missing_prompt_is_named(server: Any) -> None:
    for prompt in ({}, {"prompt": None}):
        status, answer = await server.post(PATH, {"model": "smollm2", **prompt})
        assert (status, answer["error"]["param"]) == (400, "prompt")
        assert answer["error"]["code"] == "missing_required_parameter"


async def test_echo(server: Any) -> None:
    server.says(" world")
    for prompt, texts in ((["Hello", "Bye"], ["Hello", "Bye"]), (server.pieces("Bye"), ["Bye"])):
        whole = await server.both(PATH, body(prompt=prompt, echo=True, n=2))
        assert [c["text"] for c in whole["choices"]] == [f"{text} world" for text in texts for _ in range(2)]


@pytest.mark.parametrize("chunks", [(1,), (2,), (3,)])
async def test_echo_offsets_in_streams(server: Any, chunks: tuple[int, ...]) -> None:
    """Case O1: the offsets of a stream's later chunks do not forget the prompt."""
    server.says("xyz tail of more", chunks)
    whole = await server.both(PATH, body(prompt="ABCDE", echo=True, logprobs=1, max_tokens=3))
    choice = whole["choices"][0]
    shown = choice["logprobs"]
    num_prompt = len(server.pieces("ABCDE"))
    assert choice["text"].startswith("ABCDE")
    assert len(shown["tokens"]) == num_prompt + 3
    assert shown["text_offset"][0] == 0
    assert shown["text_offset"][num_prompt] == 5
    ends = [start + len(token) for start, token in zip(shown["text_offset"], shown["tokens"], strict=True)]
    assert shown["text_offset"][1:] == ends[:-1]
    assert ends[-1] == len(choice["text"])
    assert shown["token_logprobs"][0] is None
    assert shown["top_logprobs"][0] is None
    assert all(isinstance(value, float) for value in shown["token_logprobs"][1:])
    # The best token, and the chosen one, which is never the best in this script.
    assert all(len(top) == 2 for top in shown["top_logprobs"][1:])


async def test_offsets_without_echo_start_at_zero(server: Any) -> None:
    server.says("one two")
    shown = (await server.both(PATH, body(logprobs=0)))["choices"][0]["logprobs"]
    assert shown["tokens"] == ["one", " two"]
    assert shown["text_offset"] == [0, 3]
    assert [set(top) for top in shown["top_logprobs"]] == [{"one"}, {" two"}]


async def test_offsets_inside_characters(server: Any) -> None:
    """Tokens that are parts of one character begin where it does, and are shown by their bytes."""
    server.says("a🌶b")
    for prompt in ("Ж🌶", server.pieces("Ж🌶")):
        whole = await server.both(PATH, body(prompt=prompt, echo=True, logprobs=1))
        choice = whole["choices"][0]
        assert choice["text"] == "Ж🌶a🌶b"
        assert choice["logprobs"]["text_offset"][-5:] == [2, 3, 3, 3, 4]
        assert choice["logprobs"]["tokens"][-5:] == ["a", "bytes:\\xf0\\x9f", "bytes:\\x8c", "bytes:\\xb6", "b"]
        assert choice["logprobs"]["text_offset"][0] == 0


async def test_prompt_that_ends_inside_a_character(server: Any) -> None:
    """Case S1: no delta repeats the prompt; the boundary character appears once, completed."""
    first, *rest = server.pieces("🌶")
    prompt = [*server.pieces("Hello world "), first]
    script = type(server.core.script(None))
    server.core.script = lambda _: script([*rest, *server.pieces("ok")])
    whole = await server.both(PATH, body(prompt=prompt))
    assert whole["choices"][0]["text"] == "🌶ok"
    with_logprobs = (await server.both(PATH, body(prompt=prompt, logprobs=0)))["choices"][0]
    assert with_logprobs["logprobs"]["text_offset"] == [0, 0, 1]
    echoed = (await server.both(PATH, body(prompt=prompt, echo=True, logprobs=0)))["choices"][0]
    assert echoed["text"] == "Hello world 🌶ok"
    assert echoed["logprobs"]["text_offset"][-4:] == [12, 12, 12, 13]


async def test_prompt_whose_character_is_never_completed(server: Any) -> None:
    prompt = [*server.pieces("Hi "), server.pieces("🌶")[0]]
    server.says("ok")
    echoed = (await server.both(PATH, body(prompt=prompt, echo=True, logprobs=0)))["choices"][0]
    assert echoed["text"].endswith("ok")
    assert echoed["logprobs"]["text_offset"][-1] == len(echoed["text"]) - 2


async def test_special_tokens_take_no_room_unless_shown(server: Any) -> None:
    script = type(server.core.script(None))
    server.core.script = lambda _: script([*server.pieces("a"), 1, *server.pieces("b")])
    hidden = (await server.both(PATH, body(logprobs=0)))["choices"][0]
    assert hidden["text"] == "ab"
    assert hidden["logprobs"]["text_offset"] == [0, 1, 1]
    shown = (await server.both(PATH, body(logprobs=0, skip_special_tokens=False)))["choices"][0]
    assert shown["text"] == "a<|im_start|>b"
    assert shown["logprobs"]["text_offset"] == [0, 1, 13]


async def test_echo_alone_scores_a_prompt(server: Any) -> None:
    """max_tokens=0 with echo: the prompt and its log-probabilities, nothing generated."""
    server.says("never shown")
    whole = await server.both(PATH, body(prompt="one two three", echo=True, logprobs=1, max_tokens=0))
    assert whole["choices"][0]["text"] == "one two three"
    assert whole["choices"][0]["finish_reason"] == "length"
    assert whole["usage"]["completion_tokens"] == 0
    assert len(whole["choices"][0]["logprobs"]["tokens"]) == 3
    status, answer = await server.post(PATH, body(max_tokens=0))
    assert (status, answer["error"]["param"]) == (400, "max_tokens")


async def test_best_of_equal_to_n(server: Any) -> None:
    server.says("x")
    assert (await server.post(PATH, body(best_of=1)))[0] == 200
    assert (await server.post(PATH, body(best_of=2, n=2)))[0] == 200
    status, answer = await server.post(PATH, body(best_of=3, n=2))
    assert (status, answer["error"]["param"]) == (400, "best_of")
