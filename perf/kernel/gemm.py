"""Matrix products in all formats beside the libraries that have them: cuBLAS through PyTorch, and DeepGEMM where it is installed.

On a GPU by replay of a CUDA graph over copies of the operands that together do not fit into its cache; on the CPU by the clock. The
limit is that of an H200: bytes that must move, or operations of the matrix unit, whichever takes longer.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn import functional

from perf.graph_replay import replay_us
from perf.harness import Benchmark, Context, Row, time_pair_s
from tokenspeed_kernel import Format, NoKernelError, QuantizedTensor
from tokenspeed_kernel.ops.gemm import bmm, grouped_mm_contiguous, mm
from tokenspeed_kernel.ops.quantization import dequantize, quantize
from tokenspeed_kernel.ops.quantization.cases import random_quantized

_ROTATE_BYTES = 256 << 20
_MAX_COPIES = 64
# Measured on an H200: reads, half-precision and fp8 products, and what a kernel of a graph costs besides.
_BYTES_PER_S, _HALF_PER_S, _FP8_PER_S, _KERNEL_S = 4.6e12, 786e12, 1500e12, 1.15e-6
_SIZE = 4096
_ROWS = (1, 16, 32, 64, 512, 4096)
_PLAIN = "bf16"
_MM = (
    (_PLAIN, _PLAIN),
    ("fp8_e4m3@tensor", "fp8_e4m3@tensor"),
    ("fp8_e4m3@token", "fp8_e4m3@channel"),
    ("fp8_e4m3@block_1x128", "fp8_e4m3@block_128x128"),
    (_PLAIN, "fp8_e4m3@block_128x128"),
    (_PLAIN, "nvfp4@block_16"),
    (_PLAIN, "mxfp4@block_32"),
    (_PLAIN, "int4@group_128"),
    (_PLAIN, "gguf_q4_1@inline"),
    ("nvfp4@block_16", "nvfp4@block_16"),
)
_Call = Callable[[], object]
_Operand = torch.Tensor | QuantizedTensor


def _operand(text: str, shape: tuple[int, ...], device: torch.device, seed: int) -> _Operand:
    generator = torch.Generator().manual_seed(seed)
    if text == _PLAIN:
        return torch.randn(shape, generator=generator).to(device, torch.bfloat16)
    return random_quantized(Format.parse(text), shape, generator, device)


def _size_bytes(operand: _Operand) -> int:
    return operand.size_bytes if isinstance(operand, QuantizedTensor) else operand.numel() * operand.element_size()


def _copies(x: _Operand, weight: _Operand, quick: bool) -> list[tuple[Any, Any]]:
    """Pairs of operands, so many that the weights do not stay in a cache."""
    count = 1 if quick else max(1, min(_MAX_COPIES, _ROTATE_BYTES // _size_bytes(weight)))
    return [(x, weight), *((x, _cloned(weight)) for _ in range(count - 1))]


def _cloned(operand: _Operand) -> _Operand:
    if isinstance(operand, torch.Tensor):
        return operand.clone()
    parts = [None if part is None else part.clone() for part in (operand.scale, operand.global_scale, operand.zero_point)]
    return QuantizedTensor(operand.data.clone(), operand.format, operand.shape, *parts)


def _times_us(ours: _Call, peer: _Call | None, device: torch.device, calls: int, quick: bool) -> tuple[float, float | None]:
    if device.type == "cuda":
        return replay_us([ours] * calls), None if peer is None else replay_us([peer] * calls)
    seconds = time_pair_s(ours, peer or ours, repeats=3 if quick else 9)
    return seconds[0] * 1e6, None if peer is None else seconds[1] * 1e6


def _limit_us(device: torch.device, num_bytes: int, flops: int, fp8: bool) -> float | None:
    if device.type != "cuda" or "H200" not in torch.cuda.get_device_name(device):
        return None
    return (max(num_bytes / _BYTES_PER_S, flops / (_FP8_PER_S if fp8 else _HALF_PER_S)) + _KERNEL_S) * 1e6


def _deep_gemm() -> Any:
    try:
        return importlib.import_module("deep_gemm")
    except (ImportError, OSError, RuntimeError, AssertionError) as error:  # a wheel for another torch fails in many ways
        return f"{type(error).__name__}: {error}"[:120]


def _mm_peer(pairs: list[tuple[Any, Any]], x_text: str, weight_text: str) -> tuple[_Call | None, str, str]:
    """(call, name, note): the best library that has the format; for a quantized weight alone, the plain product."""
    turn = itertools.cycle(pairs)
    x, weight = pairs[0]
    if "@block_1x128" in x_text:
        module = _deep_gemm()
        if isinstance(module, str) or not hasattr(module, "fp8_gemm_nt"):
            return None, "DeepGEMM", module if isinstance(module, str) else "DeepGEMM has no fp8_gemm_nt"
        out = torch.empty((x.shape[0], weight.shape[0]), dtype=torch.bfloat16, device=x.device)

        def deep() -> None:
            left, right = next(turn)
            module.fp8_gemm_nt((left.data, left.scale), (right.data, right.scale), out)

        return deep, "DeepGEMM", ""
    if "fp8" in x_text and x.device.type == "cuda":

        def scaled() -> object:
            left, right = next(turn)
            scales = left.scale, right.scale if right.scale.dim() == 0 else right.scale.t()
            return torch._scaled_mm(left.data, right.data.t(), *scales, out_dtype=torch.bfloat16)

        return scaled, "torch._scaled_mm", ""
    plain_x = x if isinstance(x, torch.Tensor) else dequantize(x, out_dtype=torch.bfloat16)
    plain = [right if isinstance(right, torch.Tensor) else dequantize(right, out_dtype=torch.bfloat16) for _, right in pairs[:8]]
    weights = itertools.cycle(plain)
    return (lambda: functional.linear(plain_x, next(weights))), "linear in bf16", ""


def _mm_rows(device: torch.device, quick: bool) -> Iterator[Row]:
    size, rows = (_SIZE, _ROWS) if device.type == "cuda" else (512 if quick else 2048, (1, 16))
    for x_text, weight_text in _MM:
        for num_rows in rows:
            x, weight = _operand(x_text, (num_rows, size), device, 0), _operand(weight_text, (size, size), device, 1)
            pairs = _copies(x, weight, quick)
            num_bytes = _size_bytes(x) + _size_bytes(weight) + 2 * num_rows * size
            limit = _limit_us(device, num_bytes, 2 * num_rows * size * size, "fp8" in x_text)
            for solution in (None, "triton") if device.type == "cuda" else (None,):
                turn = itertools.cycle(pairs)

                def ours(turn: Iterator[Any] = turn, solution: str | None = solution) -> object:
                    return mm(*next(turn), out_dtype=torch.bfloat16, solution=solution)

                peer, name, note = _mm_peer(pairs, x_text, weight_text)
                label = f"mm {num_rows}x{size}x{size} x {x_text} weight {weight_text} {solution or 'chosen'} {device.type}"
                try:
                    pair = _times_us(ours, peer, device, max(len(pairs), 8), quick)
                except (NoKernelError, RuntimeError) as error:
                    yield Row(label, None, None, "us", name, note=str(error).splitlines()[0][:120])
                    continue
                yield Row(label, *pair, "us", peer_name=name, limit=limit, note=note or f"{len(pairs)} copies")


def _stack_rows(device: torch.device, quick: bool) -> Iterator[Row]:
    experts, hidden, features = (128, 2048, 768) if device.type == "cuda" else (8, 128, 64)
    for num_rows in (8, 128, 512, 8192) if device.type == "cuda" else (8, 64):
        x = torch.randn(num_rows, hidden, device=device).bfloat16()
        weight = torch.randn(experts, features, hidden, device=device).bfloat16()
        offsets = (torch.arange(experts + 1, device=device) * num_rows // experts).int()
        library = getattr(functional, "grouped_mm", None)
        peer = None
        if library is not None and device.type == "cuda":
            ends = offsets[1:].contiguous()

            def peer(x: torch.Tensor = x, weight: torch.Tensor = weight, ends: torch.Tensor = ends) -> object:
                return functional.grouped_mm(x, weight.mT, offs=ends)

        def ours(x: torch.Tensor = x, weight: torch.Tensor = weight, offsets: torch.Tensor = offsets) -> object:
            return grouped_mm_contiguous(x, weight, offsets)

        used = min(num_rows, experts)
        num_bytes = used * features * hidden * 2 + num_rows * (hidden + features) * 2
        limit = _limit_us(device, num_bytes, 2 * num_rows * hidden * features, False)
        label = f"grouped_mm_contiguous bf16 {num_rows} rows, {experts} experts, {features}x{hidden} {device.type}"
        pair = _times_us(ours, peer, device, 8, quick)
        yield Row(label, *pair, "us", "torch grouped_mm", limit, note="one copy")
    batch, rows, features, depth = (128, 64, 512, 128) if device.type == "cuda" else (8, 4, 64, 32)
    left = torch.randn(batch, rows, depth, device=device).bfloat16()
    right = torch.randn(batch, features, depth, device=device).bfloat16()
    pair = _times_us(lambda: bmm(left, right), lambda: torch.bmm(left, right.mT), device, 8, quick)
    yield Row(f"bmm bf16 {batch}x{rows}x{features}x{depth} {device.type}", *pair, "us", "torch.bmm", note="one copy")


def _quantize_rows(device: torch.device, quick: bool) -> Iterator[Row]:
    size = _SIZE if device.type == "cuda" else 256
    for rows in (64, size):
        x = torch.randn(rows, size, device=device).bfloat16()
        for text in ("fp8_e4m3@token", "fp8_e4m3@block_1x128", "mxfp8_e4m3@block_32", "nvfp4@block_16", "int4@group_128"):
            ours_us, _ = _times_us(lambda x=x, text=text: quantize(x, text), None, device, 8, quick)  # type: ignore[misc]
            num_bytes = 2 * x.numel() + quantize(x, text).size_bytes
            limit = _limit_us(device, num_bytes, 0, False)
            yield Row(f"quantize {text} {rows}x{size} {device.type}", ours_us, None, "us", limit=limit, note="no peer")


def run(context: Context) -> Iterator[Row]:
    """Yield a row for each product on this machine's fastest device."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with torch.inference_mode():
        yield from _mm_rows(device, context.quick)
        yield from _stack_rows(device, context.quick)
        yield from _quantize_rows(device, context.quick)


BENCHMARK = Benchmark(name="kernel.gemm", summary="products in all formats beside cuBLAS and DeepGEMM", run=run)
