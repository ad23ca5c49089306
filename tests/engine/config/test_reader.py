"""Flags and variables become configuration; mistakes name flag, value and remedy."""

from __future__ import annotations

import argparse
import dataclasses

import pytest

from tokenspeed_engine.config import (
    CacheConfig,
    ConfigError,
    CoreConfig,
    EngineConfig,
    ModelConfig,
    ProcessConfig,
    SchedulingConfig,
    ServerConfig,
    TokenizerConfig,
    add_flags,
    read_config,
)


def read(*arguments: str, environment: dict[str, str] | None = None, model: str = "") -> EngineConfig:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    return read_config(parser.parse_args(arguments), model=model, environment=environment or {})


def test_no_flags_give_the_defaults() -> None:
    assert read() == EngineConfig()


def test_each_flag_reaches_its_field() -> None:
    line = (
        "--host 0.0.0.0 --port 0 --served-model-name a b --api-key k1 --max-model-len 4K --max-num-seqs 8 "
        "--max-num-batched-tokens 64 --block-size 32 --num-gpu-blocks-override 100 --dtype float32 --seed 7 "
        "--device cpu --no-enable-prefix-caching --max-queue 5 --timeout-graceful-shutdown 2.5 --num-threads 2 "
        "--tokenizer t --chat-template c --revision r --log-level debug --prefill-chunk-size 16 "
        "--gpu-memory-utilization 0.5 --heartbeat-timeout 9 --hang-timeout 10 --max-restarts 2"
    )
    config = read(*line.split(), model="m")
    assert config.server == ServerConfig(
        host="0.0.0.0", port=0, served_model_names=("a", "b"), api_keys=("k1",), graceful_shutdown_s=2.5
    )
    assert config.tokenizer == TokenizerConfig(tokenizer="t", chat_template="c")
    assert config.core.model == ModelConfig(
        model="m", revision="r", dtype="float32", device="cpu", max_model_len=4096, num_threads=2, seed=7
    )
    assert config.core.cache == CacheConfig(page_size=32, num_pages=100, gpu_memory_utilization=0.5, enable_prefix_caching=False)
    assert config.core.scheduling == SchedulingConfig(max_num_seqs=8, max_num_batched_tokens=64, prefill_chunk_size=16, max_queue=5)
    assert config.core.process == ProcessConfig(heartbeat_timeout_s=9, hang_timeout_s=10, max_restarts=2, log_level="debug")


def test_num_pages_is_an_alias() -> None:
    assert read("--num-pages", "7").core.cache.num_pages == 7


@pytest.mark.parametrize(("text", "value"), [("4k", 4000), ("4K", 4096), ("1.5k", 1500), ("2G", 2 * 2**30), ("17", 17)])
def test_counts_take_suffixes(text: str, value: int) -> None:
    assert read("--max-body-bytes", "1M").server.max_body_bytes == 2**20
    assert read("--max-model-len", text).core.model.max_model_len == value


