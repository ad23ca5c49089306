"""The engine without a server: scheduler and executor in this process."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from tokenspeed_engine.config import CacheConfig, ModelConfig, SchedulingConfig
from tokenspeed_engine.executor.executor import ModelExecutor, StepResult
from tokenspeed_engine.executor.limits import scheduler_config
from tokenspeed_engine.executor.warmup import warm_up
from tokenspeed_engine.scheduler import Plan, Scheduler, SubmitStatus
from tokenspeed_engine.types import FinishReason, SamplingParams, TokenLogprobs
from tokenspeed_engine.weights import LoadProgress

_STAGES = (ModelConfig, CacheConfig, SchedulingConfig)


@dataclass(slots=True)
class OfflineOutput:
    """What became of one prompt.

    Attributes:
        token_ids: generated ids, in order; a stop token is the last one.
        finish_reason: RUNNING while it is not done.
        logprobs: one entry for each id, or empty when not asked for.
        prompt_logprobs: entries for positions 1..n-1 of the prompt, or empty.
        num_cached_tokens: prompt tokens that came from the prefix cache.
    """

    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason = FinishReason.RUNNING
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    num_cached_tokens: int = 0


class OfflineEngine:
    """Runs prompts through scheduler and executor, without tokenizer, processes or sockets.

    Args:
        model: path, folder or Hugging Face id; empty for the default model.
        progress: called while weights load.
        options: fields of ModelConfig, CacheConfig and SchedulingConfig by name, such as `page_size=16, num_pages=512`.

    Attributes:
        executor: the loaded model.
        scheduler: the control plane.

    Raises:
        TypeError: an option that no stage has.  Others: see ModelExecutor.
    """

    def __init__(self, model: str = "", *, progress: Callable[[LoadProgress], None] | None = None, **options: Any) -> None:
        stages = [_take(stage, {"model": model, **options}) for stage in _STAGES]
        unknown = options.keys() - {f.name for stage in _STAGES for f in fields(stage)}
        if unknown:
            raise TypeError(f"OfflineEngine: unknown option(s) {', '.join(sorted(unknown))}")
        model_config, cache, self._scheduling = stages
        if cache.external_cache != "none" or cache.kv_events_endpoint:
            raise TypeError("OfflineEngine: external_cache and kv_events_endpoint are of the server. Fix: leave them out")
        self.executor = ModelExecutor(model_config, cache, self._scheduling, progress=progress)
        limits = scheduler_config(self.executor, cache, self._scheduling)
        warm_up(self.executor, scheduler_config(self.executor, cache, self._scheduling, with_tiers=False))
        self.scheduler = Scheduler(limits)
        self._outputs: dict[int, OfflineOutput] = {}
        self._in_flight: deque[tuple[Plan, StepResult]] = deque()
        self._next_id = 1

    def submit(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> OfflineOutput:
        """Queue a prompt.

        Returns:
            An output that fills while `step` is called.
        Raises:
            ValueError: the prompt is empty, holds an id outside of the vocabulary, or can never fit.
        """
        prompt = np.asarray(prompt_token_ids, dtype=np.int64)
        if prompt.size and not 0 <= prompt.min() <= prompt.max() < self.executor.vocab_size:
            raise ValueError(
                f"generate: expected token ids in 0..{self.executor.vocab_size - 1}, got {prompt.min()} to {prompt.max()}"
            )
        request_id = self._next_id
        self._next_id += 1
        self.executor.add_request(request_id, params, prompt_token_ids)
        eos = () if params.ignore_eos else self.executor.eos_token_ids
        status = self.scheduler.submit(
            request_id,
            prompt.astype(np.int32),
            params.max_tokens,
            np.array(sorted({*params.stop_token_ids, *eos}), dtype=np.int32),
            min_new_tokens=params.min_tokens,
            # Positions that come from the cache have no logits.
            use_prefix_cache=params.prompt_logprobs is None,
        )
        if status != SubmitStatus.OK:
            self.executor.remove_request(request_id)
            raise ValueError(
                f"generate: a prompt of {prompt.size} tokens with max_tokens {params.max_tokens} is refused: {status.name} "
                f"(max_model_len {self.executor.max_model_len}, pool of {self.executor.num_pages} pages of "
                f"{self.executor.page_size})"
            )
        output = self._outputs[request_id] = OfflineOutput()
        return output

    def step(self) -> bool:
        """Plan, execute and commit one step.

        Returns:
            Whether anything ran or was committed.
        """
        plan = self.scheduler.plan()
        self.executor.start_transfers(plan)
        done = self.executor.poll_transfers(wait=plan.num_requests == 0 and not self._in_flight)
        self.scheduler.complete_transfers(done.ids, done.ok)
        if plan.num_requests:
            self._in_flight.append((plan, self.executor.execute(plan, self.scheduler.page_table)))
        did_something = bool(self._in_flight) or bool(done)
        if self._in_flight and (plan.num_requests == 0 or len(self._in_flight) >= self._scheduling.pipeline_depth):
            self._commit(*self._in_flight.popleft())
        return did_something

    def has_work(self) -> bool:
        """Whether a prompt is waiting, running, or not yet committed."""
        return bool(self._in_flight) or self.scheduler.has_work()

    def generate(self, prompts: Sequence[Sequence[int]], params: SamplingParams | Sequence[SamplingParams]) -> list[OfflineOutput]:
        """Run prompts to their ends.

        Args:
            prompts: token ids of each.
            params: one for all, or one for each.
        Returns:
            One output for each prompt, in order.
        Raises:
            ValueError: see `submit`.  RuntimeError: the scheduler stands still, which is a fault of the engine.
        """
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        outputs = [self.submit(prompt, p) for prompt, p in zip(prompts, each, strict=True)]
        while self.has_work():
            if not self.step():
                raise RuntimeError(f"generate: nothing can run although work is left: {self.scheduler.stats()}")
        return outputs

    def _commit(self, plan: Plan, result: StepResult) -> None:
        for request_id, entries in result.prompt_logprobs.items():
            if request_id in self._outputs:
                self._outputs[request_id].prompt_logprobs += entries
        if len(result.token_ids) and result.token_ids.min() < 0:
            bad = plan.request_ids[plan.sample_rows][result.token_ids < 0].tolist()
            raise RuntimeError(f"generate: the logits of request(s) {bad} hold a NaN or no finite maximum: the weights are broken")
        events = self.scheduler.commit(plan.step, result.token_ids)
        sampled = plan.request_ids[plan.sample_rows].tolist() if result.logprobs else []
        logprobs = dict(zip(sampled, result.logprobs, strict=True)) if result.logprobs else {}
        columns = (events.request_ids, events.token_ids, events.finish_reasons, events.num_cached_tokens)
        for request_id, token_id, reason, num_cached in zip(*(column.tolist() for column in columns), strict=True):
            output = self._outputs.get(request_id)
            if output is None:
                continue
            output.token_ids.append(token_id)
            output.num_cached_tokens = num_cached
            if (entry := logprobs.get(request_id)) is not None:
                output.logprobs.append(entry)
            if reason != FinishReason.RUNNING:
                output.finish_reason = FinishReason(reason)
                del self._outputs[request_id]
                # Steps in flight that still hold the request have been executed already: its sampler state can go.
                self.executor.remove_request(request_id)


def _take(stage: type, options: dict[str, Any]) -> Any:
    names = {f.name for f in fields(stage)}
    return stage(**{name: value for name, value in options.items() if name in names})
