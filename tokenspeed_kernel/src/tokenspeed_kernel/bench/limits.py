"""What a device allows, measured in the same run as the kernels: bytes read a second, and floating-point operations a second."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from tokenspeed_kernel.bench.timing import cache_bytes, time_calls

__all__ = ["Limits", "measure_limits"]


@dataclass(frozen=True, slots=True)
class Limits:
    """Measured limits of a device.

    Attributes:
        bytes_per_s: read from memory by a reduction of a tensor far larger than the cache.
        flops_per_s: of the largest square product by the vendor's library, by format: `fp32` (IEEE), `bf16`, `fp16`, `fp8`.
        launch_us: what a kernel costs in a graph that does nothing else; 0 on a CPU.
    """

    bytes_per_s: float
    flops_per_s: dict[str, float] = field(default_factory=dict)
    launch_us: float = 0.0

    def time_us(self, moved_bytes: int, flops: int | None, kind: str) -> tuple[float, str]:
        """Least time of a call, and what bounds it.

        Args:
            moved_bytes: read and written.
            flops: floating-point operations; None for none worth counting.
            kind: format of the products, a key of `flops_per_s`.
        """
        memory = moved_bytes / self.bytes_per_s * 1e6
        rate = self.flops_per_s.get(kind)
        compute = flops / rate * 1e6 if flops and rate else 0.0
        return (memory, "memory") if memory >= compute else (compute, "compute")


def measure_limits(device: torch.device, *, quick: bool = False) -> Limits:
    """Measure a device.

    Args:
        device: the CPU (with the threads that PyTorch has) or a GPU.
        quick: smaller tensors and fewer samples; the figures are then too low or too high.
    """
    samples = 3 if quick else 10
    num_bytes = max(4 * cache_bytes(device), 32 << 20 if quick else (1 << 30 if device.type == "cuda" else 256 << 20))
    source = torch.ones(num_bytes // 4, device=device)
    scalar = torch.empty((), device=device)
    tiny = torch.zeros(1, device=device)
    sizes: dict[str, int] = {}
    calls: dict[str, Callable[[int], object]] = {"read": lambda _: torch.sum(source, 0, out=scalar)}
    if device.type == "cuda":
        calls["launch"] = lambda _: tiny.add_(1)  # a kernel; zeroing would be a memset
    size = 256 if quick else 768 if device.type == "cpu" else 8192
    for kind, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)):
        # On a CPU a type that it does not multiply is 50 times slower; what is slow needs no large product.
        sizes[kind] = size if device.type == "cuda" or kind == "fp32" else size // 3
        calls[kind] = _product(sizes[kind], dtype, device)
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9):
        sizes["fp8"] = size
        calls["fp8"] = _fp8_product(size, device)
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        timed = time_calls(calls, 1, device, samples=samples)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    # The best sample: a limit is what the device can do, not what it does beside other work.
    best = {name: one.best_us for name, one in timed.items() if not isinstance(one, Exception)}
    if "read" not in best:
        raise RuntimeError(f"bench: the device cannot be measured: {timed['read']}")
    rates = {kind: 2 * side**3 / best[kind] * 1e6 for kind, side in sizes.items() if kind in best}
    return Limits(num_bytes / best["read"] * 1e6, rates, best.get("launch", 0.0))


def _product(size: int, dtype: torch.dtype, device: torch.device) -> Callable[[int], object]:
    one, other = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    out = torch.empty(size, size, dtype=dtype, device=device)
    return lambda _: torch.mm(one, other, out=out)


def _fp8_product(size: int, device: torch.device) -> Callable[[int], object]:
    one, other = (torch.randn(size, size, device=device).to(torch.float8_e4m3fn) for _ in range(2))
    scale = torch.ones((), device=device)
    return lambda _: torch._scaled_mm(one, other.t(), scale_a=scale, scale_b=scale, out_dtype=torch.bfloat16)
