"""For random tokens, every split into steps gives the text of decoding the whole, over several kinds of tokenizer."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizer_texts import TEXTS, random_text
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from tokenspeed_engine.tokenizer import IncrementalDetokenizer, Tokenizer
from tokenspeed_engine.types import FinishReason, SamplingParams

RUNNING, STOP, LENGTH = FinishReason.RUNNING, FinishReason.STOP, FinishReason.LENGTH
STOPS = ("the", " ", "\n", "。", "好", "😀", "ab", "<|im_end|>", "\ufffd", "e", "is Paris", "\u200d", "x²", "12")


def random_ids(tokenizer: Tokenizer, generator: random.Random, longest: int) -> list[int]:
    """Any ids, ids of single bytes, special ids, and ids of real text."""
    partial = tokenizer_bytes(tokenizer)
    special = sorted(tokenizer.special_token_ids)
    ids: list[int] = []
    while len(ids) < longest:
        kind = generator.random()
        if kind < 0.3:
            ids.append(generator.randrange(tokenizer.vocab_size))
        elif kind < 0.55:
            ids.extend(generator.choices(partial, k=generator.randint(1, 4)))
        elif kind < 0.65:
            ids.append(generator.choice(special))
        else:
            text = generator.choice([random_text(generator, 12), generator.choice(list(TEXTS.values()))[:12]])
            ids.extend(tokenizer.encode(text, add_special_tokens=False))
    return ids[:longest]


_BYTES: dict[int, list[int]] = {}


def tokenizer_bytes(tokenizer: Tokenizer) -> list[int]:
    """Ids that are no whole characters."""
    key = id(tokenizer)
    if key not in _BYTES:
        names = range(tokenizer.vocab_size)
        _BYTES[key] = [i for i in names if "\ufffd" in tokenizer.token_text(i)] or [0]
    return _BYTES[key]


def cut(ids: Sequence[int], generator: random.Random) -> list[list[int]]:
    """A random split into steps; some steps bring nothing."""
    steps: list[list[int]] = [[]]
    for token_id in ids:
        steps[-1].append(token_id)
        while generator.random() < 0.5:
            steps.append([])
    return steps


def first_stop(text: str, stops: Sequence[str]) -> tuple[str, str | None]:
    """First end, then longest: the rule by the letter, on the whole text."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end - len(stop)], stop
    return text, None


def stream(
    tokenizer: Tokenizer, steps: Sequence[Sequence[int]], params: SamplingParams, prompt: Sequence[int] = ()
) -> tuple[str, str | int | None, list[int], list[str]]:
    """Joined text, stop reason, counted tokens and the deltas."""
    detokenizer = IncrementalDetokenizer(tokenizer)
    detokenizer.add("r", params, prompt)
    deltas: list[str] = []
    counted: list[int] = []
    for index, ids in enumerate(steps):
        finish = LENGTH if index == len(steps) - 1 else RUNNING
        update = detokenizer.step([("r", ids, finish)])[0]
        deltas.append(update.text)
        counted += update.token_ids
        if update.finish_reason is not RUNNING:
            return "".join(deltas), update.stop_reason, counted, deltas
    raise AssertionError("no update ended the request")


def whole(tokenizer: Tokenizer, ids: Sequence[int], skip: bool) -> str:
    """What the library itself decodes."""
    return str(tokenizer.backend.decode(list(ids), skip_special_tokens=skip))


PROPERTY = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
SEEDS = st.integers(0, 2**32 - 1)


@pytest.fixture(scope="session", params=["bytes", "offsets"])
def either(request: pytest.FixtureRequest, tokenizer: Tokenizer) -> Tokenizer:
    """Both tokenizers, decoded by bytes, and through the library as if their tokens had no bytes of their own."""
    if request.param == "bytes":
        assert tokenizer.pieces is not None
        return tokenizer
    general = Tokenizer(
        tokenizer.backend,
        source=tokenizer.source,
        vocab_size=tokenizer.vocab_size,
        eos_token_ids=tokenizer.eos_token_ids,
    )
    general.pieces = None
    return general


