"""How long `import tokenspeed_kernel` takes, alone and over `import torch`, each in a fresh process."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

from perf.harness import Benchmark, Context, Row

_PROGRAM = "import time; start = time.perf_counter(); {statement}; print(time.perf_counter() - start)"
_CASES = (
    ("import tokenspeed_kernel", "import tokenspeed_kernel", "import torch"),
    ("and collect every spec", "from tokenspeed_kernel.plugins import load_registry; load_registry()", "import torch"),
)


def _seconds(statement: str) -> float:
    command = [sys.executable, "-c", _PROGRAM.format(statement=statement)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    return float(done.stdout)


def run(context: Context) -> Iterator[Row]:
    """Yield milliseconds for each import, beside bare torch, and what ours adds once torch is there."""
    repeats = 2 if context.quick else 5
    for label, ours, peer in _CASES:
        pairs = [(_seconds(ours), _seconds(peer)) for _ in range(repeats)]
        mine, bare = (min(values) * 1e3 for values in zip(*pairs, strict=True))
        yield Row(
            label, mine, bare, "ms", peer_name="import torch", note="fresh process, files in the page cache; least of several"
        )
    added = [_seconds("import torch; start = time.perf_counter(); import tokenspeed_kernel") for _ in range(repeats)]
    note = "after import torch"
    yield Row("import tokenspeed_kernel, what it adds", min(added) * 1e3, None, "ms", note=note)


BENCHMARK = Benchmark(name="kernel.import_time", summary="import of the package beside bare torch", run=run)
