"""`tokenspeed-engine doctor`: what this machine and installation can do, and what is wrong with it."""

from __future__ import annotations

import contextlib
import importlib.metadata
import io
import json
import os
import platform
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from tokenspeed_engine.checkpoint import ModelNotFoundError, default_model_path
from tokenspeed_engine.ipc import PrivateDirectory
from tokenspeed_engine.launch import EXIT_FAILED, EXIT_OK
from tokenspeed_engine.types import ProcessMemory

_REQUIRED = (
    "tokenspeed-engine", "tokenspeed-kernel", "torch", "numpy", "msgspec", "pyzmq", "aiohttp", "tokenizers", "safetensors",
    "jinja2", "prometheus-client", "huggingface-hub",
)  # fmt: skip
_OPTIONAL = ("triton", "transformers")
_BLOCK_FORMATS = ("Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q6_K")

Verdict = Literal["ok", "note", "FAIL"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report.

    Attributes:
        subject: what was looked at.
        verdict: FAIL keeps the engine from serving; a note does not.
        text: what was found, with the remedy where there is one.
    """

    subject: str
    verdict: Verdict
    text: str


def run_doctor(*, as_json: bool) -> int:
    """Run the command. Returns EXIT_FAILED when something keeps the engine from serving."""
    findings = list(examine())
    if as_json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        width = max(len(finding.subject) for finding in findings)
        for finding in findings:
            print(f"{finding.verdict:<5}{finding.subject:<{width + 2}}{finding.text}")
    return EXIT_FAILED if any(finding.verdict == "FAIL" for finding in findings) else EXIT_OK


def examine() -> Iterator[Finding]:
    """Look at everything; a check that raises is a finding."""
    yield Finding("system", "ok", f"{platform.platform()}, Python {platform.python_version()} at {sys.executable}")
    for check in (_versions, _memory, _device, _scheduler, _kernels, _quantized_weights, _default_model, _sockets):
        try:
            yield from check()
        except Exception as error:  # noqa: BLE001 - a broken installation can raise anything; the cause is the finding
            yield Finding(check.__name__.strip("_"), "FAIL", f"{type(error).__name__}: {error}")


def _versions() -> Iterator[Finding]:
    for name in (*_REQUIRED, *_OPTIONAL):
        try:
            yield Finding(name, "ok", importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            if name in _OPTIONAL:
                yield Finding(name, "note", "not installed (optional)")
            elif name.startswith("tokenspeed-"):
                yield Finding(name, "note", "runs from a source tree, not from an installed wheel")
            else:
                yield Finding(name, "FAIL", f"not installed. Fix: pip install {name}")


def _memory() -> Iterator[Finding]:
    from tokenspeed_engine.kvcache import available_bytes

    free = available_bytes()
    text = f"{free / 2**30:.1f} GiB available, {os.cpu_count()} CPUs ({len(os.sched_getaffinity(0))} usable)"
    mine = ProcessMemory.now()
    if mine.resident_bytes:
        text += f"; this process: {mine.resident_bytes / 1e6:.0f} MB resident, at most {mine.peak_bytes / 1e6:.0f} so far"
    small = free < 2**30
    yield Finding("memory", "note" if small else "ok", text + (". Under 1 GiB, the default model may not fit" if small else ""))


def _device() -> Iterator[Finding]:
    import torch

    from tokenspeed_engine.executor import resolve_device

    device = resolve_device("auto")
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        name = torch.cuda.get_device_name(device)
        yield Finding("device", "ok", f"{name} ({device}), {free / 2**30:.1f} of {total / 2**30:.1f} GiB free")
        return
    built = f"torch is built for CUDA {torch.version.cuda}" if torch.version.cuda else "torch is built without CUDA"
    yield Finding("device", "ok", f"cpu, {torch.get_num_threads()} threads ({built}, no GPU is used)")


def _scheduler() -> Iterator[Finding]:
    from tokenspeed_engine.scheduler import Scheduler, SchedulerConfig, SubmitStatus

    scheduler = Scheduler(SchedulerConfig(num_pages=4, page_size=4, max_num_seqs=1, max_num_batched_tokens=4, max_model_len=8))
    status = scheduler.submit(1, np.array([1, 2], dtype=np.int32), 1, np.array([], dtype=np.int32))
    plan = scheduler.plan()
    works = status == SubmitStatus.OK and plan.num_tokens == 2
    yield Finding("scheduler extension", "ok" if works else "FAIL", "loaded, plans" if works else f"wrong plan: {plan!r}")


def _kernels() -> Iterator[Finding]:
    from tokenspeed_kernel import cli as kernel_cli

    for op in sorted({kernel["op"] for kernel in _printed(kernel_cli.main, ["list", "--json"])["kernels"]}):
        facts = _printed(kernel_cli.main, ["explain", op, *_formats(op), "--json"])
        chosen = facts["chosen"]
        if chosen:
            yield Finding(op, "ok", f"{chosen} on {facts['platform']['arch']}")
        else:
            yield Finding(op, "FAIL", f"no kernel qualifies. Fix: see tokenspeed-kernel explain {op}")


def _formats(op: str) -> list[str]:
    """The formats that the engine uses by default on this device; sampling works on fp32 logits everywhere."""
    from tokenspeed_engine.executor import resolve_device

    if op.startswith("sampling."):
        return []
    return ["--dtype", "fp32" if resolve_device("auto").type == "cpu" else "bf16"]


def _printed(command: Callable[[list[str]], int], arguments: list[str]) -> Any:
    """The JSON that a command prints."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        command(arguments)
    return json.loads(output.getvalue())


def _quantized_weights() -> Iterator[Finding]:
    """What `--quantization auto` does with each block format of GGUF files."""
    from tokenspeed_engine.executor import resolve_device
    from tokenspeed_engine.weights import fast_kernel

    device = resolve_device("auto")
    for stored in _BLOCK_FORMATS:
        kernel = fast_kernel(stored, device)
        text = f"stay quantized ({kernel})" if kernel else "are dequantized: no kernel is made for products with them here"
        yield Finding(f"{stored} weights", "ok" if kernel else "note", text)


def _default_model() -> Iterator[Finding]:
    try:
        path = default_model_path()
    except ModelNotFoundError as error:
        yield Finding("default model", "note", str(error))
        return
    yield Finding("default model", "ok", f"{path} ({path.stat().st_size / 2**20:.0f} MiB)")


def _sockets() -> Iterator[Finding]:
    directory = PrivateDirectory()
    yield Finding("socket directory", "ok", f"{directory.path.parent}")
    directory.close()