@PROPERTY
@given(seed=SEEDS, skip=st.booleans())
def test_joined_deltas_are_the_whole_text(either: Tokenizer, seed: int, skip: bool) -> None:
    generator = random.Random(seed)
    ids = random_ids(either, generator, generator.randint(1, 60))
    expected = whole(either, ids, skip)
    params = SamplingParams(skip_special_tokens=skip)
    one_by_one = [[token_id] for token_id in ids]
    for steps in (one_by_one, [ids], cut(ids, generator), cut(ids, generator)):
        text, reason, counted, _ = stream(either, steps, params)
        assert (text, reason, counted) == (expected, None, ids)


@PROPERTY
@given(seed=SEEDS, skip=st.booleans(), include=st.booleans())
def test_stop_strings_cut_the_same_text_for_every_split(either: Tokenizer, seed: int, skip: bool, include: bool) -> None:
    generator = random.Random(seed)
    ids = random_ids(either, generator, generator.randint(1, 40))
    text = whole(either, ids, skip)
    stops = generator.sample(STOPS, generator.randint(1, 3))
    if text and generator.random() < 0.7:
        start = generator.randrange(len(text))
        stops.append(text[start : start + generator.randint(1, 6)])
    before, stop = first_stop(text, stops)
    expected = before + stop if include and stop else before
    params = SamplingParams(stop=tuple(stops), skip_special_tokens=skip, include_stop_str_in_output=include)
    counts = set()
    for steps in ([[token_id] for token_id in ids], [ids], cut(ids, generator), cut(ids, generator)):
        shown, reason, counted, _ = stream(either, steps, params)
        assert (shown, reason) == (expected, stop)
        assert counted == ids[: len(counted)]
        counts.add(len(counted))
    assert len(counts) == 1, "the number of counted tokens depends on the split"
    if stop is None:
        assert counts == {len(ids)}
    else:
        # The last counted token is the one that completes the stop string, and none before it does.
        count = counts.pop()
        assert first_stop(whole(either, ids[:count], skip), stops)[1] is not None
        if count > 1:
            certain = stream(either, [ids[: count - 1], []], SamplingParams(skip_special_tokens=skip))[3][0]
            assert first_stop(certain, stops)[1] is None


@PROPERTY
@given(seed=SEEDS, skip=st.booleans())
def test_after_a_prompt_the_deltas_are_what_the_output_adds(tokenizer: Tokenizer, seed: int, skip: bool) -> None:
    generator = random.Random(seed)
    prompt = random_ids(tokenizer, generator, generator.randint(0, 12))
    ids = random_ids(tokenizer, generator, generator.randint(1, 12))
    params = SamplingParams(skip_special_tokens=skip)
    texts = {
        stream(tokenizer, steps, params, prompt)[0] for steps in ([[token_id] for token_id in ids], [ids], cut(ids, generator))
    }
    alone = whole(tokenizer, ids, skip)
    seen, both = whole(tokenizer, prompt, skip), whole(tokenizer, [*prompt, *ids], skip)
    if not seen.endswith("\ufffd") or both == seen + alone:
        assert texts == {alone}
    else:
        # The prompt ends inside a character, and the output goes on with it.
        assert len(texts) == 1
        assert both.startswith(seen[:-1])
        assert both.endswith(texts.pop())


@pytest.mark.parametrize("seed", range(3))
def test_no_delta_has_half_a_character_in_real_text(either: Tokenizer, seed: int) -> None:
    generator = random.Random(seed)
    for name, text in TEXTS.items():
        ids = either.encode(text, add_special_tokens=False)
        if "\ufffd" in whole(either, ids, False) or not ids:
            continue
        deltas = stream(either, cut(ids, generator), SamplingParams(skip_special_tokens=False))[3]
        assert not any("\ufffd" in delta for delta in deltas), name


def _small(vocabulary: Sequence[str], decoder: decoders.Decoder, special: Sequence[str] = ("[SEP]",)) -> Tokenizer:
    backend = Backend(models.WordLevel({token: i for i, token in enumerate(vocabulary)}, unk_token=vocabulary[0]))
    backend.decoder = decoder
    backend.add_special_tokens(list(special))
    return Tokenizer(backend, source="test")


