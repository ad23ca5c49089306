"""`generate`, `bench`, `doctor`, and the parser."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from typing import Any

import pytest

from tokenspeed_engine.cli import main
from tokenspeed_engine.commands.bench import Stream, format_summary, random_prompts, summarize

COMMAND = (sys.executable, "-P", "-m", "tokenspeed_engine.cli")


def run(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments], capture_output=True, text=True, timeout=180, check=False, cwd=tempfile.gettempdir(), **options
    )


def test_generate_prints_json_and_a_bad_prompt_is_an_error_of_its_own(model_flags: list[str]) -> None:
    model, *flags = model_flags
    prompts = ["one", "word " * 5000, "two three"]
    done = run("generate", "--model", model, *flags, "--json", "--raw", "--max-tokens", "5", *prompts)
    assert done.returncode == 1, done.stderr
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert [answer["prompt"] for answer in answers] == prompts
    assert "at most 4096 tokens" in answers[1].pop("error")
    assert all(1 <= len(answer["token_ids"]) <= 5 and answer["error"] is None for answer in (answers[0], answers[2]))


def test_generate_without_a_tokenizer_says_so(model_flags: list[str]) -> None:
    done = run("generate", "--model", model_flags[0], "x")
    assert done.returncode == 3
    assert "load tokenizer: expected" in done.stderr
    assert "Traceback" not in done.stderr


def test_generate_with_the_default_model_answers() -> None:
    question = "What is the capital of France? Answer in one sentence."
    done = run("generate", "--max-tokens", "20", "--num-pages", "64", "--json", question, "Say yes.")
    assert done.returncode == 0, done.stderr
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert answers[0]["text"] == "The capital of France is Paris."
    assert answers[0]["finish_reason"] == "stop"
    assert answers[0]["num_prompt_tokens"] == 42
    assert answers[1]["prompt"] == "Say yes."


def test_generate_reads_standard_input_and_streams_text(model_flags: list[str]) -> None:
    model, *flags = model_flags
    done = run("generate", "--model", model, *flags, "--max-tokens", "4", input="The capital of France is")
    assert done.returncode == 0, done.stderr
    assert len(done.stdout) >= 2  # a random model may well answer with white space


@pytest.mark.parametrize(
    ("arguments", "flag"),
    [
        (["--max-tokens", "0", "x"], "--max-tokens"),
        (["--temperature", "-1", "x"], "--temperature"),
        (["--top-p", "0", "x"], "--top-p"),
        (["--stop", "", "x"], "--stop"),
        ([""], "PROMPT"),
    ],
)
def test_generate_refuses_mistakes(arguments: list[str], flag: str) -> None:
    done = run("generate", *arguments)
    assert done.returncode == 2
    assert f"{flag}: expected" in done.stderr


def test_bench_measures_a_running_server(shared_server: Any) -> None:
    sizes = ["--num-prompts", "6", "--concurrency", "3", "--input-len", "20", "--output-len", "8", "--prefix-len", "16"]
    done = run("bench", "--url", shared_server.url, *sizes, "--json")
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert figures["num_requests"] == 6
    assert figures["num_failed"] == 0
    assert figures["prompt_tokens"] == 120
    assert figures["output_tokens"] == 48
    assert figures["ttft_ms"]["p50"] > 0


def test_bench_starts_and_stops_a_server_of_its_own(model_flags: list[str]) -> None:
    model, *flags = model_flags
    sizes = ["--num-prompts", "2", "--concurrency", "2", "--input-len", "8", "--output-len", "4"]
    done = run("bench", "--model", model, *flags, *sizes)
    assert done.returncode == 0, done.stderr
    assert "2 (0 failed)" in done.stdout


def test_bench_reports_a_server_that_does_not_start() -> None:
    done = run("bench", "--model", "/nonexistent/model")
    assert done.returncode == 1
    assert "before it was ready" in done.stderr


def test_bench_without_a_server_fails_with_its_address() -> None:
    done = run("bench", "--url", "http://127.0.0.1:9")
    assert done.returncode == 1
    assert "http://127.0.0.1:9/v1/models" in done.stderr
    assert "Cannot connect to host 127.0.0.1:9" in done.stderr


def test_figures_are_right() -> None:
    streams = [
        Stream(ttft_s=0.1 * n, gaps_s=[0.01] * 9, e2e_s=1.0, num_output_tokens=10, num_prompt_tokens=5) for n in range(1, 11)
    ]
    streams.append(Stream(error="refused"))
    summary = summarize(streams, 4, 2.0)
    assert (summary.num_requests, summary.num_failed) == (11, 1)
    assert summary.output_tokens_per_s == 50
    assert summary.total_tokens_per_s == 75
    assert summary.ttft_ms["p50"] == pytest.approx(500)
    assert summary.ttft_ms["p99"] == pytest.approx(1000)
    assert summary.itl_ms["mean"] == pytest.approx(10)
    assert "1 failed" in format_summary(summary)
    assert summarize([Stream(error="x")], 1, 1.0).ttft_ms == {}


def test_prompts_are_reproducible_and_share_their_prefix() -> None:
    first, second = random_prompts(2, 10, 6, seed=1), random_prompts(2, 10, 6, seed=1)
    assert first == second
    assert first[0][:6] == first[1][:6]
    assert first[0] != first[1]
    assert all(len(prompt) == 10 for prompt in first)


def test_doctor_finds_nothing_wrong_here() -> None:
    done = run("doctor", "--json")
    assert done.returncode == 0, done.stdout
    findings = {finding["subject"]: finding for finding in json.loads(done.stdout)}
    assert findings["scheduler extension"]["verdict"] == "ok"
    assert findings["gemm.mm"]["verdict"] == "ok"
    assert findings["torch"]["verdict"] == "ok"
    # Whether weights of a format stay quantized, and why, is said of each.
    for stored in ("Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q6_K"):
        found = findings[f"{stored} weights"]
        assert ("stay quantized" if found["verdict"] == "ok" else "are dequantized: no kernel") in found["text"]
    assert "MB resident, at most" in findings["memory"]["text"]


def test_doctor_s_status_tells_of_trouble(tmp_path: Any) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['tokenspeed_engine.scheduler'] = None\n")
    import os

    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = run("doctor", env=os.environ | {"PYTHONPATH": path})
    assert done.returncode == 1, done.stdout + done.stderr
    assert "FAIL scheduler" in done.stdout


def test_version_and_help_answer() -> None:
    assert "tokenspeed-engine" in run("--version").stdout
    assert "--num-gpu-blocks-override" in run("serve", "--help").stdout
    assert run().returncode == 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["serve", "--max-modle-len", "9"], "unrecognized arguments: --max-modle-len. Did you mean --max-model-len?"),
        (["serve", "m", "--prot=80"], "unrecognized arguments: --prot=80. Did you mean --port?"),
        (["doctor", "--zzz"], "unrecognized arguments: --zzz. See tokenspeed-engine doctor --help."),
    ],
)
def test_a_mistyped_flag_is_answered_with_the_one_that_was_meant(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert said in capsys.readouterr().err
