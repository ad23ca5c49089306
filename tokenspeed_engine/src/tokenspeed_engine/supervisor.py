"""Starts the engine core, watches it, and starts it again when it dies."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec

from tokenspeed_engine.config import CoreConfig
from tokenspeed_engine.ipc import (
    PROTOCOL_VERSION,
    CoreFailed,
    CoreLaunch,
    CoreReady,
    FrontendLink,
    Heartbeat,
    HeartbeatMonitor,
    LinkBusyError,
    LinkDownError,
    LoadProgress,
    PrivateDirectory,
    RequestRejected,
    Shutdown,
    StatsReply,
    StepOutputs,
    ToCore,
    ToFrontend,
    encode,
)

logger = logging.getLogger(__name__)

CORE_COMMAND = (sys.executable, "-P", "-m", "tokenspeed_engine.core_process")

# Environment variables that the core must not inherit: it needs no secret of the server.
_PRIVATE_VARIABLES = ("TOKENSPEED_API_KEY",)
# How long an OpenMP thread of the core spins for its next piece of work before it sleeps, in loops. libgomp's default (300,000) is
# right for a machine of one's own; with anything else on the cores, here the front end itself, waiting threads take the time of
# working ones. SmolLM2-135M, fp32, decode at batch 1 on 2 cores at a load of 6: default 555 to 1,320 ms a token, this 178 to 245.
_SPIN_VARIABLES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
_SPIN_COUNT = "5000"
_STOP_GRACE_S = 5.0
_LAST_WORDS_S = 0.1


class CoreListener(Protocol):
    """Who wants to know how the core fares. Called in the event loop; must not block."""

    def on_progress(self, progress: LoadProgress) -> None:
        """The core is starting, and so far."""

    def on_ready(self, ready: CoreReady) -> None:
        """The core takes requests."""

    def on_heartbeat(self, heartbeat: Heartbeat) -> None:
        """The core's process lives, and takes so much memory."""

    def on_message(self, message: StepOutputs | RequestRejected | StatsReply) -> None:
        """The core has something for the requests."""

    def on_down(self, reason: str) -> None:
        """The core is gone, and with it all requests that it held."""

    def on_restart(self, attempt: int, delay_s: float) -> None:
        """The core will be started again after the delay."""

    def on_starting(self) -> None:
        """A core process is being started."""


class CoreFailedError(Exception):
    """The core could not be started, or died too often. The text says why.

    Attributes:
        was_ready: whether it had been ready before.
    """

    def __init__(self, reason: str, *, was_ready: bool) -> None:
        super().__init__(reason)
        self.was_ready = was_ready


@dataclass(frozen=True, slots=True)
class _Life:
    """How one core process ended."""

    reason: str
    ready_s: float
    is_final: bool


