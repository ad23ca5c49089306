"""A core process with the real loop, scheduler and link, whose executor samples by arithmetic and misbehaves on request.

Run as a program in place of the real core. The first prompt token may be a command, see Command.
"""

from __future__ import annotations

import enum
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tokenspeed_engine.config import CoreConfig
from tokenspeed_engine.core_process import CoreParts, LoadError, ReportProgress, run_core
from tokenspeed_engine.ipc import LoadProgress
from tokenspeed_engine.scheduler import Scheduler, SchedulerConfig
from tokenspeed_engine.types import ModelInfo, SamplingParams

VOCAB = 49152
FIRST_TOKEN = 5000  # ids from here on are ordinary text in the tokenizer of the tests


class Command(enum.IntEnum):
    """What the executor does when a prompt begins with this id."""

    RAISE = 100  # at the third token
    EXIT = 101  # end the process at the third token
    HANG = 102  # never return from the third token's step
    STOP = 103  # stop the whole process (no heartbeat either)
    SLOW = 104  # a second for each step
    REFUSE = 105  # not a request that can run
    NEGATIVE_HIT = 106  # report -1 cached tokens


def token_of(prompt: Sequence[int], index: int) -> int:
    """What is sampled: different for each prompt and index."""
    return FIRST_TOKEN + (sum(prompt) * 31 + index * 17) % 1000


@dataclass
class Result:
    token_ids: np.ndarray[Any, np.dtype[np.int32]]
    logprobs: Sequence[Any] = ()
    prompt_logprobs: dict[int, Any] = field(default_factory=dict)


class ScriptedExecutor:
    """Arithmetic in place of a model."""

    def __init__(self, step_s: float) -> None:
        self.step_s = step_s
        self.prompts: dict[int, tuple[int, ...]] = {}

    def add_request(self, request_id: int, params: SamplingParams, prompt_token_ids: Sequence[int]) -> None:
        if prompt_token_ids and prompt_token_ids[0] == Command.REFUSE:
            raise ValueError("this request cannot run")
        self.prompts[request_id] = tuple(prompt_token_ids)

    def remove_request(self, request_id: int) -> None:
        del self.prompts[request_id]

    def execute(self, plan: Any, page_table: Any) -> Result:
        time.sleep(self.step_s)
        sampled = []
        for number, index in zip(plan.request_ids[plan.sample_rows].tolist(), plan.output_index.tolist(), strict=True):
            prompt = self.prompts[number]
            self.misbehave(prompt[0], index)
            sampled.append(token_of(prompt, index))
        return Result(np.array(sampled, dtype=np.int32))

    def misbehave(self, command: int, index: int) -> None:
        if command == Command.SLOW:
            time.sleep(1.0)
        if index < 2:
            return
        if command == Command.RAISE:
            raise RuntimeError("scripted failure")
        if command == Command.EXIT:
            os._exit(77)
        if command == Command.HANG:
            while True:
                time.sleep(60)
        if command == Command.STOP:
            os.kill(os.getpid(), signal.SIGSTOP)


class NegativeHitScheduler:
    """The real scheduler, whose commits report -1 cached tokens (a statistic gone wrong)."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scheduler, name)

    def commit(self, step: int, sampled: Any, step_time_us: int = 0) -> Any:
        result = self._scheduler.commit(step, sampled, step_time_us)

        class Altered:
            request_ids = result.request_ids
            token_ids = result.token_ids
            finish_reasons = result.finish_reasons
            num_cached_tokens = np.full_like(result.num_cached_tokens, -1)
            num_host_cached_tokens = np.full_like(result.num_cached_tokens, -1)

        return Altered


def build(config: CoreConfig, report: ReportProgress) -> CoreParts:
    """Parts by `model`: comma-separated words such as `step=0.01`."""
    words = dict(word.partition("=")[::2] for word in config.model.model.split(",") if word)
    for done in range(3):
        report(LoadProgress("weights", done + 1, 3, f"tensor {done}"))
    if "unloadable" in words:
        raise LoadError("model: expected something loadable, got this\nFix: choose another model")
    if "broken" in words:
        raise KeyError("broken while loading")
    if "load" in words:
        time.sleep(float(words["load"]))
    if "once" in words:  # works the first time only
        marker = words["once"]
        if os.path.exists(marker):
            os._exit(9)
        with open(marker, "w", encoding="ascii"):
            pass
    scheduler: Any = Scheduler(
        SchedulerConfig(
            num_pages=config.cache.num_pages or 256,
            page_size=config.cache.page_size,
            max_num_seqs=config.scheduling.max_num_seqs or 64,
            max_num_batched_tokens=config.scheduling.max_num_batched_tokens or 128,
            max_model_len=config.model.max_model_len or 512,
        )
    )
    if "negative-hit" in words:
        scheduler = NegativeHitScheduler(scheduler)
    info = ModelInfo(
        "scripted",
        "Scripted",
        VOCAB,
        config.model.max_model_len or 512,
        scheduler.stats().num_pages,
        config.cache.page_size,
        (2,),
        "int32",
        "cpu",
    )
    return CoreParts(ScriptedExecutor(float(words.get("step", 0.001))), scheduler, info, 128)


if __name__ == "__main__":
    sys.exit(run_core(build))
