"""Products with weights that stay quantized, beside the float32 products that an engine would take without them.

The peer is this package's own oneDNN kernel with a float32 weight, packed. One row is a decode step of one stream: its figure is
the rate at which the stored weight is read, its limit what all threads read from memory in the same run; the peer's is of the same
stored bytes, so that the ratio is that of the times. Weights take turns over several times the shared cache. More rows are a batch
and a prompt: floating-point operations of the product. Options: `--set threads=2`.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator

import torch

from perf.harness import Benchmark, Context, Row, time_pair_s
from tokenspeed_kernel import NoKernelError, QuantizedTensor
from tokenspeed_kernel.ops.gemm import PackedWeight, pack_weight
from tokenspeed_kernel.signature import GGUF_BLOCKS

_COLD_BYTES = 192 << 20
_READ_BYTES = 512 << 20
SHAPES = (
    ("gguf_q4_1", 960, 576),
    ("gguf_q4_1", 3072, 576),
    ("gguf_q4_1", 576, 1536),
    ("gguf_q8_0", 49152, 576),
    ("gguf_q4_0", 4096, 4096),
    ("gguf_q4_k", 4096, 4096),
    ("gguf_q6_k", 4096, 4096),
)
ROWS = (1, 8, 128)


def _weight(name: str, out_features: int, in_features: int) -> QuantizedTensor:
    elements, size = GGUF_BLOCKS[name]
    # Bytes below 50 make 16-bit floats that are tiny, and are numbers: the time of a product does not depend on them.
    data = torch.randint(0, 50, (out_features, in_features // elements * size), dtype=torch.uint8)
    return QuantizedTensor(data, f"{name}@inline", (out_features, in_features))  # type: ignore[arg-type]


def _in_turn(weights: list[PackedWeight], x: torch.Tensor) -> Callable[[], object]:
    turns = itertools.cycle(weights)
    return lambda: next(turns)(x)


def _copies(size_bytes: int, quick: bool) -> int:
    return 1 if quick else max(1, -(-_COLD_BYTES // size_bytes))


def _read_bandwidth() -> float:
    """Bytes per second that all threads read, in the best of several passes."""
    data = torch.ones(_READ_BYTES // 4)
    times = []
    for _ in range(8):
        start = time.perf_counter()
        data.sum()
        times.append(time.perf_counter() - start)
    return _READ_BYTES / min(times)


def run(context: Context) -> Iterator[Row]:
    """Measure the shapes."""
    if "threads" in context.options:
        torch.set_num_threads(int(context.options["threads"]))
    threads = torch.get_num_threads()
    read = _read_bandwidth()
    note = f"{threads} threads"
    for name, out_features, in_features in SHAPES[:2] if context.quick else SHAPES:
        weight = _weight(name, out_features, in_features)
        try:
            first = pack_weight(weight, round_activations=True, solution="cpu_native")
        except NoKernelError as error:
            yield Row(f"{name} {out_features}x{in_features}", None, None, "GB/s", note=str(error).splitlines()[0])
            return
        count = _copies(weight.size_bytes, context.quick)
        ours = [first, *(pack_weight(_weight(name, out_features, in_features), round_activations=True) for _ in range(count - 1))]
        plain = torch.randn(out_features, in_features)
        peers = [pack_weight(plain) for _ in range(_copies(4 * plain.numel(), context.quick))]
        for rows in ROWS:
            x = torch.randn(rows, in_features)
            repeats = 3 if context.quick else 15
            mine, other = time_pair_s(_in_turn(ours, x), _in_turn(peers, x), repeats=repeats)
            case = f"{name} [{out_features}, {in_features}], {rows} row{'s' if rows > 1 else ''}"
            if rows == 1:
                amount, unit, limit = weight.size_bytes / 1e9, "GB/s", read / 1e9
            else:
                amount, unit, limit = 2e-9 * rows * out_features * in_features, "GFLOP/s", None
            yield Row(case, amount / mine, amount / other, unit, f"float32, {peers[0].solution}", limit=limit, note=note)


BENCHMARK = Benchmark("kernel.quantized_cpu", "quantized weights against float32 ones on the CPU", run)