class CoreSupervisor:
    """Owns the core's process, its socket directory and the link. Lives in one event loop."""

    def __init__(self, config: CoreConfig, listener: CoreListener, *, command: Sequence[str] = CORE_COMMAND) -> None:
        """Args: command: how to start a core; tests start one with a scripted executor."""
        self._config = config
        self._limits = config.process
        self._listener = listener
        self._command = tuple(command)
        self._directory: PrivateDirectory | None = None
        self._link: FrontendLink | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._monitor: HeartbeatMonitor | None = None
        self._ready_at_s: float | None = None
        self._failure: CoreFailed | None = None
        self._was_ever_ready = False
        self._stopping = False
        self._task: asyncio.Task[None] | None = None
        self.num_restarts = 0

    async def start(self) -> asyncio.Task[None]:
        """Make the socket and start the first core in the background.

        Returns:
            the task that keeps a core alive. It ends when `stop` is called, and raises CoreFailedError when the core cannot be
            started or died too often.
        Raises:
            SocketPathError: no directory is fit for the sockets.
        """
        self._directory = PrivateDirectory(self._limits.runtime_dir)
        self._link = FrontendLink(
            self._directory.endpoint,
            self._on_message,
            max_message_bytes=self._limits.max_message_bytes,
            # Each request can have a submission and an abort on their way.
            queue_limit=2 * self._config.scheduling.max_requests + 64,
        )
        self._link.start()
        self._task = asyncio.create_task(self._keep_alive(), name="core-supervisor")
        return self._task

    @property
    def core_pid(self) -> int | None:
        """Process id of the core, while there is one."""
        return self._process.pid if self._process is not None and self._process.returncode is None else None

    @property
    def runtime_directory(self) -> Path | None:
        """The private directory of the socket, while it exists."""
        return self._directory.path if self._directory is not None else None

    def send(self, message: ToCore) -> None:
        """Send to the core. Raises what FrontendLink.send does."""
        if self._link is None:
            raise LinkDownError("ipc.send: the engine core was not started")
        self._link.send(message)

    async def stop(self) -> None:
        """End the core: ask it, then insist. Afterwards no process and no file is left."""
        self._stopping = True
        process = self._process
        # A core that still loads reads no messages yet.
        if process is not None and process.returncode is None and self._ready_at_s is not None:
            with contextlib.suppress(LinkDownError, LinkBusyError):
                self.send(Shutdown())
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), _STOP_GRACE_S)
        await self._kill()
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError, CoreFailedError):
                await self._task
        self._release()

    def kill_now(self) -> None:
        """End the core at once, from a signal handler; leaves no process and no file."""
        self._stopping = True
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGKILL)
        if self._directory is not None:
            self._directory.close()

    def _release(self) -> None:
        if self._link is not None:
            self._link.close()
        if self._directory is not None:
            self._directory.close()

    # -- the life of a core -----------------------------------------------------------------------------------------------

    async def _keep_alive(self) -> None:
        attempts = 0
        while True:
            life = await self._run_core()
            if self._stopping:
                return
            logger.error("engine core: %s", life.reason)
            self._listener.on_down(life.reason)
            if life.ready_s >= self._limits.stable_after_s:
                attempts = 0
            if life.is_final or not self._was_ever_ready or attempts >= self._limits.max_restarts:
                raise CoreFailedError(life.reason, was_ready=self._was_ever_ready)
            delay_s = self._limits.restart_delay_s(attempts)
            attempts += 1
            self.num_restarts += 1
            self._listener.on_restart(attempts, delay_s)
            await asyncio.sleep(delay_s)

    async def _run_core(self) -> _Life:
        """Start a core and wait until it is gone."""
        self._failure, self._ready_at_s = None, None
        self._listener.on_starting()
        process = await self._spawn()
        self._process = process
        limits, started_s = self._limits, time.monotonic()
        self._monitor = HeartbeatMonitor(
            interval_s=limits.heartbeat_interval_s,
            # Until the first heartbeat the process imports its libraries, which the start-up limit covers.
            timeout_s=limits.heartbeat_timeout_s,
            hang_timeout_s=limits.hang_timeout_s,
            now_s=started_s + min(limits.startup_timeout_s, 300.0),
        )
        exited = asyncio.create_task(process.wait())
        reason = ""
        try:
            while not exited.done() and not reason:
                await asyncio.wait({exited}, timeout=limits.heartbeat_interval_s)
                if not exited.done():
                    reason = self._objection(started_s)
        finally:
            if reason or not exited.done():
                await self._kill()
            await exited
        # What the core said last may still be in the socket.
        await asyncio.sleep(_LAST_WORDS_S)
        ready_s = time.monotonic() - self._ready_at_s if self._ready_at_s is not None else 0.0
        is_final = self._failure is not None and self._failure.user_error
        return _Life(reason or self._obituary(process.returncode), ready_s, is_final)

    def _objection(self, started_s: float) -> str:
        """Why a running core must be ended, or an empty text."""
        now_s = time.monotonic()
        if self._ready_at_s is None and now_s - started_s > self._limits.startup_timeout_s:
            return (
                f"the engine core was not ready after {now_s - started_s:.0f} s "
                f"(limit {self._limits.startup_timeout_s:g} s, --startup-timeout)"
            )
        return self._monitor.verdict(now_s) if self._monitor is not None else ""

    def _obituary(self, returncode: int | None) -> str:
        if self._failure is not None:
            return self._failure.message
        if returncode is not None and returncode < 0:
            try:
                name = signal.Signals(-returncode).name
            except ValueError:
                name = f"signal {-returncode}"
            hint = " (out of memory?)" if name == "SIGKILL" else ""
            return f"the engine core was ended by {name}{hint}"
        return f"the engine core ended with exit status {returncode}"

    async def _spawn(self) -> asyncio.subprocess.Process:
        if self._link is None or self._directory is None:
            raise RuntimeError("supervisor: spawn before start")
        launch = CoreLaunch(
            protocol_version=PROTOCOL_VERSION,
            endpoint=self._directory.endpoint,
            token=self._link.new_token(),
            parent_pid=os.getpid(),
            config=msgspec.msgpack.encode(self._config),
        )
        raw = encode(launch, max_bytes=self._limits.max_message_bytes)
        environment = {name: value for name, value in os.environ.items() if name not in _PRIVATE_VARIABLES}
        if not any(name in environment for name in _SPIN_VARIABLES):
            environment[_SPIN_VARIABLES[0]] = _SPIN_COUNT
        process = await asyncio.create_subprocess_exec(*self._command, stdin=asyncio.subprocess.PIPE, env=environment)
        # The pipe stays open for the life of the core: its end is how the core notices that this process died.
        if process.stdin is None:
            raise RuntimeError("supervisor: the core has no standard input")
        with contextlib.suppress(ConnectionError):
            process.stdin.write(len(raw).to_bytes(4, "big") + raw)
            await process.stdin.drain()
        return process

    async def _kill(self) -> None:
        process = self._process
        if process is None:
            return
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    # -- messages ---------------------------------------------------------------------------------------------------------

    def _on_message(self, message: ToFrontend | Heartbeat) -> None:
        match message:
            case Heartbeat():
                if self._monitor is not None:
                    self._monitor.observe(message, time.monotonic())
                self._listener.on_heartbeat(message)
            case LoadProgress():
                self._listener.on_progress(message)
            case CoreReady():
                self._ready_at_s = time.monotonic()
                self._was_ever_ready = True
                self._listener.on_ready(message)
            case CoreFailed():
                self._failure = message
            case _:
                self._listener.on_message(message)
