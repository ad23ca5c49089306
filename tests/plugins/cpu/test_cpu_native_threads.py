"""The team of threads: the same results whoever takes part, several callers, forks, and no work while there is none."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
import torch
from quantized_weights import gguf_weight

from tokenspeed_kernel.ops.gemm import PackedWeight, pack_weight

ROWS, COLUMNS = 1000, 512


@pytest.fixture(autouse=True)
def keep_the_number_of_threads() -> Iterator[None]:
    """Leave it as it was."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def _packed(fmt: str) -> PackedWeight:
    return pack_weight(gguf_weight(fmt, ROWS, COLUMNS)[0], round_activations=True, solution="cpu_native")


@pytest.mark.parametrize("fmt", ["gguf_q4_1", "gguf_q8_0"])
def test_the_number_of_threads_changes_nothing(fmt: str) -> None:
    """Fewer than before, more than before, and more than there are cores or pieces of work."""
    from tokenspeed_kernel_cpu import _kernels

    packed, x = _packed(fmt), torch.randn(3, COLUMNS)
    torch.set_num_threads(1)
    alone = packed(x)
    for threads in (2, 5, 1, 3, 40):
        torch.set_num_threads(threads)
        for _ in range(20):
            assert torch.equal(packed(x), alone)
            assert torch.equal(packed(x[1:2]), alone[1:2])
    assert 1 <= _kernels.team_size() <= 39


def test_several_callers_at_a_time() -> None:
    torch.set_num_threads(3)
    work = [(_packed(fmt), torch.randn(2, COLUMNS)) for fmt in ("gguf_q4_1", "gguf_q8_0", "gguf_q6_k")]
    expected = [packed(x) for packed, x in work]
    wrong: list[int] = []

    def call(index: int) -> None:
        packed, x = work[index]
        for _ in range(100):
            if not torch.equal(packed(x), expected[index]):
                wrong.append(index)

    callers = [threading.Thread(target=call, args=(index,)) for index in range(len(work))]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(60)
    assert not any(caller.is_alive() for caller in callers)
    assert not wrong


def test_a_weight_that_is_gone_is_no_longer_fetched() -> None:
    """The weight that came next the last time is remembered, and may have been freed since."""
    torch.set_num_threads(2)
    first, x = _packed("gguf_q4_1"), torch.randn(1, COLUMNS)
    expected = first(x)
    for _ in range(10):
        other = _packed("gguf_q8_0")
        other(x)
        del other
        assert torch.equal(first(x), expected)


_FORK = """
import os, torch
from tokenspeed_kernel.ops.norm import rms_norm
from tokenspeed_kernel_cpu import _kernels

torch.set_num_threads(2)
x, weight = torch.randn(512, 512), torch.ones(512)
before = rms_norm(x, weight, solution="cpu_native")
assert _kernels.team_size() == 1
child = os.fork()
if child == 0:
    started = _kernels.team_size()
    same = torch.equal(rms_norm(x, weight, solution="cpu_native"), before)
    os._exit(0 if same and started == 0 and _kernels.team_size() == 1 else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), torch.equal(rms_norm(x, weight, solution="cpu_native"), before))
"""


def test_a_forked_process_has_a_team_of_its_own() -> None:
    told = subprocess.run([sys.executable, "-c", _FORK], capture_output=True, text=True, check=True, timeout=60)
    assert told.stdout.split() == ["0", "True"]


_IDLE = """
import time, torch
from tokenspeed_kernel.ops.norm import rms_norm

torch.set_num_threads(2)
rms_norm(torch.randn(512, 512), torch.ones(512), solution="cpu_native")
before = time.process_time()
time.sleep(1.0)
print(time.process_time() - before)
"""


def test_threads_without_work_sleep() -> None:
    """A thread that spun on would use the whole second; what it may is a millisecond."""
    told = subprocess.run([sys.executable, "-c", _IDLE], capture_output=True, text=True, check=True, timeout=60)
    assert float(told.stdout) < 0.2
