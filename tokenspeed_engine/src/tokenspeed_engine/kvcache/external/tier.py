"""The third tier between the engine's loop and a store: what is fetched before a request, and what is saved."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tokenspeed_engine.kvcache.external.keys import page_hashes
from tokenspeed_engine.kvcache.external.worker import StoreResult, StoreWorker

logger = logging.getLogger(__name__)

Int32s = NDArray[np.int32]

_MOST_SAVES = 4  # jobs of the store that hold pages of the host at a time
_SAVED_PAGES = 64  # pages of one


class TierScheduler(Protocol):
    """What the scheduler knows of pages in the host's pool."""

    def missing_hashes(self, token_ids: Int32s, salt: str) -> tuple[int, NDArray[np.uint8]]:
        """(first page that neither device nor host has, [k, 32] hashes of it and those behind)."""

    def reserve_host_pages(self, count: int) -> tuple[int, Int32s]:
        """(ticket, at most `count` pages of the host's pool that nobody else uses)."""

    def insert_host_pages(self, ticket: int, token_ids: Int32s, first_page: int, salt: str) -> int:
        """Put the pages behind the tokens before them; how many are kept. The ticket is over, pages without tokens go back."""

    def release_host_pages(self, ticket: int) -> None:
        """Give all pages of a ticket back."""

    def begin_store(self, max_pages: int) -> tuple[int, Int32s, NDArray[np.uint8]]:
        """(id, about `max_pages` pages of the host's pool, their hashes); they stay until the id is completed. -1: none wait."""


@dataclass(slots=True)
class _Fetch:
    """A request that is held back until the store has answered."""

    name: str
    token_ids: Int32s
    salt: str
    first_page: int
    keys: list[bytes]
    deadline_s: float
    ticket: int | None = None
    is_wanted: bool = True


@dataclass(frozen=True, slots=True)
class Fetched:
    """A request whose wait is over.

    Attributes:
        name: the request.
        num_tokens: tokens that came from the store into the host's pool for it.
    """

    name: str
    num_tokens: int


class ExternalTier:
    """Fetches what the store has of a prompt before the prompt is scheduled, and saves what the scheduler names. One thread.

    A request waits for the store at most `timeout_s`; then it goes on without. While the store owes an answer that is overdue,
    nobody else waits for it. Whatever the store does costs a hit, and never a request.

    Args:
        scheduler: whose host pages are used.
        worker: runs the store.
        page_size: tokens in a page.
        timeout_s: longest wait of a request.
        fence: gives a function that waits until copies that were started before have left the host's pages alone.
        clock: seconds, of any origin.
    """

    def __init__(
        self,
        scheduler: TierScheduler,
        worker: StoreWorker,
        *,
        page_size: int,
        timeout_s: float,
        fence: Callable[[], Callable[[], None]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._scheduler, self._worker = scheduler, worker
        self._page_size, self._timeout_s, self._fence, self._clock = page_size, timeout_s, fence, clock
        self._fetches: dict[int, _Fetch] = {}
        self._saves: dict[int, int] = {}
        self._ended: list[int] = []
        self.num_fetched_pages = 0
        self.num_saved_pages = 0
        self.num_timeouts = 0

    @property
    def has_pending(self) -> bool:
        """Whether the worker owes an answer."""
        return bool(self._fetches or self._saves or self._ended)

    @property
    def num_corrupted(self) -> int:
        """Pages that the store found damaged."""
        return self._worker.num_corrupted

    def begin(self, name: str, token_ids: Int32s, salt: str) -> bool:
        """Ask the store for a prompt's pages.

        Args:
            name: of the request.
            token_ids: [n] int32, the prompt.
            salt: of the tenant.
        Returns:
            Whether the request must wait until `poll` names it.
        """
        if any(not fetch.is_wanted for fetch in self._fetches.values()):
            return False
        first_page, hashes = self._scheduler.missing_hashes(token_ids, salt)
        # One token is always computed, so that the prompt's last page is of no use when it holds the last token.
        usable = (len(token_ids) - 1) // self._page_size
        keys = [bytes(row) for row in hashes[: max(0, usable - first_page)]]
        before = token_ids[: first_page * self._page_size]

        def ancestors() -> list[bytes]:
            return page_hashes(before, self._page_size, salt)

        if not keys:
            if first_page:
                self._worker.touch(ancestors)  # else what is always found nearer would be the first to go
            return False
        job = self._worker.lookup(keys, ancestors)
        if job is None:
            return False
        self._fetches[job] = _Fetch(name, token_ids, salt, first_page, keys, self._clock() + self._timeout_s)
        return True

    def cancel(self, name: str) -> None:
        """The request is gone; what is under way for it ends by itself."""
        for fetch in self._fetches.values():
            if fetch.name == name:
                fetch.is_wanted = False

    def save(self) -> None:
        """Hand pages that wait for the store to it, as many as it keeps up with."""
        while len(self._saves) < _MOST_SAVES:
            transfer_id, pages, hashes = self._scheduler.begin_store(_SAVED_PAGES)
            if transfer_id < 0:
                return
            job = self._worker.save([bytes(row) for row in hashes], pages.tolist())
            if job is None:
                self._ended.append(transfer_id)  # no room in the queue: they are not kept
                return
            self._saves[job] = transfer_id

    def poll(self) -> tuple[list[Fetched], list[int]]:
        """What has ended since the last call.

        Returns:
            Requests that need not wait any more, and ids of `begin_store` that are over.
        """
        ready: list[Fetched] = []
        for result in self._worker.poll():
            if (saved := self._saves.pop(result.job, None)) is not None:
                self._ended.append(saved)
                self.num_saved_pages += result.count
            elif (fetch := self._fetches.pop(result.job, None)) is not None:
                tokens = self._fetched(fetch, result) if fetch.ticket is not None else self._found(fetch, result)
                if tokens is not None and fetch.is_wanted:
                    ready.append(Fetched(fetch.name, tokens))
        now_s = self._clock()
        for fetch in self._fetches.values():
            if fetch.is_wanted and now_s >= fetch.deadline_s:
                fetch.is_wanted = False
                self.num_timeouts += 1
                logger.warning(
                    "external store: no answer within %.3g s; request %s goes on without it", self._timeout_s, fetch.name
                )
                ready.append(Fetched(fetch.name, 0))
        ended, self._ended = self._ended, []
        return ready, ended

    def close(self) -> bool:
        """Stop the worker. False: it hangs in the store, and the host's pool must be left alone."""
        return self._worker.close()

    def _found(self, fetch: _Fetch, result: StoreResult) -> int | None:
        """The store has `count` pages: have them fetched. Returns 0 where that is not to be, None while it is under way."""
        if result.count == 0 or not fetch.is_wanted:
            return 0
        ticket, pages = self._scheduler.reserve_host_pages(result.count)
        job = self._worker.fetch(fetch.keys[: len(pages)], pages.tolist(), self._fence()) if len(pages) else None
        if job is None:
            self._scheduler.release_host_pages(ticket)
            return 0
        fetch.ticket = ticket
        self._fetches[job] = fetch
        return None

    def _fetched(self, fetch: _Fetch, result: StoreResult) -> int:
        assert fetch.ticket is not None
        if result.count == 0:
            self._scheduler.release_host_pages(fetch.ticket)
            return 0
        end = (fetch.first_page + result.count) * self._page_size
        kept = self._scheduler.insert_host_pages(fetch.ticket, fetch.token_ids[:end], fetch.first_page, fetch.salt)
        self.num_fetched_pages += kept
        return kept * self._page_size
