"""Deaths and hangs of either process: open streams get an error, the core comes back, nothing is left behind."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tokenspeed_engine.config import CoreConfig, ModelConfig
from tokenspeed_engine.core_process import EXIT_HANDSHAKE
from tokenspeed_engine.ipc import PROTOCOL_VERSION, CoreLaunch, PrivateDirectory
from tokenspeed_engine.server.engine_client import EngineDeadError, EngineStatus
from tokenspeed_engine.supervisor import CoreFailedError
from tokenspeed_engine.types import FinishReason

HERE = Path(__file__).parent
_SPEC = importlib.util.spec_from_file_location("scripted_core", HERE / "scripted_core.py")
assert _SPEC is not None
assert _SPEC.loader is not None
scripted = importlib.util.module_from_spec(_SPEC)
sys.modules[_SPEC.name] = scripted
_SPEC.loader.exec_module(scripted)
Command, token_of = scripted.Command, scripted.token_of


def wanted(prompt: list[int], count: int) -> list[int]:
    return [token_of(prompt, index) for index in range(count)]


def is_alive(pid: int) -> bool:
    """Whether the process runs; one that has ended and was not yet collected does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


async def first_delta(engine: Any, name: str, prompt: list[int]) -> Any:
    stream = engine.client.generate(engine.request(name, prompt, 400))
    await anext(stream)
    return stream


async def expect_death(stream: Any, message: str) -> None:
    with pytest.raises(EngineDeadError, match=message):
        async for _ in stream:
            pass


async def test_kill_9_of_the_core(make_engine: Any) -> None:
    engine = await make_engine("step=0.01", restart_backoff_s=0.3)
    streams = [await first_delta(engine, f"r{n}", [7000 + n]) for n in range(3)]
    old_pid = engine.supervisor.core_pid
    statuses = []
    os.kill(old_pid, signal.SIGKILL)
    for stream in streams:
        await expect_death(stream, "SIGKILL")
        statuses.append(engine.client.status)
    assert EngineStatus.READY not in statuses
    with pytest.raises(EngineDeadError):
        await engine.tokens("refused", [1])
    await engine.ready()
    assert engine.client.status is EngineStatus.READY
    assert engine.supervisor.core_pid != old_pid
    assert engine.supervisor.num_restarts == 1
    assert await engine.tokens("again", [7050], 5) == wanted([7050], 5)
    assert engine.client.num_active == 0
    assert b"tokenspeed:engine_restarts_total 1.0" in engine.metrics.render()


async def test_an_exception_in_a_step_reaches_the_streams_with_its_cause(make_engine: Any) -> None:
    engine = await make_engine("step=0.01")
    bystander = asyncio.create_task(engine.collect(engine.request("bystander", [7100], 400)))
    deltas = await engine.collect(engine.request("culprit", [int(Command.RAISE)], 8))
    assert deltas[-1].finish_reason is FinishReason.ERROR
    assert "scripted failure" in deltas[-1].error
    assert "scripted failure" in (await bystander)[-1].error
    await engine.until(lambda: engine.supervisor.num_restarts == 1)
    await engine.ready()
    assert await engine.tokens("again", [7101], 5) == wanted([7101], 5)


async def test_a_core_that_just_exits_is_reported_with_its_status(make_engine: Any) -> None:
    engine = await make_engine()
    stream = await first_delta(engine, "r", [int(Command.EXIT)])
    await expect_death(stream, "exit status 77")
    await engine.ready()


async def test_a_hung_step_is_found_and_a_long_one_is_not(make_engine: Any) -> None:
    engine = await make_engine("step=0.01", hang_timeout_s=3.0)
    assert await engine.tokens("slow", [int(Command.SLOW)], 2) == wanted([int(Command.SLOW)], 2)
    assert engine.supervisor.num_restarts == 0
    stream = await first_delta(engine, "hung", [int(Command.HANG)])
    await expect_death(stream, "hangs: no step finished")
    await engine.ready()
    assert await engine.tokens("again", [7200], 5) == wanted([7200], 5)


async def test_a_stopped_core_is_found_by_its_silence(make_engine: Any) -> None:
    engine = await make_engine("step=0.01", heartbeat_timeout_s=1.0)
    pid = engine.supervisor.core_pid
    stream = await first_delta(engine, "stopped", [int(Command.STOP)])
    await expect_death(stream, "no heartbeat")
    assert not is_alive(pid)
    await engine.ready()


async def test_slow_loading_is_no_hang(make_engine: Any) -> None:
    engine = await make_engine("load=2.5", heartbeat_timeout_s=1.0, hang_timeout_s=1.0)
    assert engine.supervisor.num_restarts == 0


async def test_a_start_that_takes_too_long_fails(make_engine: Any) -> None:
    with pytest.raises(CoreFailedError, match="--startup-timeout"):
        await make_engine("load=30", startup_timeout_s=1.5)


