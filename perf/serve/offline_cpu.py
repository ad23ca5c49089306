"""The engine's loop in process against transformers' `generate`, on the CPU: the default model, the same weights, float32.

Cases: one stream and 16 equal streams, decoding alone; the 16 with their prefill; streams of unequal lengths that arrive faster
than they can be served. In the last one both sides hold at most 16 streams; ours adds and drops a stream at every step, the peer
takes what has arrived, pads it to one batch, and generates until the longest of it is done. Only the tokens asked for count.

Options: `--set threads=2`, `--set requests=32`.
"""

from __future__ import annotations

import importlib.metadata
import math
import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from perf.harness import Benchmark, Context, Row
from tokenspeed_engine.checkpoint import ModelNotFoundError, default_model_path, open_checkpoint
from tokenspeed_engine.executor import OfflineEngine
from tokenspeed_engine.types import SamplingParams

STREAMS = 16
PROMPT_TOKENS = 32
_READ_BYTES = 512 * 2**20


@dataclass(frozen=True, slots=True)
class Job:
    """One request: when it arrives after the start, its prompt, and how many tokens it wants."""

    arrival_s: float
    prompt: list[int]
    num_new: int


def jobs(count: int, seed: int, *, vocab_size: int, unequal: bool, num_new: int) -> list[Job]:
    """Random prompts; unequal ones have log-uniform lengths (8..256 in, 4..128 out) and arrive 20 times a second."""
    rng = random.Random(seed)
    found, now_s = [], 0.0
    for _ in range(count):
        length = round(8 * 32 ** rng.random()) if unequal else PROMPT_TOKENS
        wanted = round(4 * 32 ** rng.random()) if unequal else num_new
        found.append(Job(now_s, [rng.randrange(100, vocab_size) for _ in range(length)], wanted))
        now_s += rng.expovariate(20.0) if unequal else 0.0
    return found


class Peer:
    """transformers' model with the checkpoint's weights, and its `generate`."""

    def __init__(self) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        checkpoint = open_checkpoint()
        config = {key: value for key, value in checkpoint.config.items() if key not in ("architectures", "model_type")}
        self.model = LlamaForCausalLM(LlamaConfig(**config, eos_token_id=None, bos_token_id=None)).float().eval()
        state = {name: checkpoint.read(name).float() for name in checkpoint.names()}
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
        self.model.load_state_dict(state)
        self.model.generation_config.eos_token_id = None
        self.model.generation_config.pad_token_id = 0

    @torch.inference_mode()
    def run(self, work: list[Job]) -> float:
        """Serve the jobs; returns the makespan in seconds."""
        start = time.perf_counter()
        waiting = list(work)
        while waiting:
            now_s = time.perf_counter() - start
            batch = [job for job in waiting if job.arrival_s <= now_s][:STREAMS]
            if not batch:
                time.sleep(waiting[0].arrival_s - now_s)
                continue
            waiting = waiting[len(batch) :]
            longest = max(len(job.prompt) for job in batch)
            ids = torch.tensor([[0] * (longest - len(job.prompt)) + job.prompt for job in batch])
            mask = torch.tensor([[0] * (longest - len(job.prompt)) + [1] * len(job.prompt) for job in batch])
            self.model.generate(ids, attention_mask=mask, max_new_tokens=max(job.num_new for job in batch), do_sample=False)
        return time.perf_counter() - start


class Ours:
    """Scheduler and executor in this process."""

    def __init__(self) -> None:
        self.engine = OfflineEngine(
            device="cpu",
            quantization="none",
            max_model_len=1024,
            num_pages=1024,
            max_num_seqs=STREAMS,
            max_num_batched_tokens=512,
            enable_prefix_caching=False,
        )

    def run(self, work: list[Job]) -> float:
        """Serve the jobs; returns the makespan in seconds."""
        start = time.perf_counter()
        waiting = list(work)
        while waiting or self.engine.has_work():
            now_s = time.perf_counter() - start
            while waiting and waiting[0].arrival_s <= now_s:
                job = waiting.pop(0)
                self.engine.submit(job.prompt, SamplingParams(temperature=0.0, max_tokens=job.num_new, ignore_eos=True))
            if not self.engine.step() and waiting:
                time.sleep(max(0.0, waiting[0].arrival_s - (time.perf_counter() - start)))
        return time.perf_counter() - start


