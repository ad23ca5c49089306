"""The composition root: puts front end, engine core and HTTP server together."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Protocol

from aiohttp import web

from tokenspeed_engine.checkpoint import default_model_path
from tokenspeed_engine.client import CoreClient
from tokenspeed_engine.config import ConfigError, EngineConfig, ServerConfig
from tokenspeed_engine.ipc import CoreReady, Heartbeat, LoadProgress, RequestRejected, StatsReply, StepOutputs
from tokenspeed_engine.metrics import EngineMetrics
from tokenspeed_engine.server import build_app, build_runner
from tokenspeed_engine.supervisor import CoreFailedError, CoreSupervisor
from tokenspeed_engine.tokenizer import Tokenizer, load_tokenizer

logger = logging.getLogger(__name__)

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_START_FAILED = 3
EXIT_CORE_FAILED = 4
EXIT_GRACE_EXCEEDED = 5

# After the last token of a drained server: time to write the ends of the responses.
_LAST_BYTES_S = 5.0
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Console(Protocol):
    """Where a start reports to."""

    def say(self, text: str) -> None:
        """Show a line."""

    def progress(self, progress: LoadProgress) -> None:
        """Show how far the core's start is."""


class Engine:
    """Client, tokenizer and a supervised core; without HTTP."""

    def __init__(self, config: EngineConfig, console: Console) -> None:
        """Args: config: everything. console: told of progress, restarts and readiness."""
        self.config = config
        self.metrics = EngineMetrics()
        self.client = CoreClient(self.metrics, max_requests=config.core.scheduling.max_requests)
        self._supervisor = CoreSupervisor(config.core, _Listener(self.client, console))
        self.client.attach(self._supervisor.send)
        self._watch: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin to start the core. Raises SocketPathError; see `wait_ready` for the rest."""
        self._watch = await self._supervisor.start()

    async def wait_ready(self) -> None:
        """Load the tokenizer while the core loads, and wait for both.

        Raises:
            CoreFailedError: the core could not be started.  TokenizerError, CheckpointError, ConfigError: no tokenizer.
        """
        self.client.set_tokenizer(await asyncio.to_thread(_load_tokenizer, self.config))
        ready = asyncio.create_task(self.client.ready.wait())
        try:
            await asyncio.wait({ready, self._watching}, return_when=asyncio.FIRST_COMPLETED)
            if not ready.done():
                self._watching.result()
        finally:
            ready.cancel()

    async def wait_failed(self) -> None:
        """Wait until the core is given up. Raises CoreFailedError."""
        await asyncio.shield(self._watching)

    async def stop(self) -> None:
        """End the core; no process and no file is left."""
        await self._supervisor.stop()

    def kill_now(self) -> None:
        """End the core at once, from a signal handler."""
        self._supervisor.kill_now()

    @property
    def _watching(self) -> asyncio.Task[None]:
        if self._watch is None:
            raise RuntimeError("engine: used before start")
        return self._watch


@contextlib.asynccontextmanager
async def open_engine(config: EngineConfig, console: Console) -> AsyncIterator[Engine]:
    """An engine that is ready, for programs without a server; ended at the exit of the block."""
    _check_files(config)
    engine = Engine(config, console)
    await engine.start()
    try:
        await engine.wait_ready()
        yield engine
    finally:
        await engine.stop()


async def serve(config: EngineConfig, console: Console) -> int:
    """Serve until a signal, or until the core is given up.

    The socket listens from the beginning, so that a port in use is known before the model is loaded, and probes get answers.

    Args:
        config: everything.
        console: gets the lines of the start.
    Returns:
        the exit status: EXIT_OK after a drained stop, EXIT_GRACE_EXCEEDED when requests had to be cut off,
        EXIT_START_FAILED or EXIT_CORE_FAILED with the reason in the log.
    Raises:
        ConfigError: the address cannot be bound, or the chat template cannot be read.  CheckpointError: there is no default model.
    """
    _check_files(config)
    engine = Engine(config, console)
    listener = _bind(config.server)
    runner = build_runner(
        build_app(engine.client, config.server, engine.metrics, seed=config.core.model.seed),
        shutdown_timeout_s=_LAST_BYTES_S,
    )
    stop = _StopSignals(engine)
    try:
        await engine.start()
        await runner.setup()
        await web.SockSite(runner, listener).start()
        console.say(f"listening on {_url(listener)} (not ready yet)")
        return await _run(engine, runner, stop, console, _url(listener))
    finally:
        await runner.cleanup()
        listener.close()
        await engine.stop()
        stop.close()


async def _run(engine: Engine, runner: web.AppRunner, stop: _StopSignals, console: Console, url: str) -> int:
    if not await _start(engine, stop, console, url):
        return EXIT_OK if stop.event.is_set() else EXIT_START_FAILED
    failed = asyncio.create_task(engine.wait_failed())
    stopped = asyncio.create_task(stop.event.wait())
    await asyncio.wait({failed, stopped}, return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if failed.done():
        logger.critical("the engine core is given up: %s", failed.exception())
        return EXIT_CORE_FAILED
    status = await _drain(engine, failed, console)
    # Answers are being finished: the last bytes of a stream are written after its last token.
    failed.cancel()
    await runner.cleanup()
    return status


async def _start(engine: Engine, stop: _StopSignals, console: Console, url: str) -> bool:
    """Wait for readiness; False when that failed or a signal came first."""
    ready = asyncio.create_task(engine.wait_ready())
    stopped = asyncio.create_task(stop.event.wait())
    await asyncio.wait({ready, stopped}, return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if not ready.done():
        ready.cancel()
        return False
    try:
        ready.result()
    except (CoreFailedError, ConfigError, ValueError, OSError) as error:
        # ValueError is the base of the checkpoint's and the tokenizer's errors.
        logger.critical("the engine cannot start: %s", error)
        return False
    for line in ready_lines(engine, url):
        console.say(line)
    return True


async def _drain(engine: Engine, failed: asyncio.Task[None], console: Console) -> int:
    """Refuse new requests, and let the others end. Returns the exit status."""
    client, grace_s = engine.client, engine.config.server.graceful_shutdown_s
    client.begin_drain()
    console.say(f"stopping: {client.num_active} request(s) to finish, at most {grace_s:g} s; signal again to stop at once")
    idle = asyncio.create_task(client.wait_idle())
    await asyncio.wait({idle, failed}, timeout=grace_s, return_when=asyncio.FIRST_COMPLETED)
    if idle.done():
        return EXIT_OK
    idle.cancel()
    if failed.done():
        return EXIT_CORE_FAILED
    logger.warning("%d request(s) did not finish within %g s and are cut off", client.num_active, grace_s)
    client.end_streams("the server was stopped before the request was finished")
    return EXIT_GRACE_EXCEEDED


def ready_lines(engine: Engine, url: str) -> list[str]:
    """What to show when requests are taken: the model, the URL, and a line to paste."""
    info = engine.client.model_info
    name = (engine.config.server.served_model_names or (info.name,))[0]
    body = json.dumps(
        {
            "model": name,
            "temperature": 0,
            "messages": [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}],
        }
    )
    key = ' -H "Authorization: Bearer $TOKENSPEED_API_KEY"' if engine.config.server.api_keys else ""
    quoted = body.replace("'", "'\\''")
    return [
        f"ready: {name} ({info.architecture}, {info.dtype} on {info.device}), {info.num_pages * info.page_size:,} tokens of KV "
        f"cache, sequences up to {info.max_model_len:,} tokens",
        f"memory: {info.weights_bytes / 1e6:,.0f} MB of weights ({info.weights}), {info.kv_cache_bytes / 1e6:,.0f} MB of KV cache",
        f"serving {url}/v1 - try:",
        f"curl {url}/v1/chat/completions -H 'Content-Type: application/json'{key} -d '{quoted}'",
    ]


def _check_files(config: EngineConfig) -> None:
    """Find what is missing before anything is started."""
    _chat_template(config)
    if not config.core.model.model:
        default_model_path()


def _load_tokenizer(config: EngineConfig) -> Tokenizer:
    tokenizer, model = config.tokenizer.tokenizer, config.core.model
    source = tokenizer or model.model or str(default_model_path())
    # A revision belongs to the model's repository, not to that of another tokenizer.
    revision = model.revision if not tokenizer else ""
    return load_tokenizer(source, chat_template=_chat_template(config), revision=revision or None)


def _chat_template(config: EngineConfig) -> str | None:
    """The template itself, or what the file of that name holds; None for the model's own."""
    value = config.tokenizer.chat_template
    if not value or "{" in value:
        return value or None
    try:
        return Path(value).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            "--chat-template",
            value,
            expected=f"a readable file, or a template with {{{{ }}}} or {{% %}} ({error})",
            remedy="check the path, or leave the flag out to use the model's own template",
        ) from error


