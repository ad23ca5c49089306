"""Heartbeats: the core's sender thread, and the front end's judgement."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Literal

from tokenspeed_engine.ipc.core import CoreLink
from tokenspeed_engine.ipc.messages import Heartbeat
from tokenspeed_engine.types import ProcessMemory

Phase = Literal["loading", "idle", "busy"]


class Progress:
    """What the core's main thread is at; written there, read by the heartbeat thread.

    Each attribute is written by one thread and read as a whole, so no lock is needed.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.phase: Phase = "loading"
        self.num_steps = 0
        self._since_s = clock()

    def set_phase(self, phase: Phase) -> None:
        """Enter a phase; entering the same phase again changes nothing."""
        if phase != self.phase:
            self._since_s = self._clock()
            self.phase = phase

    def step_done(self) -> None:
        """A step was finished: progress."""
        self.num_steps += 1
        self._since_s = self._clock()

    def snapshot(self) -> Heartbeat:
        """The heartbeat to send now."""
        stalled_s = self._clock() - self._since_s if self.phase == "busy" else 0.0
        memory = ProcessMemory.now()
        return Heartbeat(self.phase, self.num_steps, stalled_s, memory.resident_bytes, memory.peak_bytes)


class HeartbeatThread(threading.Thread):
    """Sends the progress at a steady pace. A long step or slow loading does not stop it; a stopped process does."""

    def __init__(self, connect: Callable[[], CoreLink], progress: Progress, interval_s: float) -> None:
        """Args: connect: opens the link, in this thread. progress: what to report. interval_s: pace."""
        super().__init__(name="heartbeat", daemon=True)
        self._connect = connect
        self._progress = progress
        self._interval_s = interval_s
        self._stop_event = threading.Event()

    def run(self) -> None:
        """Send until stopped. A full queue drops the heartbeat: the next one says the same."""
        with self._connect() as link:
            while not self._stop_event.is_set():
                link.send(self._progress.snapshot())
                self._stop_event.wait(self._interval_s)

    def stop(self) -> None:
        """Stop the thread, and wait for it."""
        self._stop_event.set()
        self.join(timeout=5.0)


class HeartbeatMonitor:
    """Decides from heartbeats and the clock whether the core is dead or hung."""

    def __init__(self, *, interval_s: float, timeout_s: float, hang_timeout_s: float, now_s: float) -> None:
        """Args: interval_s: pace of checks. timeout_s: longest silence. hang_timeout_s: longest step. now_s: the time."""
        self._interval_s = interval_s
        self._timeout_s = timeout_s
        self._hang_timeout_s = hang_timeout_s
        self._heard_s = now_s
        self._checked_s = now_s
        self._last: Heartbeat | None = None

    def observe(self, heartbeat: Heartbeat, now_s: float) -> None:
        """Take a heartbeat into account."""
        self._heard_s = now_s
        self._last = heartbeat

    def verdict(self, now_s: float) -> str:
        """Why the core must be replaced, or an empty text. To be called at the pace of the heartbeats."""
        # A check that comes late means that this process itself stood still (suspended, or a blocked event loop): heartbeats
        # may lie unread in the socket, so the silence proves nothing.
        if now_s - self._checked_s > 2 * self._interval_s + 1.0:
            self._heard_s = now_s
        self._checked_s = now_s
        silence_s = now_s - self._heard_s
        if silence_s > self._timeout_s:
            return f"no heartbeat of the engine core for {silence_s:.1f} s (limit {self._timeout_s:g} s)"
        if self._last is not None and self._last.stalled_s > self._hang_timeout_s:
            return (
                f"the engine core hangs: no step finished for {self._last.stalled_s:.1f} s with work in flight "
                f"(limit {self._hang_timeout_s:g} s, --hang-timeout)"
            )
        return ""