@pytest.mark.parametrize(
    ("arguments", "flag", "value"),
    [
        (["--port", "70000"], "--port", "70000"),
        (["--port", "http"], "--port", "http"),
        (["--port", "-1"], "--port", "-1"),
        (["--dtype", "fp8"], "--dtype", "fp8"),
        (["--device", "tpu"], "--device", "tpu"),
        (["--device", "cpu:1"], "--device", "cpu:1"),
        (["--max-model-len", "1"], "--max-model-len", "1"),
        (["--max-model-len", "1.5"], "--max-model-len", "1.5"),
        (["--block-size", "0"], "--block-size", "0"),
        (["--num-pages", "0"], "--num-gpu-blocks-override", "0"),
        (["--gpu-memory-utilization", "1.5"], "--gpu-memory-utilization", "1.5"),
        (["--gpu-memory-utilization", "nan"], "--gpu-memory-utilization", "nan"),
        (["--max-num-seqs", "65537"], "--max-num-seqs", "65537"),
        (["--max-num-seqs", "9", "--max-num-batched-tokens", "8"], "--max-num-batched-tokens", "8"),
        (["--max-num-batched-tokens", "0"], "--max-num-batched-tokens", "0"),
        (["--timeout-graceful-shutdown", "inf"], "--timeout-graceful-shutdown", "inf"),
        (["--heartbeat-timeout", "0.1"], "--heartbeat-timeout", "0.1"),
        (["--hang-timeout", "0"], "--hang-timeout", "0.0"),
        (["--host", ""], "--host", ""),
        (["--log-level", "loud"], "--log-level", "loud"),
        (["--max-message-bytes", "1"], "--max-message-bytes", "1"),
        (["--kv-cache-memory-bytes", "1k"], "--kv-cache-memory-bytes", "1000"),
        (["--prefill-chunk-size", "65", "--max-num-batched-tokens", "64"], "--prefill-chunk-size", "65"),
        (["--num-pages", "4", "--kv-cache-memory-bytes", "2M"], "--num-gpu-blocks-override", "4"),
        (["--max-num-seqs", "0"], "--max-num-seqs", "0"),
        (["--num-pages", "1", "--block-size", "1"], "--num-gpu-blocks-override", "1"),
        (["--host-cache-gib", "-1"], "--host-cache-gib", "-1.0"),
        (["--host-cache-gib", "nan"], "--host-cache-gib", "nan"),
        (["--host-cache-gib", "inf"], "--host-cache-gib", "inf"),
        (["--host-cache-gib", "1", "--no-enable-prefix-caching"], "--host-cache-gib", "1.0"),
        (["--host-cache-gib", "1", "--host-cache-write-policy", "never"], "--host-cache-write-policy", "never"),
        (["--external-cache", "tape", "--host-cache-gib", "1"], "--external-cache", "tape"),
        (["--external-cache", "file", "--external-cache-path", "x"], "--external-cache", "file"),
        (["--external-cache", "file", "--host-cache-gib", "1"], "--external-cache-path", ""),
        (["--external-cache", "mooncake", "--host-cache-gib", "1"], "--mooncake-config", ""),
        (["--external-cache-path", "x"], "--external-cache-path", "x"),
        (["--external-cache-gib", "0"], "--external-cache-gib", "0.0"),
        (["--external-cache-timeout", "0"], "--external-cache-timeout", "0.0"),
        (["--kv-events-endpoint", "5557"], "--kv-events-endpoint", "5557"),
        (["--kv-events-endpoint", "tcp://127.0.0.1"], "--kv-events-endpoint", "tcp://127.0.0.1"),
        (["--kv-events-endpoint", "udp://1.2.3.4:5"], "--kv-events-endpoint", "udp://1.2.3.4:5"),
        (["--kv-events-endpoint", "ipc://x", "--no-enable-prefix-caching"], "--kv-events-endpoint", "ipc://x"),
        (["--kv-events-replay-endpoint", "ipc://x"], "--kv-events-replay-endpoint", "ipc://x"),
        (["--kv-events-endpoint", "ipc://x", "--kv-events-replay-endpoint", "ipc://x"], "--kv-events-replay-endpoint", "ipc://x"),
        (["--kv-events-buffer", "0"], "--kv-events-buffer", "0"),
    ],
)
def test_a_mistake_names_flag_value_and_remedy(arguments: list[str], flag: str, value: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(*arguments)
    assert caught.value.flag == flag
    assert caught.value.value == value
    assert flag in str(caught.value)
    assert "\nFix: " in str(caught.value)
    assert caught.value.remedy


def test_the_api_key_comes_from_the_environment_and_the_flag_wins() -> None:
    environment = {"TOKENSPEED_API_KEY": "one, two"}
    assert read(environment=environment).server.api_keys == ("one", "two")
    assert read("--api-key", "three", environment=environment).server.api_keys == ("three",)
    assert read(environment={"TOKENSPEED_API_KEY": ""}).server.api_keys == ()


def test_the_api_key_is_never_shown() -> None:
    assert "sekrit" not in repr(read("--api-key", "sekrit"))
    with pytest.raises(ConfigError) as caught:
        read("--api-key", "sekrit key")
    assert "sekrit" not in str(caught.value)


def test_the_core_gets_no_secret() -> None:
    assert not {field.name for field in dataclasses.fields(CoreConfig)} & {"server", "api_keys"}


def test_restart_delays_double_up_to_the_cap() -> None:
    process = ProcessConfig()
    delays = [process.restart_delay_s(n) for n in range(9)]
    assert delays[:4] == [0.5, 1.0, 2.0, 4.0]
    assert delays[-1] == process.restart_backoff_max_s
    assert process.restart_delay_s(10**9) == process.restart_backoff_max_s


def test_help_shows_every_flag() -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    text = parser.format_help()
    assert "--num-gpu-blocks-override" in text
    assert "--no-enable-prefix-caching" in text
    assert "[TOKENSPEED_API_KEY]" in text
