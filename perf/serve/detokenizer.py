"""Detokenizing 64 concurrent streams, one token of each in every step: what the front end does while the engine decodes.

Peers, in the same run on the same ids: decoding the whole output again at every step (what a server without increments does),
and the `tokenizers` library's own `DecodeStream`, which does neither stop strings nor the end of an output.
"""

from __future__ import annotations

import gc
import importlib.metadata
import random
import time
from collections.abc import Callable, Iterator, Sequence

from tokenizers import Tokenizer as Backend
from tokenizers.decoders import DecodeStream

from perf.harness import Benchmark, Context, Row
from tokenspeed_engine.checkpoint import ModelNotFoundError, default_model_path
from tokenspeed_engine.tokenizer import IncrementalDetokenizer, Tokenizer, load_tokenizer
from tokenspeed_engine.tokenizer.detokenize import NewTokens
from tokenspeed_engine.types import FinishReason, SamplingParams

NUM_STREAMS = 64
NUM_TOKENS = 512
REPEATS = 5

_SENTENCES = {
    "English": (
        "The scheduler admits a request when its pages fit.",
        "A river runs through the old town, and boats pass under its bridges.",
        "Nobody knew how the machine worked, but it always gave an answer.",
        "She wrote the report on Monday; it was read by twelve people.",
    ),
    "code": (
        "def add(left: int, right: int) -> int:\n    return left + right\n",
        "for (size_t i = 0; i < count; ++i) {\n\ttotal += values[i] * 2;\n}\n",
        'if not path.exists():\n    raise FileNotFoundError(f"no file at {path}")\n',
        "SELECT name, COUNT(*) FROM users WHERE age >= 18 GROUP BY name;\n",
    ),
    "Chinese and emoji": (
        "今天天气很好，我们去公园散步吧。",
        "这个模型的回答又快又准确！😀🌶️",
        "数据库里一共有一千两百三十四条记录。",
        "他说：“没问题，明天见。”👩‍👩‍👧‍👦🚀",
    ),
}
_STOPS = ("\nUser:", "Observation:", "</answer>", "###")


def _streams(tokenizer: Tokenizer, kind: str, num_tokens: int) -> list[list[int]]:
    generator = random.Random(kind)
    full_stop = tokenizer.encode(".", add_special_tokens=False)[0]
    out = []
    for _ in range(NUM_STREAMS):
        ids: list[int] = []
        while len(ids) < num_tokens:
            ids += tokenizer.encode(generator.choice(_SENTENCES[kind]) + " ", add_special_tokens=False)
        # DecodeStream has no end of output: it would keep back a character that the last token leaves unfinished.
        out.append([*ids[: num_tokens - 1], full_stop])
    return out


def _steps(streams: Sequence[Sequence[int]]) -> list[list[NewTokens]]:
    """What the core sends: one token of every stream in each step."""
    last = len(streams[0]) - 1
    finish = [FinishReason.RUNNING] * last + [FinishReason.LENGTH]
    return [[(str(index), (ids[position],), finish[position]) for index, ids in enumerate(streams)] for position in range(last + 1)]


def _ours(tokenizer: Tokenizer, steps: Sequence[Sequence[NewTokens]], params: SamplingParams) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer)
    texts: dict[str, list[str]] = {name: [] for name, _, _ in steps[0]}
    for name in texts:
        detokenizer.add(name, params, [])
    for step in steps:
        for update in detokenizer.step(step):
            texts[update.request_id].append(update.text)
    return ["".join(parts) for parts in texts.values()]


def _naive(backend: Backend, streams: Sequence[Sequence[int]]) -> list[str]:
    shown = [""] * len(streams)
    texts: list[list[str]] = [[] for _ in streams]
    last = len(streams[0])
    for end in range(1, last + 1):
        for index, ids in enumerate(streams):
            whole = backend.decode(list(ids[:end]), skip_special_tokens=True)
            if end == last or not whole.endswith("\ufffd"):
                texts[index].append(whole[len(shown[index]) :])
                shown[index] = whole
    return ["".join(parts) for parts in texts]


def _decode_stream(backend: Backend, streams: Sequence[Sequence[int]]) -> list[str]:
    decoders = [DecodeStream(skip_special_tokens=True) for _ in streams]
    texts: list[list[str]] = [[] for _ in streams]
    for position in range(len(streams[0])):
        for index, ids in enumerate(streams):
            delta = decoders[index].step(backend, ids[position])
            if delta:
                texts[index].append(delta)
    return ["".join(parts) for parts in texts]


def _best_of(functions: Sequence[Callable[[], list[str]]], repeats: int) -> list[float]:
    """Least wall time of each in seconds; the samples alternate, and all must give the same text."""
    best = [float("inf")] * len(functions)
    texts: list[list[str]] = [[] for _ in functions]
    for _ in range(repeats):
        for index, function in enumerate(functions):
            gc.collect()
            start = time.perf_counter()
            texts[index] = function()
            best[index] = min(best[index], time.perf_counter() - start)
    if any(text != texts[0] for text in texts[1:]):
        raise AssertionError("detokenizer benchmark: the peers gave another text")
    return best


def run(context: Context) -> Iterator[Row]:
    """Yield a row for each kind of text and peer."""
    try:
        tokenizer = load_tokenizer(default_model_path())
    except ModelNotFoundError as error:
        yield Row("detokenizer", None, None, "tok/s", note=str(error))
        return
    backend = tokenizer.backend
    version = importlib.metadata.version("tokenizers")
    num_tokens = 32 if context.quick else NUM_TOKENS
    repeats = 1 if context.quick else REPEATS
    for kind in _SENTENCES:
        streams = _streams(tokenizer, kind, num_tokens)
        steps = _steps(streams)
        total = NUM_STREAMS * num_tokens
        ours_s, stream_s, naive_s = _best_of(
            [
                lambda steps=steps: _ours(tokenizer, steps, SamplingParams()),  # type: ignore[misc]
                lambda streams=streams: _decode_stream(backend, streams),  # type: ignore[misc]
                lambda streams=streams: _naive(backend, streams),  # type: ignore[misc]
            ],
            repeats,
        )
        with_stops_s = _best_of(
            [lambda steps=steps: _ours(tokenizer, steps, SamplingParams(stop=_STOPS))],  # type: ignore[misc]
            repeats,
        )[0]
        case = f"{NUM_STREAMS} streams x {num_tokens} tokens, {kind}"
        yield Row(case, total / ours_s, total / naive_s, "tok/s", "whole decode at every step")
        yield Row(case, total / ours_s, total / stream_s, "tok/s", f"tokenizers {version} DecodeStream")
        yield Row(
            f"{case}, {len(_STOPS)} stop strings",
            total / with_stops_s,
            total / stream_s,
            "tok/s",
            f"tokenizers {version} DecodeStream without stop strings",
        )


BENCHMARK = Benchmark(
    name="serve.detokenizer", summary="text deltas of 64 concurrent streams, against full decoding and DecodeStream", run=run
)
