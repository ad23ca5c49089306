"""Copies of pages between the device's pool and the host's, on a stream of their own."""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tokenspeed_engine.kvcache.host_pool import HostPool
from tokenspeed_engine.kvcache.pool import KVPool
from tokenspeed_kernel.ops.kvcache import transfer_pages

logger = logging.getLogger(__name__)

Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]
CopyRows = Callable[[Tensor, Tensor, Tensor, Tensor], None]


class TransferPlan(Protocol):
    """What a plan says of copies: all pairs with one id are one transfer; they stand together, ids ascending."""

    @property
    def write_backs(self) -> Int32s:
        """[W, 2] int32 (device page, host page)."""

    @property
    def write_back_ids(self) -> Int64s:
        """[W] int64."""

    @property
    def load_backs(self) -> Int32s:
        """[L, 2] int32 (host page, device page)."""

    @property
    def load_back_ids(self) -> Int64s:
        """[L] int64."""


@dataclass(frozen=True, slots=True)
class Completed:
    """Transfers that ended, in the order in which they were started.

    Attributes:
        ids: [n] int64.
        ok: [n] bool; False: nothing may be assumed of the destination pages.
    """

    ids: Int64s
    ok: NDArray[np.bool_]

    def __bool__(self) -> bool:
        return len(self.ids) > 0


@dataclass(slots=True)
class _Started:
    transfer_id: int
    ok: bool
    event: torch.cuda.Event | None  # None: over already