def _bind(config: ServerConfig) -> socket.socket:
    """A bound socket; the first address that the host's name gives."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise ConfigError(
            "--host", config.host, expected=f"an address of this machine ({error})", remedy="use 127.0.0.1 or 0.0.0.0"
        ) from error
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise ConfigError(
            "--port",
            config.port,
            expected=f"a port that is free on {config.host} ({os.strerror(error.errno or 0)})",
            remedy="stop the other server, choose another port, or use --port 0 for a free one",
        ) from error
    return listener


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{shown}:{port}"


class _StopSignals:
    """The first SIGTERM or SIGINT asks for an orderly stop, the second ends everything at once."""

    def __init__(self, engine: Engine) -> None:
        self.event = asyncio.Event()
        self._engine = engine
        self._loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            self._loop.add_signal_handler(number, self._on_signal, number)

    def _on_signal(self, number: signal.Signals) -> None:
        if not self.event.is_set():
            logger.info("%s: stopping", number.name)
            self.event.set()
            return
        self._engine.kill_now()
        os._exit(128 + number)

    def close(self) -> None:
        """Give the signals back."""
        for number in _SIGNALS:
            self._loop.remove_signal_handler(number)


class _Listener:
    """Passes what the supervisor reports to the client, and what people want to know to the console."""

    def __init__(self, client: CoreClient, console: Console) -> None:
        self._client = client
        self._console = console

    def on_starting(self) -> None:
        self._client.on_starting()

    def on_progress(self, progress: LoadProgress) -> None:
        self._client.on_progress(progress)
        self._console.progress(progress)

    def on_ready(self, ready: CoreReady) -> None:
        self._client.on_ready(ready)
        memory = ""
        if ready.resident_bytes:
            memory = f", {ready.resident_bytes / 1e6:.0f} MB resident (at most {ready.peak_resident_bytes / 1e6:.0f} so far)"
        self._console.say(
            f"engine core ready after {ready.startup_s:.1f} s, at most {ready.max_num_batched_tokens} tokens a step{memory}"
        )

    def on_heartbeat(self, heartbeat: Heartbeat) -> None:
        self._client.on_heartbeat(heartbeat)

    def on_message(self, message: StepOutputs | RequestRejected | StatsReply) -> None:
        self._client.on_message(message)

    def on_down(self, reason: str) -> None:
        self._client.on_down(reason)

    def on_restart(self, attempt: int, delay_s: float) -> None:
        self._client.on_restart(attempt, delay_s)
        self._console.say(f"engine core: restart {attempt} in {delay_s:.1f} s")
