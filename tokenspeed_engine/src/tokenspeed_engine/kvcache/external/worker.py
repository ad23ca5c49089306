"""A thread that works for the engine's loop with an external store."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tokenspeed_engine.kvcache.external.base import ExternalStore
from tokenspeed_engine.kvcache.host_pool import HostPool

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StoreResult:
    """The end of a job.

    Attributes:
        job: its number.
        count: pages of its beginning that are there, were read or are kept; 0 when the store failed.
    """

    job: int
    count: int


@dataclass(frozen=True, slots=True)
class _Job:
    number: int
    run: Callable[[], int]


class StoreWorker:
    """Runs jobs one after the other; those that a request waits for go before those that nobody waits for.

    The queue is bounded: a job that has no room in it is refused at once. Results are told in the order in which jobs end.

    Args:
        store: used by the worker's thread alone, from now on.
        host: whose pages are read and written.
        max_queued: jobs of each kind that may wait.
        wake: called on the worker's thread whenever a result is there.
    """

    def __init__(
        self, store: ExternalStore, host: HostPool, *, max_queued: int = 256, wake: Callable[[], None] = lambda: None
    ) -> None:
        self._store, self._host, self._max_queued, self._wake = store, host, max_queued, wake
        self._urgent: deque[_Job] = deque()
        self._later: deque[_Job] = deque()
        self._results: deque[StoreResult] = deque()
        self._changed = threading.Condition()
        self._stopping = False
        self._next_job = 0
        self.num_errors = 0
        # A store that hangs must not keep the process from ending.
        self._thread = threading.Thread(target=self._run, name="kv-external-store", daemon=True)
        self._thread.start()

    @property
    def num_corrupted(self) -> int:
        """Pages that the store found damaged."""
        return self._store.num_corrupted

    def lookup(self, keys: Sequence[bytes], ancestors: Callable[[], Sequence[bytes]] = tuple) -> int | None:
        """How many of the first keys does the store have?

        Args:
            keys: pages that are wanted.
            ancestors: gives the keys of the pages before them, which are in use as well; called on the worker's thread.
        Returns:
            The job's number; None: the queue is full.
        """

        def run() -> int:
            count = self._store.contains_prefix(keys)
            # Marked after those behind them, so that the store gives them up later.
            self._store.contains_prefix(ancestors())
            return count

        return self._queue(self._urgent, run)

    def touch(self, keys: Callable[[], Sequence[bytes]]) -> None:
        """Let the store know that pages are in use, when it has time; forgotten when the queue is full.

        Args:
            keys: gives their keys; called on the worker's thread.
        """
        self._queue(self._later, lambda: self._store.contains_prefix(keys()))

    def fetch(self, keys: Sequence[bytes], pages: Sequence[int], fence: Callable[[], None]) -> int | None:
        """Read pages into the host's pool.

        Args:
            keys: of the pages.
            pages: of the host's pool; nobody else may use them until the result is there, which comes also when nobody asks for it
                any more.
            fence: called before the first is written.
        Returns:
            The job's number; None: the queue is full.
        """

        def run() -> int:
            fence()
            return self._store.get(keys, [self._host.page(page) for page in pages])

        return self._queue(self._urgent, run)

    def save(self, keys: Sequence[bytes], pages: Sequence[int]) -> int | None:
        """Give pages of the host's pool to the store.

        Args:
            keys: of the pages.
            pages: must stay as they are until the result is there.
        Returns:
            The job's number; None: the queue is full.
        """
        return self._queue(self._later, lambda: self._store.put(keys, [self._host.page(page) for page in pages]))

    def poll(self) -> list[StoreResult]:
        """The jobs that ended since the last call."""
        with self._changed:
            results = list(self._results)
            self._results.clear()
        return results

    def close(self, timeout_s: float = 5.0) -> bool:
        """Drop what waits, end the job that runs, close the store.

        Args:
            timeout_s: how long to wait for the job that runs.
        Returns:
            Whether the thread has ended; False: the store hangs, and the host's pool must not be given up.
        """
        with self._changed:
            self._stopping = True
            self._urgent.clear()
            self._later.clear()
            self._changed.notify()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _queue(self, queue: deque[_Job], run: Callable[[], int]) -> int | None:
        with self._changed:
            if self._stopping or len(queue) >= self._max_queued:
                return None
            number, self._next_job = self._next_job, self._next_job + 1
            queue.append(_Job(number, run))
            self._changed.notify()
            return number

    def _run(self) -> None:
        while job := self._next():
            try:
                count = job.run()
            except Exception:
                # The edge of the store: what it raises costs a hit, never a request.
                logger.exception("external store: a job failed; its pages are computed or given up")
                self.num_errors += 1
                count = 0
            with self._changed:
                self._results.append(StoreResult(job.number, count))
            self._wake()
        try:
            self._store.close()
        except Exception:
            logger.exception("external store: closing failed")

    def _next(self) -> _Job | None:
        with self._changed:
            while not (self._urgent or self._later or self._stopping):
                self._changed.wait()
            if self._urgent:
                return self._urgent.popleft()
            return self._later.popleft() if self._later else None
