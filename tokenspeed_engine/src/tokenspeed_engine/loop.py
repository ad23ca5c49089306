"""The engine's pipeline: receive, plan, execute, commit, send."""

from __future__ import annotations

import hashlib
import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from tokenspeed_engine.ipc import (
    AbortRequests,
    CoreLink,
    Outbox,
    Progress,
    ProtocolError,
    QueryStats,
    RequestRejected,
    Shutdown,
    StatsReply,
    StepOutputs,
    SubmitRequest,
    ToCore,
)
from tokenspeed_engine.scheduler import RequestOptions, Scheduler, SubmitStatus
from tokenspeed_engine.types import (
    EngineStats,
    FinishReason,
    ModelInfo,
    SampledTokens,
    SamplingParams,
    TokenizedRequest,
    TokenLogprobs,
)

logger = logging.getLogger(__name__)

# How long to wait for a slow front end, or for a plan that waits for pages, before looking again.
_RETRY_S = 0.005

_NO_TOKEN = (
    "the model's logits hold a NaN or no finite maximum, so no token could be sampled. "
    "Fix: check the weights, or use a wider --dtype"
)


class StepResult(Protocol):
    """What an executor returns for one plan."""

    @property
    def token_ids(self) -> NDArray[np.int32]:
        """[S] int32, one token for each sample row."""

    @property
    def logprobs(self) -> Sequence[TokenLogprobs | None]:
        """One entry for each sample row, or empty."""

    @property
    def prompt_logprobs(self) -> Mapping[int, Sequence[TokenLogprobs]]:
        """For each request that asked, entries of the prompt positions that this step computed."""


class Executor(Protocol):
    """Runs plans on a device."""

    def add_request(self, request_id: int, params: SamplingParams, prompt_token_ids: Sequence[int]) -> None:
        """Prepare the sampler's state of a request. Raises ValueError for parameters that cannot be used."""

    def remove_request(self, request_id: int) -> None:
        """Forget a request; called when no planned step holds it any more."""

    def execute(self, plan: Any, page_table: NDArray[np.int32]) -> StepResult:
        """Run the forward pass of a plan, and sample."""


class Transfers(Protocol):
    """Copies pages between the device's memory and the host's."""

    @property
    def has_pending_transfers(self) -> bool:
        """Whether a copy was started and `poll_transfers` has not told of its end."""

    def start_transfers(self, plan: Any) -> None:
        """Queue the copies that a plan names."""

    def poll_transfers(self) -> Any:
        """`ids` [n] int64 and `ok` [n] bool of copies that are over, in the order of their start."""


class External(Protocol):
    """Pages outside of the engine; see `kvcache.external.ExternalTier`."""

    @property
    def has_pending(self) -> bool:
        """Whether an answer of the store is awaited."""

    def begin(self, name: str, token_ids: NDArray[np.int32], salt: str) -> bool:
        """Whether a request must wait until `poll` names it."""

    def cancel(self, name: str) -> None:
        """The request is gone."""

    def save(self) -> None:
        """Hand pages that wait for the store to it."""

    def poll(self) -> tuple[Sequence[Any], Sequence[int]]:
        """Requests (name, num_tokens) that need not wait any more, and ids of transfers that are over."""


@dataclass(frozen=True, slots=True)
class CacheTiers:
    """What stands behind the device's cache, as far as it is there.

    Attributes:
        transfers: to and from the host's memory.
        external: pages outside of the engine.
        publish: takes what `Scheduler.take_kv_events` gives.
    """

    transfers: Transfers | None = None
    external: External | None = None
    publish: Callable[[Sequence[tuple[Any, ...]]], None] | None = None


@dataclass(slots=True)
class _Request:
    """A request that the scheduler holds."""

    name: str
    number: int
    request: TokenizedRequest
    received_s: float
    num_external_tokens: int = 0
    is_queued: bool = True
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)


@dataclass(slots=True)
class _Step:
    """A step that was executed and not yet committed."""

    plan: Any
    result: StepResult
    started_s: float
    started: tuple[tuple[str, float], ...]