WORDS = ["▁the", "▁cat", "s", "▁", "▁▁", "你", "好", "ing", ".", "▁don", "'t", "n't", "##ly", "hello", "▁é"]
BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in (*"é🌶A ".encode(), 0xFF, 0xE4, 0xB8)]
SENTENCEPIECE = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
LLAMA = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
BYTES_THEN_METASPACE = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
DECODERS = {
    "wordpiece": decoders.WordPiece(),
    "metaspace": decoders.Metaspace(),
    "metaspace_never": decoders.Metaspace(prepend_scheme="never"),
    "byte_fallback_metaspace": BYTES_THEN_METASPACE,
    "sentencepiece": SENTENCEPIECE,
    "llama": LLAMA,
}


@pytest.mark.parametrize("name", DECODERS)
@PROPERTY
@given(seed=SEEDS, skip=st.booleans())
def test_other_decoders(name: str, seed: int, skip: bool) -> None:
    vocabulary = WORDS if "byte" not in name and name not in {"sentencepiece", "llama"} else [*WORDS, *BYTE_TOKENS]
    tokenizer = _small(vocabulary, DECODERS[name])
    assert (tokenizer.pieces is None) == (name not in {"sentencepiece", "llama"})
    generator = random.Random(seed)
    ids = generator.choices(range(tokenizer.vocab_size), k=generator.randint(1, 30))
    params = SamplingParams(skip_special_tokens=skip)
    # For runs of byte tokens that are no UTF-8 the library writes U+FFFD for every byte of the run; by bytes, only the fault.
    expected = tokenizer.decode(ids, skip)
    if "\ufffd" not in whole(tokenizer, ids, skip):
        assert expected == whole(tokenizer, ids, skip)
    for steps in ([[token_id] for token_id in ids], [ids], cut(ids, generator)):
        assert stream(tokenizer, steps, params)[0] == expected


@pytest.mark.parametrize("name", DECODERS)
def test_other_decoders_after_a_prompt(name: str) -> None:
    tokenizer = _small(WORDS, DECODERS[name])
    the, cat, s = (tokenizer.token_id(token) for token in ("▁the", "▁cat", "s"))
    assert the is not None
    assert cat is not None
    assert s is not None
    shown = stream(tokenizer, [[cat], [s]], SamplingParams(), [the])[0]
    assert shown == tokenizer.decode([the, cat, s]).removeprefix(tokenizer.decode([the]))


@pytest.mark.parametrize("kind", ["bytes", "offsets"])
def test_output_that_is_never_text_costs_no_more_than_text(smollm: Tokenizer, kind: str) -> None:
    tokenizer = Tokenizer(smollm.backend, source="test", vocab_size=smollm.vocab_size)
    if kind == "offsets":
        tokenizer.pieces = None
    broken = [token_id for token_id in tokenizer_bytes(smollm) if smollm.token_bytes(token_id)[:1] < b"\xc0"]
    ids = random.Random(0).choices(broken, k=20_000)
    text, _, _, deltas = stream(tokenizer, [[token_id] for token_id in ids], SamplingParams())
    assert text == whole(smollm, ids, skip=True)
    assert max(map(len, deltas)) < 10


@pytest.mark.parametrize("name", DECODERS)
def test_hidden_tokens_leave_no_trace(name: str) -> None:
    tokenizer = _small([*WORDS, *BYTE_TOKENS], DECODERS[name])
    the, cat, hidden = (tokenizer.token_id(token) for token in ("▁the", "▁cat", "[SEP]"))
    assert the is not None
    assert cat is not None
    assert hidden is not None
    run_of_bytes = [tokenizer.token_id(f"<0x{byte:02X}>") for byte in "é".encode()]
    first, second = (token_id for token_id in run_of_bytes if token_id is not None)
    for ids in ([the, *[hidden] * 600, cat], [the, first, hidden, second, cat]):
        expected = tokenizer.decode([token_id for token_id in ids if token_id != hidden])
        assert stream(tokenizer, [[token_id] for token_id in ids], SamplingParams())[0] == expected
