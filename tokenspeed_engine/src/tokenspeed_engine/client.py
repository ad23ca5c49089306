"""The front end's view of the engine: requests in, text out."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from dataclasses import replace

from tokenspeed_engine.ipc import (
    AbortRequests,
    CoreReady,
    Heartbeat,
    IpcError,
    LinkBusyError,
    LinkDownError,
    LoadProgress,
    MessageTooLargeError,
    QueryStats,
    RequestRejected,
    StatsReply,
    StepOutputs,
    SubmitRequest,
    ToCore,
)
from tokenspeed_engine.metrics import EngineMetrics, RequestRecord
from tokenspeed_engine.server.engine_client import (
    EngineClientError,
    EngineDeadError,
    EngineStatus,
    QueueFullError,
    RequestRefused,
)
from tokenspeed_engine.tokenizer import DetokenizerError, DetokenizerFullError, IncrementalDetokenizer, Tokenizer
from tokenspeed_engine.types import EngineStats, FinishReason, ModelInfo, SampledTokens, TextDelta, TokenizedRequest

logger = logging.getLogger(__name__)

_ABORT_RETRY_S = 0.02


class _Stream:
    """One request in flight: what waits for its reader, and what its statistics need."""

    __slots__ = (
        "arrived_s",
        "error",
        "has_ended",
        "last_token_s",
        "num_generated",
        "pending",
        "request",
        "wakeup",
    )

    def __init__(self, request: TokenizedRequest) -> None:
        self.request = request
        self.arrived_s = time.monotonic()
        self.last_token_s: float | None = None
        self.num_generated = 0
        self.pending: TextDelta | None = None
        self.error: EngineClientError | None = None
        # True once the core has nothing more to say or to hold for it.
        self.has_ended = False
        self.wakeup = asyncio.Event()

    def deliver(self, delta: TextDelta) -> None:
        """Give a delta to the reader, merged into the one that it has not taken yet."""
        self.pending = delta if self.pending is None else merge_deltas(self.pending, delta)
        self.wakeup.set()

    def fail(self, error: EngineClientError) -> None:
        """End the stream with an error; what is pending is still read first."""
        if not self.has_ended:
            self.error = error
            self.has_ended = True
            self.wakeup.set()

    async def next(self) -> TextDelta:
        """The next delta. Raises the stream's error once nothing is pending."""
        while True:
            if self.pending is not None:
                delta, self.pending = self.pending, None
                return delta
            if self.error is not None:
                raise self.error
            self.wakeup.clear()
            await self.wakeup.wait()


def merge_deltas(earlier: TextDelta, later: TextDelta) -> TextDelta:
    """The text and tokens of two deltas of one request, as one."""
    return replace(
        later,
        text=earlier.text + later.text,
        token_ids=earlier.token_ids + later.token_ids,
        logprobs=earlier.logprobs + later.logprobs,
        prompt_logprobs=earlier.prompt_logprobs + later.prompt_logprobs,
    )


def _send_to_nobody(message: ToCore) -> None:
    raise LinkDownError(f"client: {type(message).__name__} before a core was attached")