def read_bandwidth() -> float:
    """Bytes per second that all threads read from memory."""
    data = torch.ones(_READ_BYTES // 4)  # zeros would all be one page that was never written
    best_s = min(_timed(data.sum) for _ in range(5))
    return _READ_BYTES / best_s


def _timed(function: Any) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def _row(
    case: str,
    work: list[Job],
    ours: Ours,
    peer: Peer | None,
    repeats: int,
    goal: float,
    note: str,
    *,
    decode_only: bool = False,
    limit: float | None = None,
) -> Row:
    """Tokens per second; `decode_only` leaves out the first tokens, and the time that they alone take, on both sides."""
    skipped = 1 if decode_only else 0
    first = [Job(job.arrival_s, job.prompt, 1) for job in work]
    samples: tuple[list[float], list[float]] = ([], [])
    for _ in range(repeats):  # alternating, so that a busy machine slows both
        for side, times in zip((ours, peer), samples, strict=True):
            if side is not None:
                prefill_s = side.run(first) if decode_only else 0.0
                times.append(side.run(work) - prefill_s)
    tokens = sum(job.num_new - skipped for job in work)
    return Row(
        case,
        tokens / statistics.median(samples[0]),
        tokens / statistics.median(samples[1]) if samples[1] else None,
        "tok/s",
        f"transformers {importlib.metadata.version('transformers')} generate" if peer is not None else "",
        goal=goal,
        note=note,
        limit=limit,
    )


def run(context: Context) -> Iterator[Row]:
    """Measure the cases."""
    try:
        default_model_path()
    except ModelNotFoundError as error:
        yield Row("default model", None, None, "tok/s", note=str(error))
        return
    if "threads" in context.options:
        torch.set_num_threads(int(context.options["threads"]))
    ours = Ours()
    note, peer = "", None
    try:
        peer = Peer()
    except ImportError as error:
        note = f"transformers is not installed: {error}"
    note = note or f"{torch.get_num_threads()} threads, prompts of {PROMPT_TOKENS} tokens"
    vocab_size = ours.engine.executor.vocab_size
    num_new = 8 if context.quick else 64
    repeats = 1 if context.quick else 3
    warm = jobs(1, 0, vocab_size=vocab_size, unequal=False, num_new=4)  # code generation and allocations belong to no case
    ours.run(warm)
    if peer is not None:
        peer.run(warm)
    # One stream reads every weight once for each token: the embedding as the output head.
    checkpoint = open_checkpoint()
    weight_bytes = sum(4 * math.prod(checkpoint.shape(name)) for name in checkpoint.names())
    one = jobs(1, 1, vocab_size=vocab_size, unequal=False, num_new=num_new)
    limit = read_bandwidth() / weight_bytes
    case = f"1 stream, decode of {num_new} tokens, fp32"
    yield _row(case, one, ours, peer, repeats, 1.3, note, decode_only=True, limit=limit)
    equal = jobs(STREAMS, 2, vocab_size=vocab_size, unequal=False, num_new=num_new)
    case = f"{STREAMS} equal streams, decode of {num_new} tokens, fp32"
    yield _row(case, equal, ours, peer, repeats, 2.0, note, decode_only=True)
    yield _row(f"{STREAMS} equal streams, prefill and {num_new} new tokens, fp32", equal, ours, peer, repeats, 2.0, note)
    count = int(context.options.get("requests", 6 if context.quick else 32))
    unequal = jobs(count, 3, vocab_size=vocab_size, unequal=True, num_new=num_new)
    yield _row(
        f"{count} requests of unequal lengths, {STREAMS} streams, saturating arrivals, fp32",
        unequal,
        ours,
        peer,
        repeats,
        4.0,
        f"{torch.get_num_threads()} threads; useful tokens / makespan",
    )


BENCHMARK = Benchmark("serve.offline_cpu", "engine loop in process against transformers' generate, on the CPU", run)