class TransferEngine:
    """Starts the copies of each plan, and says which are over. One thread.

    On a GPU the copies run on a side stream, after the compute that was queued before them and beside that which is queued after:

    - A load-back is queued layer by layer. The pool lets a layer's compute wait for that layer's copy alone, so the first layers
      compute while the last ones are still on the bus. It is therefore reported as over once it is queued: whatever is queued on
      the compute stream afterwards sees the pages.
    - A write-back is over when its last byte is in the host's memory.

    On a CPU a copy is over when `start` returns.

    A transfer whose start fails is reported as such, and the others go on: who needed it computes the tokens anew. (An error inside
    a kernel of a GPU comes later and ends the process, like any other there.)

    Args:
        device: the pool that kernels use.
        host: the pool of the second tier, of the same layout.
        copy_rows: copies rows between pools, (source, target, source rows, target rows); the kernel package's `transfer_pages`.
    """

    def __init__(self, device: KVPool, host: HostPool, *, copy_rows: CopyRows = transfer_pages) -> None:
        if device.layout != host.layout:
            raise ValueError(f"transfers: expected pools of one layout, got {device.layout} and {host.layout}")
        self._pool, self._host = device, host
        self._device = device.device
        self._copy_rows = copy_rows
        self._num_layers = device.layout.num_layers
        self._started: deque[_Started] = deque()
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self.num_written_pages = 0
        self.num_loaded_pages = 0
        self.num_failed = 0

    @property
    def has_pending(self) -> bool:
        """Whether a transfer was started and `poll` has not told of its end."""
        return bool(self._started)

    def start(self, plan: TransferPlan) -> None:
        """Queue a plan's copies. Called for every plan, an empty one too, before its forward pass.

        Args:
            plan: source pages are final, destination pages are used by nobody; earlier steps may still read them.
        """
        if len(plan.write_backs):
            self._start(plan.write_backs, plan.write_back_ids, self._write_back)
        if len(plan.load_backs):
            self._start(plan.load_backs, plan.load_back_ids, self._load_back)

    def poll(self, *, wait: bool = False) -> Completed:
        """Transfers that are over, each told once, in the order of their start: one that is over early waits for those before.

        Args:
            wait: wait for the oldest, if there is one; for a caller that has nothing else to do.
        """
        ids: list[int] = []
        ok: list[bool] = []
        while self._started:
            first = self._started[0]
            if first.event is not None and not first.event.query():  # type: ignore[no-untyped-call]
                if not wait or ids:
                    break
                first.event.synchronize()
            ids.append(first.transfer_id)
            ok.append(first.ok)
            self._started.popleft()
        return Completed(np.array(ids, dtype=np.int64), np.array(ok, dtype=np.bool_))

    def fence(self) -> Callable[[], None]:
        """A function that waits, on any thread, until the copies that were started so far have left the host's pages alone.

        Load-backs are reported as over before that; whoever lets something else than a later copy write such a page calls it first.
        """
        return (lambda: None) if self._stream is None else self._record().synchronize

    def close(self) -> None:
        """Wait for all copies."""
        if self._stream is not None:
            self._stream.synchronize()
        self._started.clear()

    # -- one transfer -----------------------------------------------------------------------------------------------------

    def _start(self, pairs: Int32s, ids: Int64s, copy: Callable[[Int32s], torch.cuda.Event | None]) -> None:
        bounds = [0, *(np.flatnonzero(np.diff(ids)) + 1).tolist(), len(ids)]
        for begin, end in itertools.pairwise(bounds):
            transfer_id = int(ids[begin])
            try:
                started = _Started(transfer_id, True, copy(pairs[begin:end]))
            except Exception:
                # It concerns those who wait for these pages alone. What is wrong with the device itself shows in the next step.
                logger.exception("kv transfer %d of %d pages failed", transfer_id, end - begin)
                self.num_failed += 1
                if self._stream is not None:
                    # A part of it may be queued: later steps may be given these pages, and must not meet the copy there.
                    torch.cuda.current_stream(self._device).wait_stream(self._stream)
                started = _Started(transfer_id, False, None)
            self._started.append(started)

    def _write_back(self, pairs: Int32s) -> torch.cuda.Event | None:
        """All layers in one launch: nobody waits for a part of it."""
        layers = range(self._num_layers)
        source, target = self._device_rows(pairs[:, 0], layers), self._host_rows(pairs[:, 1], layers)
        event = self._copy(self._pool.rows, self._host.rows, source, target)
        self.num_written_pages += len(pairs)
        return event

    def _load_back(self, pairs: Int32s) -> None:
        source = [self._host_rows(pairs[:, 0], (layer,)) for layer in range(self._num_layers)]
        target = [self._device_rows(pairs[:, 1], (layer,)) for layer in range(self._num_layers)]
        events = self._copy_layers(source, target)
        if events:
            self._pool.wait_for_layers(events)
        self.num_loaded_pages += len(pairs)

    def _copy(self, source_pool: Tensor, target_pool: Tensor, source: Int64s, target: Int64s) -> torch.cuda.Event | None:
        if self._stream is None:
            self._copy_rows(source_pool, target_pool, torch.from_numpy(source), torch.from_numpy(target))
            return None
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            rows = self._to_device(np.stack((source, target)))
            self._copy_rows(source_pool, target_pool, rows[0], rows[1])
            return self._record()

    def _copy_layers(self, source: Sequence[Int64s], target: Sequence[Int64s]) -> list[torch.cuda.Event]:
        """Copy layer after layer from the host; the event behind each, none on a CPU."""
        if self._stream is None:
            for host_rows, device_rows in zip(source, target, strict=True):
                self._copy_rows(self._host.rows, self._pool.rows, torch.from_numpy(host_rows), torch.from_numpy(device_rows))
            return []
        # Steps that are still running may read the pages that these copies overwrite.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        events = []
        with torch.cuda.stream(self._stream):
            rows = self._to_device(np.stack((np.stack(source), np.stack(target)), axis=1))
            for layer in range(self._num_layers):
                self._copy_rows(self._host.rows, self._pool.rows, rows[layer, 0], rows[layer, 1])
                events.append(self._record())
        return events

    def _to_device(self, rows: Int64s) -> Tensor:
        return torch.from_numpy(rows).pin_memory().to(self._device, non_blocking=True)

    def _record(self) -> torch.cuda.Event:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event

    # -- rows of the pools ------------------------------------------------------------------------------------------------

    def _device_rows(self, pages: Int32s, layers: Sequence[int]) -> Int64s:
        """Rows of keys and values of these pages and layers: (layer * 2 + half) * num_pages + page."""
        halves = np.arange(2, dtype=np.int64) + 2 * np.asarray(layers, dtype=np.int64)[:, None]
        return (halves.reshape(-1, 1) * self._pool.num_pages + pages.astype(np.int64)).reshape(-1)

    def _host_rows(self, pages: Int32s, layers: Sequence[int]) -> Int64s:
        """Rows of keys and values of these pages and layers: (page * num_layers + layer) * 2 + half."""
        halves = np.arange(2, dtype=np.int64) + 2 * np.asarray(layers, dtype=np.int64)[:, None]
        return (halves.reshape(-1, 1) + pages.astype(np.int64) * (2 * self._num_layers)).reshape(-1)
