"""The engine with quantized weights against llama.cpp on the same GGUF file, on the CPU: speed and memory.

Each side runs in a process of its own, with the same number of threads and the same room for keys and values; they take turns, one
waiting while the other works, so that a busy machine slows both. Prompts are random. Decoding is greedy and its rate counts the
tokens after the first; prefill is the time to the first token. The peer decodes streams in one batch, as its server does.

Memory is what a process holds after all the work, less what it held once its libraries were imported: weights, keys and values,
and working memory, whatever their names on either side. The peer's weights are a mapped file, whose pages count once they are read.

The peer's interpreter: the variable PERF_LLAMA_CPP_PYTHON, else this one if it has llama_cpp. Options: `--set threads=2`,
`--set model=FILE`, `--set rounds=5`, `--set quantization=auto`, `--set kv_cache_dtype=float16`.
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from perf.harness import Benchmark, Context, Row
from tokenspeed_engine.checkpoint import ModelNotFoundError, default_model_path

STREAMS = 8
TOKENS = 2048  # room for keys and values
PROMPT_TOKENS = 32
_REPOSITORY = Path(__file__).resolve().parents[2]
_FIRST_ID, _LAST_ID = 100, 40_000


class Side:
    """A process that answers commands; see `llama_cpp_peer`."""

    def __init__(self, command: list[str], first: dict[str, Any], environment: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
        )
        self.name: str = self.ask(first)["name"]

    def ask(self, command: dict[str, Any]) -> dict[str, Any]:
        """Send a command, and wait for the answer."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self._process.args} ended with status {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def run(self, prompts: list[list[int]], num_new: int) -> dict[str, Any]:
        """Prefill and decode."""
        return self.ask({"do": "run", "prompts": prompts, "num_new": num_new})

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()


def _prompts(rng: random.Random, streams: int, length: int) -> list[list[int]]:
    return [[rng.randrange(_FIRST_ID, _LAST_ID) for _ in range(length)] for _ in range(streams)]


def _peer_python() -> str | None:
    named = os.environ.get("PERF_LLAMA_CPP_PYTHON")
    return named or (sys.executable if importlib.util.find_spec("llama_cpp") else None)


def _measure(sides: list[Side], rounds: int, streams: int, length: int, num_new: int, key: str) -> list[float]:
    """Median seconds of each side, in turns; every round has its own prompts, the same for both."""
    rng = random.Random(streams * 1000 + length)
    samples: list[list[float]] = [[] for _ in sides]
    for index in range(rounds + 1):
        prompts = _prompts(rng, streams, length)
        for side, times in zip(sides, samples, strict=True):
            seconds = side.run(prompts, num_new)[key]
            if index:  # the first round makes buffers and code
                times.append(seconds)
    return [statistics.median(times) for times in samples]


def run(context: Context) -> Iterator[Row]:
    """Measure the cases."""
    try:
        path = context.options.get("model") or str(default_model_path())
    except ModelNotFoundError as error:
        yield Row("default model", None, None, "tok/s", note=str(error))
        return
    threads = int(context.options.get("threads", 2))
    rounds = int(context.options.get("rounds", 1 if context.quick else 5))
    # The peer's cache is float16.
    defaults = {"quantization": "auto", "kv_cache_dtype": "float16"}
    options = {name: context.options.get(name, value) for name, value in defaults.items()}
    first = {"path": path, "threads": threads, "streams": STREAMS, "tokens": TOKENS, "options": options}
    # The engine's own processes let idle threads spin only briefly, as its launcher sets it.
    environment = {
        "GOMP_SPINCOUNT": "5000",
        "OMP_NUM_THREADS": str(threads),
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(_REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH", "")])]),
    }
    sides = [Side([sys.executable, "-m", "perf.serve.llama_cpp_ours"], first, environment)]
    python, note, peer = _peer_python(), f"{threads} threads, {sides[0].name}", ""
    try:
        if python is None:
            note += "; no peer: llama_cpp is not installed here, and PERF_LLAMA_CPP_PYTHON names no interpreter"
        else:
            peer_file = Path(__file__).with_name("llama_cpp_peer.py")
            try:
                # -P: the folder of the script holds a module of the library's name, this one.
                sides.append(Side([python, "-P", str(peer_file)], first, dict(os.environ)))
                peer = sides[1].name
            except (OSError, RuntimeError) as error:
                note += f"; no peer: {error}"
        num_new = 8 if context.quick else 64
        yield from _rows(sides, rounds, num_new, peer, note)
    finally:
        for side in sides:
            side.close()


def _rows(sides: list[Side], rounds: int, num_new: int, peer: str, note: str) -> Iterator[Row]:
    def row(case: str, figures: list[float], unit: str, goal: float | None, **extra: Any) -> Row:
        other = figures[1] if len(figures) > 1 else None
        return Row(case, figures[0], other, unit, peer, goal=goal, **{"note": note, **extra})

    decoded = _measure(sides, rounds, 1, PROMPT_TOKENS, num_new, "decode_s")
    yield row(f"1 stream, decode of {num_new} tokens", [(num_new - 1) / s for s in decoded], "tok/s", 1.2)
    prefilled = _measure(sides, rounds, 1, 512, 1, "prefill_s")
    yield row("prefill of 512 tokens", [512 / s for s in prefilled], "tok/s", 1.5)
    decoded = _measure(sides, rounds, STREAMS, PROMPT_TOKENS, num_new, "decode_s")
    rates = [STREAMS * (num_new - 1) / s for s in decoded]
    yield row(f"{STREAMS} streams, decode of {num_new} tokens each", rates, "tok/s", 2.0)
    memory = [side.ask({"do": "memory"}) for side in sides]
    held = [(one["resident_bytes"] - one["imported_bytes"]) / 1e6 for one in memory]
    named = "; ".join(
        f"{who}: " + ", ".join(f"{name} {size / 1e6:.0f}" for name, size in one["buffers"].items())
        for who, one in zip(("ours", "peer"), memory, strict=False)
    )
    # At most 1.3 times the peer's is asked for: as a gain, 1 / 1.3.
    case = f"weights, KV of {TOKENS} tokens and working memory"
    yield row(case, held, "MB", 1 / 1.3, higher_is_better=False, note=f"MB: {named}; {note}")
    total = [one["resident_bytes"] / 1e6 for one in memory]
    yield row("resident memory of the process, interpreter and libraries included", total, "MB", None, higher_is_better=False)


BENCHMARK = Benchmark(
    name="serve.llama_cpp",
    summary="the engine with quantized weights against llama.cpp on the same GGUF file: speed and memory",
    run=run,
)