async def test_restarts_are_capped(make_engine: Any, tmp_path: Path) -> None:
    engine = await make_engine(f"once={tmp_path / 'marker'}", max_restarts=2)
    os.kill(engine.supervisor.core_pid, signal.SIGKILL)
    with pytest.raises(CoreFailedError, match="exit status 9") as caught:
        await asyncio.wait_for(engine.watch, 60)
    assert caught.value.was_ready
    assert engine.supervisor.num_restarts == 2
    assert engine.client.status is EngineStatus.DEAD


async def test_an_orderly_stop_leaves_nothing(make_engine: Any) -> None:
    engine = await make_engine()
    process, directory = engine.supervisor._process, engine.supervisor.runtime_directory
    assert directory.exists()
    await engine.stop()
    assert process.returncode == 0
    assert not directory.exists()


async def test_the_core_ignores_signals_meant_for_the_group(make_engine: Any) -> None:
    engine = await make_engine("step=0.005")
    reader = asyncio.create_task(engine.tokens("r", [7300], 100))
    await engine.until(lambda: engine.client.last_stats.num_running == 1)
    os.kill(engine.supervisor.core_pid, signal.SIGTERM)
    os.kill(engine.supervisor.core_pid, signal.SIGINT)
    assert await reader == wanted([7300], 100)
    assert engine.supervisor.num_restarts == 0


async def test_the_core_does_not_inherit_the_api_key(make_engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENSPEED_API_KEY", "very-secret-key")
    engine = await make_engine()
    process = Path(f"/proc/{engine.supervisor.core_pid}")
    assert b"very-secret-key" not in (process / "environ").read_bytes()
    assert b"very-secret-key" not in (process / "cmdline").read_bytes()


@pytest.mark.parametrize(("given", "expected"), [({}, b"GOMP_SPINCOUNT=5000"), ({"OMP_WAIT_POLICY": "ACTIVE"}, None)])
async def test_threads_of_the_core_spin_briefly_unless_told_otherwise(
    make_engine: Any, monkeypatch: pytest.MonkeyPatch, given: dict[str, str], expected: bytes | None
) -> None:
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    engine = await make_engine()
    variables = Path(f"/proc/{engine.supervisor.core_pid}/environ").read_bytes().split(b"\0")
    spin = [variable for variable in variables if variable.startswith(b"GOMP_SPINCOUNT=")]
    assert spin == ([expected] if expected else [])


@pytest.mark.parametrize("command", [7400, int(Command.HANG)], ids=["running", "hung"])
def test_kill_9_of_the_front_end_ends_the_core(command: int) -> None:
    frontend = subprocess.Popen(
        [sys.executable, "-P", str(HERE / "scripted_frontend.py"), "step=0.01", str(command)],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert frontend.stdout is not None
        pid, directory = frontend.stdout.readline().split()
        assert is_alive(int(pid))
        frontend.kill()
        frontend.wait()
        deadline = time.monotonic() + 20
        while is_alive(int(pid)):
            assert time.monotonic() < deadline, "the core outlived its front end"
            time.sleep(0.05)
    finally:
        frontend.kill()
        frontend.wait()
        if frontend.stdout is not None:
            frontend.stdout.close()
    # The next front end removes what this one could not.
    old = time.time() - 3600
    os.utime(directory, (old, old))
    PrivateDirectory(str(Path(directory).parent)).close()
    assert not Path(directory).exists()


def start_core_by_hand(stdin: bytes) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "tokenspeed_engine.core_process"]
    done = subprocess.run(command, input=stdin, capture_output=True, timeout=60, check=False)
    return subprocess.CompletedProcess(command, done.returncode, done.stdout.decode(), done.stderr.decode())


def launch(**changes: Any) -> bytes:
    fields = {
        "protocol_version": PROTOCOL_VERSION,
        "endpoint": "ipc:///tmp/nobody",
        "token": "t",
        "parent_pid": os.getpid(),
        "config": msgspec.msgpack.encode(CoreConfig(model=ModelConfig(model="x"))),
    }
    raw = msgspec.msgpack.encode(CoreLaunch(**(fields | changes)))
    return len(raw).to_bytes(4, "big") + raw


@pytest.mark.parametrize(
    ("stdin", "message"),
    [
        (b"", "expected a launch message on standard input"),
        (b"\x00\x00\x00\x05hello", "expected CoreLaunch"),
        (b"\xff\xff\xff\xff", "expected a launch message"),
        (launch(protocol_version=PROTOCOL_VERSION + 1), f"expected {PROTOCOL_VERSION}, got {PROTOCOL_VERSION + 1}"),
        (launch(config=msgspec.msgpack.encode({"model": {"seed": "x"}})), "Expected `int`"),
        (launch(parent_pid=1), "ended before its core started"),
    ],
    ids=["nothing", "garbage", "huge", "version", "config", "parent"],
)
def test_a_core_that_is_started_wrongly_says_so(stdin: bytes, message: str) -> None:
    done = start_core_by_hand(stdin)
    assert done.returncode == EXIT_HANDSHAKE
    assert message in done.stderr
    assert "Traceback" not in done.stderr
