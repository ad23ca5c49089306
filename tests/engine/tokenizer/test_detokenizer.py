"""The incremental detokenizer, case by case."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest

from tokenspeed_engine.tokenizer import (
    DetokenizerError,
    DetokenizerFullError,
    IncrementalDetokenizer,
    TextUpdate,
    Tokenizer,
    UnknownRequestError,
)
from tokenspeed_engine.tokenizer.pieces import byte_alphabet
from tokenspeed_engine.types import FinishReason, SamplingParams

RUNNING, STOP, LENGTH, ABORT = FinishReason.RUNNING, FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT
LETTERS = {byte: char for char, byte in byte_alphabet().items()}


def byte_tokens(tokenizer: Tokenizer, raw: bytes) -> list[int]:
    """One token for each byte."""
    ids = [tokenizer.token_id(LETTERS[byte]) for byte in raw]
    assert None not in ids
    return [token_id for token_id in ids if token_id is not None]


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def run(
    tokenizer: Tokenizer,
    steps: Sequence[Sequence[int]],
    params: SamplingParams | None = None,
    prompt: Sequence[int] = (),
    finish: FinishReason = LENGTH,
) -> list[TextUpdate]:
    """All updates of one request; the last step carries the finish reason."""
    detokenizer = IncrementalDetokenizer(tokenizer)
    detokenizer.add("r", params or SamplingParams(), prompt)
    updates = []
    for index, ids in enumerate(steps):
        updates += detokenizer.step([("r", ids, finish if index == len(steps) - 1 else RUNNING)])
    detokenizer.remove("r")
    assert len(detokenizer) == 0
    return updates


def text_of(updates: Sequence[TextUpdate]) -> str:
    return "".join(update.text for update in updates)


def chunkings(ids: Sequence[int]) -> list[list[list[int]]]:
    """Every way to cut ids into steps."""
    out = []
    for cuts in itertools.product([False, True], repeat=len(ids) - 1):
        steps = [[ids[0]]]
        for token_id, cut in zip(ids[1:], cuts, strict=True):
            if cut:
                steps.append([token_id])
            else:
                steps[-1].append(token_id)
        out.append(steps)
    return out


def test_a_prompt_that_ends_inside_a_character_is_not_repeated(tokenizer: Tokenizer) -> None:
    pepper = "🌶".encode()
    prompt = [*ids_of(tokenizer, "Hello world "), *byte_tokens(tokenizer, pepper[:2])]
    output = [*byte_tokens(tokenizer, pepper[2:]), *ids_of(tokenizer, "ok")]
    texts = {text_of(run(tokenizer, steps, prompt=prompt)) for steps in chunkings(output)}
    assert texts == {"🌶ok"}


def test_the_prompts_own_fault_is_not_the_outputs_text(tokenizer: Tokenizer) -> None:
    pepper = "🌶".encode()
    prompt = [*ids_of(tokenizer, "Hello"), *byte_tokens(tokenizer, pepper[:2])]
    for steps in chunkings([*ids_of(tokenizer, "ok"), *byte_tokens(tokenizer, pepper)]):
        assert text_of(run(tokenizer, steps, prompt=prompt)) == "ok🌶"
    assert text_of(run(tokenizer, [[]], prompt=prompt)) == ""
    # A third byte and then no fourth: the character is broken by the output as well.
    assert text_of(run(tokenizer, [byte_tokens(tokenizer, pepper[2:3])], prompt=prompt)) == "\ufffd"


def test_a_word_after_the_prompt_keeps_its_space(tokenizer: Tokenizer) -> None:
    assert text_of(run(tokenizer, [ids_of(tokenizer, " world")], prompt=ids_of(tokenizer, "Hello"))) == " world"


@pytest.mark.parametrize("text", ["你好，世界", "👩‍👩‍👧‍👦 ok", "🏳️‍🌈", "👍🏽", "日本語", "é\u0301"])
def test_no_delta_has_half_a_character(tokenizer: Tokenizer, text: str) -> None:
    for updates in (
        run(tokenizer, [[token_id] for token_id in byte_tokens(tokenizer, text.encode())]),
        run(tokenizer, [[token_id] for token_id in ids_of(tokenizer, text)]),
    ):
        assert text_of(updates) == text
        assert not any("\ufffd" in update.text for update in updates)


def test_bytes_that_are_no_text_come_out_as_soon_as_that_is_certain(tokenizer: Tokenizer) -> None:
    updates = run(tokenizer, [[token_id] for token_id in byte_tokens(tokenizer, b"\xe4\xb8A\x80B\xf0\x9f")])
    assert [update.text for update in updates] == ["", "", "\ufffdA", "\ufffd", "B", "", "\ufffd"]


def test_special_tokens_are_left_out_or_shown(tokenizer: Tokenizer) -> None:
    special = tokenizer.token_id("<|im_start|>")
    assert special is not None
    output = [*ids_of(tokenizer, "a"), special, *ids_of(tokenizer, "b")]
    assert text_of(run(tokenizer, [output])) == "ab"
    assert text_of(run(tokenizer, [output], SamplingParams(skip_special_tokens=False))) == "a<|im_start|>b"


def test_an_unknown_id_has_no_text(tokenizer: Tokenizer) -> None:
    assert text_of(run(tokenizer, [[tokenizer.vocab_size + 5, *ids_of(tokenizer, "x")]])) == "x"


STREAM = ("abc", "Obser", "vation", "x")


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_over_steps(tokenizer: Tokenizer, include: bool) -> None:
    ids = [token_id for text in STREAM for token_id in ids_of(tokenizer, text)]
    params = SamplingParams(stop=("Observation",), include_stop_str_in_output=include)
    for steps in chunkings(ids):
        updates = run(tokenizer, steps, params)
        assert text_of(updates) == ("abcObservation" if include else "abc")
        assert (updates[-1].finish_reason, updates[-1].stop_reason) == (STOP, "Observation")
        assert [token_id for update in updates for token_id in update.token_ids] == ids[:-1]
        assert all(update.finish_reason is RUNNING for update in updates[:-1])


@pytest.mark.parametrize(("stop", "text"), [("Observation", "abcObserver"), ("\nUser:", "hi\nUsed"), ("zz", "az")])
def test_a_near_miss_is_released_in_full(tokenizer: Tokenizer, stop: str, text: str) -> None:
    for steps in chunkings(ids_of(tokenizer, text)):
        updates = run(tokenizer, steps, SamplingParams(stop=(stop,)))
        assert text_of(updates) == text
        assert (updates[-1].finish_reason, updates[-1].stop_reason) == (LENGTH, None)


@pytest.mark.parametrize("finish", [LENGTH, ABORT, STOP])
def test_text_that_is_held_comes_out_when_the_request_ends(tokenizer: Tokenizer, finish: FinishReason) -> None:
    eos = tokenizer.eos_token_ids[-1]
    last = [eos] if finish is STOP else []
    updates = run(tokenizer, [ids_of(tokenizer, "see Obser"), last], SamplingParams(stop=("Observation",)), finish=finish)
    assert [update.text for update in updates] == ["see ", "Obser"]
    assert updates[-1].finish_reason is finish


def test_tokens_after_a_stop_string_in_the_same_step_do_not_count(tokenizer: Tokenizer) -> None:
    first, second = ids_of(tokenizer, "one"), ids_of(tokenizer, " two")
    junk = ids_of(tokenizer, " three four")
    assert (len(first), len(second)) == (1, 1)
    updates = run(tokenizer, [[*first, *second, *junk]], SamplingParams(stop=(" two",)), finish=LENGTH)
    assert updates == [TextUpdate("r", "one", (*first, *second), STOP, " two")]


def test_a_stop_string_before_a_stop_token_in_the_same_step_wins(tokenizer: Tokenizer) -> None:
    eos = tokenizer.eos_token_ids[-1]
    ids = ids_of(tokenizer, "one two")
    updates = run(tokenizer, [[*ids, eos]], SamplingParams(stop=(" two",)), finish=STOP)
    assert updates == [TextUpdate("r", "one", tuple(ids), STOP, " two")]


def test_tokens_after_the_end_give_no_update(tokenizer: Tokenizer) -> None:
    detokenizer = IncrementalDetokenizer(tokenizer)
    detokenizer.add("r", SamplingParams(stop=("x",)), [])
    x = ids_of(tokenizer, "x")
    assert detokenizer.step([("r", x, RUNNING)])[0].finish_reason is STOP
    assert detokenizer.step([("r", x, RUNNING)]) == []
    assert detokenizer.step([("r", x, LENGTH)]) == []


def test_the_text_of_a_stop_token_is_hidden(tokenizer: Tokenizer) -> None:
    period = ids_of(tokenizer, ".")[0]
    ids = [*ids_of(tokenizer, "Paris"), period]
    params = SamplingParams(stop_token_ids=(period,))
    assert run(tokenizer, [ids], params, finish=STOP) == [TextUpdate("r", "Paris", tuple(ids), STOP, period)]
    params = SamplingParams(stop_token_ids=(period,), include_stop_str_in_output=True)
    assert run(tokenizer, [ids], params, finish=STOP) == [TextUpdate("r", "Paris.", tuple(ids), STOP, period)]


def test_the_models_own_end_is_no_stop_reason(tokenizer: Tokenizer) -> None:
    eos = tokenizer.eos_token_ids[-1]
    ids = [*ids_of(tokenizer, "Paris"), eos]
    assert run(tokenizer, [ids], finish=STOP) == [TextUpdate("r", "Paris", tuple(ids), STOP, None)]
    shown = run(tokenizer, [ids], SamplingParams(skip_special_tokens=False), finish=STOP)
    assert text_of(shown) == "Paris"


def test_stop_strings_wait_for_min_tokens(tokenizer: Tokenizer) -> None:
    ids = ids_of(tokenizer, "x x x x")
    params = SamplingParams(stop=("x",), min_tokens=2)
    for steps in chunkings(ids):
        updates = run(tokenizer, steps, params)
        assert text_of(updates) == "x x "
        assert sum(len(update.token_ids) for update in updates) == 3


def test_token_texts_join_to_the_whole_text(tokenizer: Tokenizer) -> None:
    ids = [*byte_tokens(tokenizer, "é🌶".encode()), *ids_of(tokenizer, " done"), *byte_tokens(tokenizer, b"\xf0\x9f")]
    for params in (SamplingParams(logprobs=0), SamplingParams(logprobs=2, stop=("nothing",))):
        updates = run(tokenizer, [ids[:3], ids[3:]], params)
        texts = [text for update in updates for text in update.token_texts]
        assert texts == ["", "é", "", "", "", "🌶", " done", "", "\ufffd"]
        assert "".join(texts) == text_of(updates)
    hidden = run(tokenizer, [[*ids_of(tokenizer, "a"), tokenizer.eos_token_ids[-1]]], SamplingParams(logprobs=0), finish=STOP)
    assert hidden[0].token_texts == ("a", "")
    assert run(tokenizer, [ids])[0].token_texts == ()


def test_many_requests_in_one_step(tokenizer: Tokenizer) -> None:
    detokenizer = IncrementalDetokenizer(tokenizer)
    texts = [f"number {index} 你好" for index in range(20)]
    outputs = [ids_of(tokenizer, text) for text in texts]
    for index in range(20):
        detokenizer.add(f"r{index}", SamplingParams(skip_special_tokens=index % 2 == 0), [])
    got = [""] * 20
    for position in range(max(map(len, outputs))):
        rows = [index for index, ids in enumerate(outputs) if position < len(ids)]
        updates = detokenizer.step([(f"r{index}", [outputs[index][position]], RUNNING) for index in rows])
        assert [update.request_id for update in updates] == [f"r{index}" for index in rows]
        for index, update in zip(rows, updates, strict=True):
            got[index] += update.text
    assert got == texts


def test_state_is_bounded_and_the_error_says_what_to_do(smollm: Tokenizer) -> None:
    detokenizer = IncrementalDetokenizer(smollm, max_states=2)
    for name in ("a", "b"):
        detokenizer.add(name, SamplingParams(), [])
    with pytest.raises(DetokenizerFullError, match=r"2 requests are held.*max_states=2.*Fix: remove\(\)"):
        detokenizer.add("c", SamplingParams(), [])
    detokenizer.remove("a")
    detokenizer.add("c", SamplingParams(), [])
    assert len(detokenizer) == 2


def test_the_default_bound(smollm: Tokenizer) -> None:
    detokenizer = IncrementalDetokenizer(smollm)
    for index in range(65_536):
        detokenizer.add(str(index), SamplingParams(), [])
    with pytest.raises(DetokenizerFullError):
        detokenizer.add("one more", SamplingParams(), [])


def test_wrong_use(smollm: Tokenizer) -> None:
    detokenizer = IncrementalDetokenizer(smollm)
    detokenizer.add("a", SamplingParams(), [])
    with pytest.raises(DetokenizerError, match="added before"):
        detokenizer.add("a", SamplingParams(), [])
    with pytest.raises(UnknownRequestError, match="'b' is not held"):
        detokenizer.step([("a", ids_of(smollm, "x"), RUNNING), ("b", [1], RUNNING)])
    # Nothing was taken from the entry before the faulty one.
    assert detokenizer.step([("a", ids_of(smollm, "y"), LENGTH)])[0].text == "y"
    with pytest.raises(ValueError, match="max_states"):
        IncrementalDetokenizer(smollm, max_states=0)
    with pytest.raises(ValueError, match="non-empty"):
        detokenizer.add("c", SamplingParams(stop=("",)), [])
    detokenizer.remove("never added")
