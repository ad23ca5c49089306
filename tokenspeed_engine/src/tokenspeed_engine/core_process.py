"""The engine core's process: reads its launch message, loads the model, serves until it is told to stop."""

from __future__ import annotations

import importlib.util
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from tokenspeed_engine.config import CoreConfig
from tokenspeed_engine.ipc import (
    PROTOCOL_VERSION,
    CoreFailed,
    CoreLaunch,
    CoreLink,
    CoreReady,
    HandshakeError,
    HeartbeatThread,
    LoadProgress,
    Progress,
    ProtocolError,
    Role,
    decode_launch,
    die_with_parent,
    watch_parent,
)
from tokenspeed_engine.loop import CacheTiers, EngineLoop, Executor
from tokenspeed_engine.scheduler import Scheduler
from tokenspeed_engine.types import ModelInfo, ProcessMemory

logger = logging.getLogger(__name__)

EXIT_OK = 0
EXIT_CRASH = 1
EXIT_LOAD_FAILED = 3
EXIT_HANDSHAKE = 4
EXIT_PARENT_DIED = 5

_STDIN = 0
_MAX_LAUNCH_BYTES = 1 << 20

ReportProgress = Callable[[LoadProgress], object]


@dataclass(frozen=True, slots=True)
class CoreParts:
    """What a core is made of.

    Attributes:
        executor: runs the plans.
        scheduler: makes them.
        model_info: facts for the front end.
        max_num_batched_tokens: token budget of a step, as chosen.
        tiers: what stands behind the device's cache.
    """

    executor: Executor
    scheduler: Scheduler
    model_info: ModelInfo
    max_num_batched_tokens: int
    tiers: CacheTiers = field(default_factory=CacheTiers)


class LoadError(Exception):
    """The model cannot be served as configured; the text says why and what to do."""


def run_core(build: Callable[[CoreConfig, ReportProgress], CoreParts]) -> int:
    """Run a core until the front end stops it or dies.

    Args:
        build: loads the model. Raises LoadError for what the user can mend.
    Returns:
        the exit status; EXIT_OK after an orderly stop.
    """
    started_s = time.monotonic()
    try:
        launch = _read_launch(_STDIN)
        config = msgspec.msgpack.decode(launch.config, type=CoreConfig)
        _tie_to_parent(launch, _STDIN)
        _configure_logging(config.process.log_level)
        link = _connect(launch, config, "data")
    except (ProtocolError, HandshakeError, RuntimeError, msgspec.ValidationError) as error:
        print(f"engine core: {error}", file=sys.stderr, flush=True)
        return EXIT_HANDSHAKE
    progress = Progress()
    heartbeat = HeartbeatThread(lambda: _connect(launch, config, "heartbeat"), progress, config.process.heartbeat_interval_s)
    heartbeat.start()
    with link:
        try:
            return _serve(config, link, progress, build, started_s)
        finally:
            heartbeat.stop()


def _serve(
    config: CoreConfig,
    link: CoreLink,
    progress: Progress,
    build: Callable[[CoreConfig, ReportProgress], CoreParts],
    started_s: float,
) -> int:
    try:
        parts = build(config, link.send)
    except LoadError as error:
        link.send(CoreFailed(str(error), user_error=True))
        return EXIT_LOAD_FAILED
    except Exception as error:
        logger.exception("engine core: loading failed")
        link.send(CoreFailed(f"the engine core failed while loading: {_brief(error)}"))
        return EXIT_LOAD_FAILED
    loop = EngineLoop(
        parts.scheduler,
        parts.executor,
        link,
        progress,
        parts.model_info,
        pipeline_depth=config.scheduling.pipeline_depth,
        tiers=parts.tiers,
    )
    progress.set_phase("idle")
    memory = ProcessMemory.now()
    startup_s = time.monotonic() - started_s
    link.send(CoreReady(parts.model_info, parts.max_num_batched_tokens, startup_s, memory.resident_bytes, memory.peak_bytes))
    try:
        loop.run()
    except Exception as error:
        # A failed step leaves device and sampler in an unknown state, so the process ends and a new one takes its place.
        logger.exception("engine core: a step failed")
        cause = f"the engine core failed: {_brief(error)}"
        loop.fail(cause)
        link.send(CoreFailed(cause))
        return EXIT_CRASH
    return EXIT_OK


def _configure_logging(level: str) -> None:
    """Log to standard error, which front end and core share."""
    logging.basicConfig(level=level.upper(), format="%(asctime)s %(levelname)s core %(name)s: %(message)s")


def _read_launch(pipe_fd: int) -> CoreLaunch:
    """The launch message: four bytes of length, big-endian, then msgpack."""
    size = int.from_bytes(_read_exactly(pipe_fd, 4), "big")
    if not 0 < size <= _MAX_LAUNCH_BYTES:
        raise ProtocolError(
            "ipc.launch: expected a launch message on standard input, got none\n"
            "Fix: this process is started by `tokenspeed-engine serve`, not by hand"
        )
    launch = decode_launch(_read_exactly(pipe_fd, size))
    if launch.protocol_version != PROTOCOL_VERSION:
        raise ProtocolError(
            f"ipc.launch: protocol version: expected {PROTOCOL_VERSION}, got {launch.protocol_version}\n"
            "Fix: run front end and engine core from the same installation"
        )
    return launch


def _read_exactly(fd: int, size: int) -> bytes:
    """So many bytes, or fewer when the pipe ends."""
    data = b""
    while len(data) < size and (part := os.read(fd, size - len(data))):
        data += part
    return data


def _tie_to_parent(launch: CoreLaunch, pipe_fd: int) -> None:
    # Ctrl-C and service managers signal the whole group; the front end alone decides when the core ends, so that requests in
    # flight can be finished first.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    die_with_parent(launch.parent_pid)
    watch_parent(launch.parent_pid, pipe_fd, lambda: os._exit(EXIT_PARENT_DIED))


def _connect(launch: CoreLaunch, config: CoreConfig, role: Role) -> CoreLink:
    return CoreLink(
        launch.endpoint,
        token=launch.token,
        role=role,
        max_message_bytes=config.process.max_message_bytes,
        queue_limit=2 * config.scheduling.max_requests + 64,
    )


def _brief(error: BaseException) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _check_kernel_package() -> None:
    """Another project's package on public registries has the name of ours; it must not be taken for it.

    Raises:
        LoadError: the installed tokenspeed_kernel is not this project's, or there is none.
    """
    try:
        from tokenspeed_kernel import API_VERSION, current_platform  # noqa: F401 - that they exist is the check
    except ImportError as error:
        spec = importlib.util.find_spec("tokenspeed_kernel")
        found = spec.origin if spec is not None else "none"
        raise LoadError(
            f"tokenspeed_kernel: expected the package of this project, got {found} ({error})\n"
            "Fix: install both packages from their folders in one command: pip install ./tokenspeed_kernel ./tokenspeed_engine"
        ) from error


def _build(config: CoreConfig, report: ReportProgress) -> CoreParts:
    _check_kernel_package()
    # Imported here: it brings torch, and a launch that is refused should be refused at once.
    from tokenspeed_engine.core_build import build_core

    return build_core(config, report)


def main() -> int:
    """Entry of the core's process."""
    return run_core(_build)


if __name__ == "__main__":
    # The module by its own name: `LoadError` of `__main__` is another class than the one that core_build raises.
    sys.exit(importlib.import_module("tokenspeed_engine.core_process").main())
