"""Whole steps before the first request, so that none of it pays for what happens only once."""

from __future__ import annotations

import numpy as np

from tokenspeed_engine.executor.executor import ModelExecutor
from tokenspeed_engine.scheduler import Scheduler, SchedulerConfig, SubmitStatus
from tokenspeed_engine.types import SamplingParams

# What a CPU gains from larger chunks is not worth the seconds that they take at start.
_CPU_MOST_TOKENS = 256
_PARAMS = (
    SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True),
    SamplingParams(temperature=1.0, top_p=0.9, top_k=40, max_tokens=2, ignore_eos=True),
)


def warm_up(executor: ModelExecutor, config: SchedulerConfig) -> None:
    """Run a chunk and a decode of a greedy and of a drawing request through the executor, planned by a scheduler of its own.

    Kernels are loaded, compiled and given their scratch memory, and memory is found wanting now rather than under a request.
    Nothing may run meanwhile, and no page may be in use: the steps write to the first pages of the cache.

    Args:
        executor: the loaded model.
        config: of the scheduler that will plan for it.
    Raises:
        OutOfMemoryError: a step of the configured size does not fit on the device.
    """
    scheduler = Scheduler(config)
    most = config.max_num_batched_tokens if executor.device.type != "cpu" else _CPU_MOST_TOKENS
    room = min(config.max_model_len, config.num_pages * config.page_size) - _PARAMS[0].max_tokens
    num_tokens = min(most, config.max_num_batched_tokens, room) // len(_PARAMS)
    if num_tokens < 1:
        return
    known = []
    try:
        for request_id, params in enumerate(_PARAMS, start=1):
            # Unequal prompts: an equal one would be read from the cache.
            prompt = np.full(num_tokens, request_id % executor.vocab_size, dtype=np.int32)
            executor.add_request(request_id, params, prompt.tolist())
            known.append(request_id)
            status = scheduler.submit(request_id, prompt, params.max_tokens, np.empty(0, dtype=np.int32))
            if status != SubmitStatus.OK:
                raise RuntimeError(f"warm_up: a prompt of {num_tokens} tokens is refused: {status.name} ({config})")
        while scheduler.has_work():
            plan = scheduler.plan()
            if plan.num_requests == 0:
                raise RuntimeError(f"warm_up: nothing can run although work is left: {scheduler.stats()}")
            # Broken weights give no token; that is said to the request that meets it.
            scheduler.commit(plan.step, np.maximum(executor.execute(plan, scheduler.page_table).token_ids, 0))
    finally:
        for request_id in known:
            executor.remove_request(request_id)