class EngineLoop:
    """Owns the scheduler, the executor and the link while it runs; one thread."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        link: CoreLink,
        progress: Progress,
        model_info: ModelInfo,
        *,
        pipeline_depth: int = 1,
        clock_s: Callable[[], float] = time.monotonic,
        tiers: CacheTiers | None = None,
    ) -> None:
        """Make a loop; `run` starts it.

        Args:
            pipeline_depth: 1 commits a step before the next is planned; 2 plans and runs the next one first.
            clock_s: seconds of a monotonic clock: what the scheduler is told as the time.
            tiers: what stands behind the device's cache.
        """
        self._scheduler = scheduler
        self._executor = executor
        self._link = link
        self._progress = progress
        self._model_info = model_info
        self._depth = pipeline_depth
        self._clock_s = clock_s
        self._tiers = tiers or CacheTiers()
        self._held: dict[str, TokenizedRequest] = {}  # until the external tier has answered
        self._outbox = Outbox(link)
        self._numbers = itertools.count(1)
        self._by_name: dict[str, _Request] = {}
        self._by_number: dict[int, _Request] = {}
        self._retired: list[tuple[int, int]] = []
        self._in_flight: deque[_Step] = deque()
        self._last_step = -1
        self._num_aborts = 0
        self._num_step_tokens = 0
        self._step_time_s = 0.0
        self._last_done_s = 0.0
        self._is_starved = False
        self._is_settled = True  # the last plan asked for nothing: what a commit leaves to be copied comes with the plan after it
        self._stopping = False

    def run(self) -> None:
        """Serve until the front end says stop. What an executor raises goes to the caller; see `fail`."""
        while not self._stopping:
            self._receive(self._link.receive(self._patience_s()))
            self._poll_external()
            if step := self._execute_next():
                self._in_flight.append(step)
            if self._in_flight and (step is None or len(self._in_flight) >= self._depth):
                self._commit(self._in_flight.popleft())
            if self._tiers.publish is not None:
                self._tiers.publish(self._scheduler.take_kv_events())
            self._send()

    def fail(self, cause: str) -> None:
        """Tell every request that the engine ends, and why. For the process boundary, after `run` raised."""
        outputs = tuple(
            SampledTokens(request_id=name, finish_reason=FinishReason.ERROR, error=cause) for name in (*self._by_name, *self._held)
        )
        self._outbox.put(self._frame(outputs, ()))
        self._outbox.flush()

    # -- receive ----------------------------------------------------------------------------------------------------------

    def _patience_s(self) -> float | None:
        """How long to wait for a message: not at all with work to do, for ever without."""
        if self._in_flight:
            return 0.0
        if self._scheduler.has_work():
            self._progress.set_phase("busy")
            return _RETRY_S if self._is_starved else 0.0
        self._progress.set_phase("idle")
        if not self._is_settled:
            return 0.0
        external, transfers = self._tiers.external, self._tiers.transfers
        is_awaited = (external is not None and external.has_pending) or (transfers is not None and transfers.has_pending_transfers)
        return None if self._outbox.is_empty and not is_awaited else _RETRY_S

    def _receive(self, messages: Sequence[ToCore | ProtocolError]) -> None:
        for message in messages:
            match message:
                case SubmitRequest(request=request):
                    self._receive_request(request)
                case AbortRequests(request_ids=names):
                    self._abort(names)
                case QueryStats(query_id=query_id):
                    self._outbox.put(StatsReply(query_id, self._stats()))
                case Shutdown():
                    self._stopping = True
                case ProtocolError():
                    logger.error("%s; dropped", message)

    def _receive_request(self, request: TokenizedRequest) -> None:
        """Submit a request, now or when the external tier has answered; refuse a bad one, which concerns nobody else."""
        name = request.request_id
        if name in self._by_name or name in self._held:
            self._reject(name, "duplicate_request_id", "a request with this id is running; choose another id")
            return
        prompt = np.asarray(request.prompt_token_ids, dtype=np.int64)
        if prompt.size and not 0 <= prompt.min() <= prompt.max() < self._model_info.vocab_size:
            expected = f"ids from 0 to {self._model_info.vocab_size - 1}"
            self._reject(name, "invalid_token_id", f"prompt: expected {expected}, got {prompt.min()} to {prompt.max()}")
            return
        external = self._tiers.external
        if external is not None and request.params.prompt_logprobs is None and prompt.size <= self._model_info.max_model_len:
            self._held[name] = request
            if external.begin(name, prompt.astype(np.int32), request.cache_salt):
                return
            del self._held[name]
        self._submit(request)

    def _submit(self, request: TokenizedRequest, num_external_tokens: int = 0) -> None:
        """Hand a request to executor and scheduler, or refuse it."""
        name, params = request.request_id, request.params
        number = next(self._numbers)
        try:
            self._executor.add_request(number, params, request.prompt_token_ids)
        except Exception as error:  # noqa: BLE001 - the request came from another process; the cause goes back to it
            self._reject(name, "invalid_request", f"{type(error).__name__}: {error}")
            return
        eos = () if params.ignore_eos else self._model_info.eos_token_ids
        status = self._scheduler.submit(
            number,
            np.asarray(request.prompt_token_ids, dtype=np.int32),
            params.max_tokens,
            np.array(sorted({*params.stop_token_ids, *eos}), dtype=np.int32),
            min_new_tokens=params.min_tokens,
            # Positions that come from the cache have no logits, so a request for the prompt's log-probabilities computes all.
            use_prefix_cache=params.prompt_logprobs is None,
            options=RequestOptions(
                session=session_number(request),
                salt=request.cache_salt,
                priority=request.priority,
                tenant=tenant_number(request.tenant),
            ),
        )
        if status != SubmitStatus.OK:
            self._executor.remove_request(number)
            self._reject(name, *self._explain(status, request))
            return
        entry = _Request(name, number, request, self._clock_s(), num_external_tokens)
        self._by_name[name] = self._by_number[number] = entry

    def _abort(self, names: Sequence[str]) -> None:
        """Stop scheduling and output of these at once; those that have ended are not an error."""
        for name in names:
            if entry := self._by_name.pop(name, None):
                self._scheduler.abort(entry.number)
                self._retire(entry)
                self._num_aborts += 1
            elif self._held.pop(name, None) and self._tiers.external is not None:
                self._tiers.external.cancel(name)
                self._num_aborts += 1
        self._outbox.put(self._frame((), ()))

    # -- plan and execute -------------------------------------------------------------------------------------------------

    def _execute_next(self) -> _Step | None:
        """Plan one step and run it; None when nothing can run."""
        started_s = self._clock_s()
        self._scheduler.advance_clock(round(started_s * 1e6))
        plan = self._scheduler.plan()
        has_copied = self._copy_pages(plan)
        self._is_settled = plan.num_requests == 0 and not has_copied
        self._is_starved = self._is_settled and not self._in_flight
        if plan.num_requests == 0:
            return None
        self._last_step = plan.step
        # A hang in the very first step after a pause must be seen, too.
        self._progress.set_phase("busy")
        result = self._executor.execute(plan, self._scheduler.page_table)
        self._progress.step_done()
        self._num_step_tokens += plan.num_tokens
        self._step_time_s = self._clock_s() - started_s
        return _Step(plan, result, started_s, self._newly_started(plan, started_s))

    def _copy_pages(self, plan: Any) -> bool:
        """Start the copies that a plan asks for, and tell the scheduler which are over; whether there was anything of that."""
        transfers = self._tiers.transfers
        if transfers is None:
            return False
        transfers.start_transfers(plan)
        done = transfers.poll_transfers()
        if done:
            self._scheduler.complete_transfers(done.ids, done.ok)
            if plan.num_requests == 0:
                self._outbox.put(self._frame((), ()))  # no step will tell that their pages are free
        return bool(done) or len(plan.write_backs) > 0 or len(plan.load_backs) > 0

    def _poll_external(self) -> None:
        """Submit the requests whose pages have come from outside, and hand over pages that are to be kept there."""
        external = self._tiers.external
        if external is None:
            return
        external.save()
        ready, ended = external.poll()
        if ended:
            self._scheduler.complete_transfers(np.array(ended, dtype=np.int64), np.ones(len(ended), dtype=np.bool_))
        for one in ready:
            if request := self._held.pop(one.name, None):
                self._submit(request, one.num_tokens)

    def _newly_started(self, plan: Any, started_s: float) -> tuple[tuple[str, float], ...]:
        """(name, seconds in the queue) of the requests that this plan holds for the first time."""
        numbers = plan.request_ids[plan.num_decodes :].tolist()
        fresh = [entry for number in numbers if (entry := self._by_number.get(number)) and entry.is_queued]
        for entry in fresh:
            entry.is_queued = False
        return tuple((entry.name, started_s - entry.received_s) for entry in fresh)

    # -- commit and send --------------------------------------------------------------------------------------------------

    def _commit(self, step: _Step) -> None:
        """Tell the scheduler what was sampled, and turn its events into outputs."""
        plan, result = step.plan, step.result
        for number, entries in result.prompt_logprobs.items():
            if entry := self._by_number.get(number):
                entry.prompt_logprobs.extend(entries)
        outputs = self._end_without_token(plan, result.token_ids)  # waits for the device
        done_s = self._clock_s()
        # Steps run one after the other: one that was issued early began when the step before it ended.
        step_time_s = done_s - max(step.started_s, self._last_done_s)
        self._last_done_s = done_s
        # A row without a token belongs to a request that is aborted by now: the scheduler drops what stands in its place.
        events = self._scheduler.commit(plan.step, np.maximum(result.token_ids, 0), max(1, round(step_time_s * 1e6)))
        if outputs:
            self._scheduler.flush_cache()  # what computed a NaN may have left it in pages that others would reuse
        logprobs = self._logprobs_by_number(plan, result)
        counts = (events.num_cached_tokens, events.num_host_cached_tokens)
        columns = (events.request_ids, events.token_ids, events.finish_reasons, *counts)
        for number, token_id, reason, num_cached, num_host in zip(*(column.tolist() for column in columns), strict=True):
            if entry := self._by_number.get(number):
                outputs.append(self._output(entry, token_id, FinishReason(reason), num_cached, num_host, logprobs.get(number)))
        self._outbox.put(self._frame(tuple(outputs), step.started))
        self._release_retired(plan.step)

    def _end_without_token(self, plan: Any, token_ids: NDArray[np.int32]) -> list[SampledTokens]:
        """End the requests whose logits gave no token (-1); an error of these alone."""
        if not len(token_ids) or token_ids.min() >= 0:
            return []
        outputs = []
        for number in plan.request_ids[plan.sample_rows][token_ids < 0].tolist():
            if entry := self._by_number.get(number):
                logger.error("request %s: the model's logits hold a NaN or no finite maximum", entry.name)
                self._scheduler.abort(number)
                del self._by_name[entry.name]
                self._retire(entry)
                outputs.append(SampledTokens(request_id=entry.name, finish_reason=FinishReason.ERROR, error=_NO_TOKEN))
        return outputs

    def _output(
        self,
        entry: _Request,
        token_id: int,
        reason: FinishReason,
        num_cached: int,
        num_host_cached: int,
        logprobs: TokenLogprobs | None,
    ) -> SampledTokens:
        prompt_logprobs, entry.prompt_logprobs = tuple(entry.prompt_logprobs), []
        # What was fetched for a request came through the host's memory, unless it was given up there before the request began.
        num_external = min(entry.num_external_tokens, num_host_cached)
        if reason != FinishReason.RUNNING:
            del self._by_name[entry.name]
            self._retire(entry)
        return SampledTokens(
            request_id=entry.name,
            token_ids=(token_id,),
            logprobs=() if logprobs is None else (logprobs,),
            prompt_logprobs=prompt_logprobs,
            finish_reason=reason,
            num_prompt_tokens=len(entry.request.prompt_token_ids),
            num_cached_tokens=num_cached,
            num_host_cached_tokens=num_host_cached - num_external,
            num_external_cached_tokens=num_external,
        )

    def _logprobs_by_number(self, plan: Any, result: StepResult) -> dict[int, TokenLogprobs]:
        if not any(entry is not None for entry in result.logprobs):
            return {}
        numbers = plan.request_ids[plan.sample_rows].tolist()
        return {number: entry for number, entry in zip(numbers, result.logprobs, strict=True) if entry is not None}

    def _send(self) -> None:
        failed = self._outbox.flush()
        if failed:
            self._abort(failed)

    def _frame(self, outputs: tuple[SampledTokens, ...], started: tuple[tuple[str, float], ...]) -> StepOutputs:
        return StepOutputs(step=self._last_step, outputs=outputs, queued=started, stats=self._stats())

    # -- bookkeeping ------------------------------------------------------------------------------------------------------

    def _retire(self, entry: _Request) -> None:
        """Drop the request here; the executor keeps its state until no step in flight can hold it."""
        del self._by_number[entry.number]
        self._retired.append((self._last_step, entry.number))
        if not self._in_flight:
            self._release_retired(self._last_step)

    def _release_retired(self, committed_step: int) -> None:
        for last_step, number in self._retired:
            if last_step <= committed_step:
                self._executor.remove_request(number)
        self._retired = [entry for entry in self._retired if entry[0] > committed_step]

    def _reject(self, name: str, code: str, message: str) -> None:
        self._outbox.put(RequestRejected(name, code, message))

    def _explain(self, status: SubmitStatus, request: TokenizedRequest) -> tuple[str, str]:
        """Code and text for a status other than OK."""
        length, info = len(request.prompt_token_ids), self._model_info
        if status == SubmitStatus.NEVER_FITS:
            room = info.num_pages * info.page_size
            return "kv_cache_too_small", (
                f"scheduler.submit: expected prompt and output to fit into the KV cache of {room} tokens ({info.num_pages} "
                f"pages of {info.page_size}), got a prompt of {length} tokens and max_tokens {request.params.max_tokens}. "
                "Fix: shorten the prompt, lower max_tokens, or start the server with a larger KV cache"
            )
        if status == SubmitStatus.TOO_LONG:
            return "context_length_exceeded", (
                f"scheduler.submit: expected at most {info.max_model_len} tokens of prompt and output, got a prompt of "
                f"{length} tokens and max_tokens {request.params.max_tokens}. Fix: shorten the prompt or lower max_tokens"
            )
        return status.name.lower(), f"scheduler.submit: refused with status {status.name} (prompt of {length} tokens)"

    def _stats(self) -> EngineStats:
        stats = self._scheduler.stats()
        return EngineStats(
            num_running=stats.num_running,
            num_waiting=stats.num_waiting + len(self._held),
            num_pages=stats.num_pages,
            num_free_pages=stats.free_pages,
            num_cached_pages=stats.evictable_pages,
            num_steps=self._progress.num_steps,
            num_step_tokens=self._num_step_tokens,
            num_retractions=stats.num_retractions,
            num_aborts=self._num_aborts,
            prefix_query_tokens=stats.prefix_query_tokens,
            prefix_hit_tokens=stats.prefix_hit_tokens,
            step_time_s=self._step_time_s,
        )


def session_number(request: TokenizedRequest) -> int:
    """What the scheduler calls the request's session: 63 bits of a hash, 0 for none.

    A hash needs no table that grows with every client. The salt is part of it, so that nobody reaches the session of another tenant
    by guessing its name.
    """
    if not request.session_id:
        return 0
    key = len(request.cache_salt.encode()).to_bytes(4, "little") + (request.cache_salt + request.session_id).encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 1 or 1


def tenant_number(tenant: str) -> int:
    """What the scheduler calls a tenant: 63 bits of a hash, 0 for none. A hash needs no table that grows with every client."""
    if not tenant:
        return 0
    return int.from_bytes(hashlib.blake2b(tenant.encode(), digest_size=8).digest(), "little") >> 1 or 1