class CoreClient:
    """Implements the server's EngineClient over the link to the core. Lives in one event loop."""

    def __init__(self, metrics: EngineMetrics, *, max_requests: int) -> None:
        """Args: max_requests: most requests in flight, running and waiting."""
        self._send: Callable[[ToCore], None] = _send_to_nobody
        self._metrics = metrics
        self._max_requests = max_requests
        self._streams: dict[str, _Stream] = {}
        self._unsent_aborts: set[str] = set()
        self._abort_timer: asyncio.TimerHandle | None = None
        self._queries: dict[int, asyncio.Future[EngineStats]] = {}
        self._query_ids = itertools.count()
        self._status = EngineStatus.STARTING
        self._is_draining = False
        self._reason = "the engine is starting"
        self._model_info: ModelInfo | None = None
        self._tokenizer: Tokenizer | None = None
        self._detokenizer: IncrementalDetokenizer | None = None
        self._idle = asyncio.Event()
        self._idle.set()
        self.ready = asyncio.Event()
        self.last_stats = EngineStats()

    def attach(self, send: Callable[[ToCore], None]) -> None:
        """Say how to reach the core; `send` raises what FrontendLink.send does."""
        self._send = send

    def set_tokenizer(self, tokenizer: Tokenizer) -> None:
        """Give the client the model's tokenizer; needed before the status can be READY."""
        self._tokenizer = tokenizer
        # Each stream has one state; a closed stream gives its state back.
        self._detokenizer = IncrementalDetokenizer(tokenizer, max_states=max(self._max_requests, 1))
        self._update_ready()

    # -- what the server uses ---------------------------------------------------------------------------------------------

    @property
    def status(self) -> EngineStatus:
        """STARTING until core and tokenizer are there, DEAD between a core's death and the start of the next."""
        if self._is_draining and self._status is not EngineStatus.DEAD:
            return EngineStatus.DRAINING
        if self._status is EngineStatus.READY and self._tokenizer is None:
            return EngineStatus.STARTING
        return self._status

    @property
    def model_info(self) -> ModelInfo:
        """Facts of the loaded model. Raises EngineDeadError before the core was ready for the first time."""
        if self._model_info is None:
            raise EngineDeadError(self._reason)
        return self._model_info

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises EngineDeadError before it is loaded."""
        if self._tokenizer is None:
            raise EngineDeadError(self._reason)
        return self._tokenizer

    @property
    def num_active(self) -> int:
        """Streams that have not been read to their end."""
        return len(self._streams)

    async def generate(self, request: TokenizedRequest) -> AsyncGenerator[TextDelta, None]:
        """Run one sequence; see EngineClient.generate for the contract."""
        stream = self._open(request)
        try:
            while True:
                delta = await stream.next()
                yield delta
                if delta.finish_reason is not FinishReason.RUNNING:
                    return
        finally:
            self._close(stream)

    async def stats(self) -> EngineStats:
        """Ask the core where it stands, after everything that was sent before. Raises EngineDeadError."""
        query_id = next(self._query_ids)
        future: asyncio.Future[EngineStats] = asyncio.get_running_loop().create_future()
        self._queries[query_id] = future
        try:
            self._send(QueryStats(query_id))
            return await future
        except (LinkDownError, LinkBusyError) as error:
            raise EngineDeadError(str(error)) from error
        finally:
            self._queries.pop(query_id, None)

    # -- drain ------------------------------------------------------------------------------------------------------------

    def begin_drain(self) -> None:
        """Refuse new requests from now on; those in flight run to their end."""
        self._is_draining = True

    async def wait_idle(self) -> None:
        """Wait until no stream is open."""
        await self._idle.wait()

    def end_streams(self, reason: str) -> None:
        """End all streams with an error, and abort their requests."""
        self._fail_requests(tuple(self._streams), EngineDeadError(reason))

    # -- streams ----------------------------------------------------------------------------------------------------------

    def _open(self, request: TokenizedRequest) -> _Stream:
        if self.status is not EngineStatus.READY or self._detokenizer is None:
            raise EngineDeadError("the server is shutting down" if self._is_draining else self._reason)
        if len(self._streams) >= self._max_requests:
            self._metrics.request_rejected("queue_full")
            raise QueueFullError(
                f"engine.generate: expected fewer than {self._max_requests} requests in flight, got one more. "
                "Fix: try again later, or start the server with a larger --max-queue"
            )
        if request.request_id in self._streams:
            raise RequestRefused(f"request_id: {request.request_id!r} is in use", code="duplicate_request_id")
        try:
            self._detokenizer.add(request.request_id, request.params, request.prompt_token_ids)
            self._send(SubmitRequest(request))
        except (IpcError, DetokenizerError, ValueError) as error:
            self._detokenizer.remove(request.request_id)
            raise self._refusal(error) from error
        stream = _Stream(request)
        self._streams[request.request_id] = stream
        self._idle.clear()
        return stream

    def _refusal(self, error: Exception) -> Exception:
        match error:
            case MessageTooLargeError():
                self._metrics.request_rejected("request_too_large")
                return RequestRefused(str(error), code="request_too_large")
            case LinkBusyError() | DetokenizerFullError():
                self._metrics.request_rejected("queue_full")
                return QueueFullError(str(error))
            case LinkDownError():
                return EngineDeadError(str(error))
            case ValueError():
                return RequestRefused(str(error))
            case _:
                return error

    def _close(self, stream: _Stream) -> None:
        """Forget a stream; if the core still works on it, abort it there."""
        request_id = stream.request.request_id
        if self._streams.pop(request_id, None) is None:
            return
        if not self._streams:
            self._idle.set()
        if self._detokenizer is not None:
            self._detokenizer.remove(request_id)
        if not stream.has_ended:
            stream.has_ended = True
            self._abort((request_id,))
            self._record_end(stream, FinishReason.ABORT)

    def _abort(self, request_ids: Sequence[str]) -> None:
        """Tell the core at once; while its queue is full, try again soon. An abort is never lost."""
        self._unsent_aborts.update(request_ids)
        try:
            self._send(AbortRequests(tuple(self._unsent_aborts)))
        except LinkBusyError:
            if self._abort_timer is None:
                self._abort_timer = asyncio.get_running_loop().call_later(_ABORT_RETRY_S, self._retry_aborts)
            return
        except LinkDownError:
            pass  # the core is gone, and its requests with it
        self._unsent_aborts.clear()

    def _retry_aborts(self) -> None:
        self._abort_timer = None
        if self._unsent_aborts:
            self._abort(())

    # -- what the supervisor reports --------------------------------------------------------------------------------------

    def on_starting(self) -> None:
        """A core process is being started."""
        self._status = EngineStatus.STARTING

    def on_progress(self, progress: LoadProgress) -> None:
        """The core is loading."""
        self._reason = f"the engine is starting ({progress.stage})"

    def on_ready(self, ready: CoreReady) -> None:
        """The core takes requests."""
        self._model_info = ready.model_info
        self._status = EngineStatus.READY
        self._metrics.core_started()
        self._metrics.core_memory(ready.resident_bytes, ready.peak_resident_bytes)
        self._metrics.core_sizes(ready.model_info.weights_bytes, ready.model_info.kv_cache_bytes)
        self._update_ready()

    def on_heartbeat(self, heartbeat: Heartbeat) -> None:
        """The core's process lives."""
        self._metrics.core_memory(heartbeat.resident_bytes, heartbeat.peak_resident_bytes)

    def on_down(self, reason: str) -> None:
        """The core is gone: every open stream ends with an error."""
        self._status = EngineStatus.DEAD
        self._reason = reason
        self.ready.clear()
        self._metrics.core_stopped()
        self._unsent_aborts.clear()
        for stream in self._streams.values():
            if not stream.has_ended:
                stream.fail(EngineDeadError(reason))
                self._record_end(stream, FinishReason.ERROR)
        for future in self._queries.values():
            if not future.done():
                future.set_exception(EngineDeadError(reason))

    def on_restart(self, attempt: int, delay_s: float) -> None:
        """The core will be started again."""
        self._metrics.core_restarted()

    def on_message(self, message: StepOutputs | RequestRejected | StatsReply) -> None:
        """Outputs of a step, a refusal, or statistics."""
        match message:
            case StepOutputs():
                self._on_outputs(message)
            case RequestRejected():
                if stream := self._streams.get(message.request_id):
                    self._metrics.request_rejected(message.code)
                    stream.fail(RequestRefused(message.message, code=message.code))
            case StatsReply():
                self._take_stats(message.stats)
                future = self._queries.get(message.query_id)
                if future is not None and not future.done():
                    future.set_result(message.stats)

    def _update_ready(self) -> None:
        if self._status is EngineStatus.READY and self._tokenizer is not None:
            self.ready.set()

    def _take_stats(self, stats: EngineStats) -> None:
        self.last_stats = stats
        self._metrics.core_stats(stats)

    # -- outputs ----------------------------------------------------------------------------------------------------------

    def _on_outputs(self, frame: StepOutputs) -> None:
        """Detokenize a whole step in one call, and hand each stream its share."""
        self._take_stats(frame.stats)
        for _, queue_s in frame.queued:
            self._metrics.request_queued(queue_s)
        live: dict[str, SampledTokens] = {}
        for output in frame.outputs:
            stream = self._streams.get(output.request_id)
            if stream is None or stream.has_ended:
                continue
            if output.finish_reason is FinishReason.ERROR:
                self._deliver(stream, output, TextDelta(output.request_id, error=output.error), FinishReason.ERROR)
            else:
                live[output.request_id] = output
        try:
            self._detokenize(live)
        except Exception as error:
            # The frame came from another process: whatever is wrong with it ends its own requests, never the front end.
            logger.exception("client: the outputs of step %d cannot be used", frame.step)
            self._fail_requests(live, EngineClientError(f"the output cannot be used: {type(error).__name__}: {error}"))

    def _detokenize(self, live: dict[str, SampledTokens]) -> None:
        if not live:
            return
        if self._detokenizer is None:
            raise RuntimeError("client: outputs before the tokenizer")
        batch = [(name, output.token_ids, output.finish_reason) for name, output in live.items()]
        stopped: list[str] = []
        for update in self._detokenizer.step(batch):
            output, stream = live[update.request_id], self._streams[update.request_id]
            if update.finish_reason is not FinishReason.RUNNING and output.finish_reason is FinishReason.RUNNING:
                stopped.append(update.request_id)  # a stop string ended it; the core does not know yet
            delta = TextDelta(
                update.request_id,
                text=update.text,
                token_ids=update.token_ids,
                logprobs=output.logprobs[: len(update.token_ids)],
                stop_reason=update.stop_reason,
            )
            self._deliver(stream, output, delta, update.finish_reason)
        if stopped:
            self._abort(stopped)

    def _fail_requests(self, names: Iterable[str], error: EngineClientError) -> None:
        """End these streams with an error, at the core as well."""
        failed = [name for name in names if not self._streams[name].has_ended]
        for name in failed:
            self._streams[name].fail(error)
            self._record_end(self._streams[name], FinishReason.ERROR)
        self._abort(failed)

    def _deliver(self, stream: _Stream, output: SampledTokens, delta: TextDelta, reason: FinishReason) -> None:
        self._count(stream, len(delta.token_ids), output.num_cached_tokens)
        is_last = reason is not FinishReason.RUNNING
        stream.has_ended = stream.has_ended or is_last
        stream.deliver(
            replace(
                delta,
                prompt_logprobs=output.prompt_logprobs,
                finish_reason=reason,
                num_prompt_tokens=len(stream.request.prompt_token_ids),
                num_cached_tokens=max(output.num_cached_tokens, 0),
                num_host_cached_tokens=max(output.num_host_cached_tokens, 0),
                num_external_cached_tokens=max(output.num_external_cached_tokens, 0),
            )
        )
        if is_last:
            self._record_end(stream, reason)

    def _count(self, stream: _Stream, num_tokens: int, num_cached: int) -> None:
        if num_tokens == 0:
            return
        now_s = time.monotonic()
        if stream.last_token_s is None:
            self._metrics.request_started(len(stream.request.prompt_token_ids), num_cached, now_s - stream.arrived_s)
        else:
            self._metrics.token_gap(now_s - stream.last_token_s, num_tokens)
        stream.last_token_s = now_s
        stream.num_generated += num_tokens
        self._metrics.tokens_generated(num_tokens)

    def _record_end(self, stream: _Stream, reason: FinishReason) -> None:
        self._metrics.request_finished(
            RequestRecord(
                num_prompt_tokens=len(stream.request.prompt_token_ids),
                num_generated_tokens=stream.num_generated,
                finish_reason=reason,
                e2e_s=time.monotonic() - stream.arrived_s,
            )
        )
