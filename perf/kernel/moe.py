"""Experts for 1 to 4096 tokens beside PyTorch's chain around its grouped product, and routing beside softmax and top-k.

On a CUDA device times are of CUDA graph replays that walk through batches with different experts, per batch; weights are larger
than the L2 cache. The limit is the time to read each chosen expert's weights once at the device's measured read rate, or the
products at its measured matrix rate, whichever is longer; both are measured in the same run. On the CPU the peer is a loop.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from perf.graph_replay import device_rates, replay_us
from perf.harness import Benchmark, Context, Row, time_pair_s
from tokenspeed_kernel import QuantizedTensor
from tokenspeed_kernel.ops import moe
from tokenspeed_kernel.ops.moe.cases_experts import random_experts

_BATCHES = 6
"""Batches that one graph walks through, each with experts of its own."""


@dataclass(frozen=True, slots=True)
class Shape:
    """One layer and a batch."""

    tokens: int
    num_experts: int
    top_k: int
    hidden: int
    inner: int
    fmt: str = ""
    gate: moe.GatedActivation | None = None

    def __str__(self) -> str:
        sizes = f"E{self.num_experts} k{self.top_k} H{self.hidden} I{self.inner}"
        clamped = ", clamped" if self.gate else ""
        return f"T{self.tokens} {sizes} {self.fmt or 'plain'}{clamped}"

    @property
    def flops(self) -> float:
        """Operations of the three products of every pair."""
        return 6.0 * self.tokens * self.top_k * self.hidden * self.inner


_WIDE = (128, 8, 2048, 768)
_CLAMPED = moe.GatedActivation(limit=7.0, alpha=1.702, up_offset=1.0)
GPU_SHAPES = (
    *(Shape(tokens, *_WIDE) for tokens in (1, 4, 16, 64, 256, 4096)),
    *(Shape(tokens, 32, 4, 2880, 2880, gate=_CLAMPED) for tokens in (1, 16, 64)),
    *(Shape(tokens, 32, 4, 2880, 2880, "mxfp4@block_32", _CLAMPED) for tokens in (1, 16, 64)),
    *(Shape(tokens, *_WIDE, fmt) for fmt in ("fp8_e4m3@block_128x128", "nvfp4@block_16") for tokens in (1, 16, 64)),
)
CPU_SHAPES = tuple(Shape(tokens, 16, 4, 1024, 512) for tokens in (1, 16, 64))

Stack = torch.Tensor | QuantizedTensor
Call = Callable[[], object]


def _batches(shape: Shape, device: torch.device, dtype: torch.dtype, count: int) -> list[tuple[torch.Tensor, ...]]:
    """(x, ids, weights) of each batch."""
    made = []
    for _ in range(count):
        logits = torch.randn((shape.tokens, shape.num_experts), device=device)
        weights, ids = moe.topk_routing(logits, shape.top_k, renormalize=True)
        made.append((torch.randn((shape.tokens, shape.hidden), device=device).to(dtype), ids, weights))
    return made


def _grouped_chain(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
    """The fewest calls of PyTorch to the same result."""
    top_k = ids.shape[1]
    order = ids.flatten().argsort(stable=True)
    counts = torch.zeros(w13.shape[0], dtype=torch.int32, device=x.device).scatter_add_(
        0, ids.flatten().long(), torch.ones_like(ids.flatten())
    )
    offsets = counts.cumsum(0).int()
    token = order // top_k
    hidden = torch._grouped_mm(x[token], w13.transpose(1, 2), offs=offsets)
    gate, up = hidden.chunk(2, dim=1)
    result = torch._grouped_mm(F.silu(gate) * up, w2.transpose(1, 2), offs=offsets)
    shares = weights.flatten()[order].to(x.dtype)
    return torch.zeros_like(x).index_add_(0, token, result * shares[:, None])


def _loop(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
    out = torch.zeros_like(x)
    for expert in ids.unique().tolist():
        token, slot = (ids == expert).nonzero(as_tuple=True)
        gate, up = F.linear(x[token], w13[expert]).chunk(2, dim=1)
        out.index_add_(0, token, F.linear(F.silu(gate) * up, w2[expert]) * weights[token, slot, None])
    return out


def _weights(shape: Shape, device: torch.device, dtype: torch.dtype) -> tuple[Stack, Stack]:
    generator = torch.Generator(device).manual_seed(0)
    first = random_experts(generator, (shape.num_experts, 2 * shape.inner, shape.hidden), shape.fmt, device, dtype)
    second = random_experts(generator, (shape.num_experts, shape.hidden, shape.inner), shape.fmt, device, dtype)
    return first, second


def _ours(shape: Shape, w13: Stack, w2: Stack, dtype: torch.dtype, device: torch.device) -> Callable[..., torch.Tensor]:
    gate = shape.gate or moe.GatedActivation()
    config = moe.MoeConfig(shape.num_experts, shape.top_k, shape.hidden, shape.inner, activation=gate)
    made = moe.plan(config, device, x_format=dtype, weight_format=shape.fmt or dtype)
    weights = moe.process_weights(made, w13, w2)
    return lambda x, ids, shares: moe.apply(made, weights, x, ids, shares)


def _gpu_row(shape: Shape, rates: tuple[float, float], quick: bool) -> Row:
    device, dtype = torch.device("cuda", torch.cuda.current_device()), torch.bfloat16
    w13, w2 = _weights(shape, device, dtype)
    batches = _batches(shape, device, dtype, _BATCHES)
    apply = _ours(shape, w13, w2, dtype, device)
    mine: list[Call] = [lambda batch=batch: apply(*batch) for batch in batches]
    repeats = 5 if quick else 20
    ours = replay_us(mine, repeats)
    peer, note = None, ""
    if isinstance(w13, torch.Tensor) and isinstance(w2, torch.Tensor) and shape.gate is None:
        theirs: list[Call] = [lambda batch=batch: _grouped_chain(*batch, w13, w2) for batch in batches]
        try:
            peer = replay_us(theirs, repeats)
        except (RuntimeError, AttributeError) as error:
            note = f"peer: {type(error).__name__}: {str(error).splitlines()[0]}"
    size = sum(one.size_bytes if isinstance(one, QuantizedTensor) else one.nbytes for one in (w13, w2)) / shape.num_experts
    used = sum(len(ids.unique()) for _, ids, _ in batches) / len(batches)
    limit = max(used * size / rates[0], shape.flops / rates[1]) * 1e6
    note = "; ".join(filter(None, (f"{used:.0f} experts read", note)))
    return Row(str(shape), ours, peer, "us", f"torch {torch.__version__} grouped_mm chain", limit, False, note=note)


def _cpu_row(shape: Shape, quick: bool) -> Row:
    device, dtype = torch.device("cpu"), torch.float32
    w13, w2 = _weights(shape, device, dtype)
    assert isinstance(w13, torch.Tensor)
    assert isinstance(w2, torch.Tensor)
    batches = _batches(shape, device, dtype, _BATCHES)
    apply = _ours(shape, w13, w2, dtype, device)
    mine, theirs = itertools.cycle(batches), itertools.cycle(batches)
    ours, peer = time_pair_s(
        lambda: apply(*next(mine)), lambda: _loop(*next(theirs), w13, w2), repeats=3 if quick else 15
    )
    return Row(f"{shape} fp32 cpu", ours * 1e6, peer * 1e6, "us", f"torch {torch.__version__} loop over experts")


def _routing_row(quick: bool) -> Row:
    logits = [torch.randn((64, 128), device="cuda") for _ in range(8)]
    mine: list[Call] = [lambda one=one: moe.topk_routing(one, 8, renormalize=True) for one in logits]

    def theirs(one: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights, ids = one.softmax(1).topk(8, dim=1)
        return weights / weights.sum(1, keepdim=True), ids.int()

    peers: list[Call] = [lambda one=one: theirs(one) for one in logits]
    repeats = 5 if quick else 20
    name = f"torch {torch.__version__} softmax, topk"
    return Row("routing T64 E128 k8", replay_us(mine, repeats), replay_us(peers, repeats), "us", name, 1.15, False)


def run(context: Context) -> Iterator[Row]:
    """Yield a row for each shape, on this machine's fastest device."""
    if not torch.cuda.is_available():
        for shape in CPU_SHAPES[:1] if context.quick else CPU_SHAPES:
            yield _cpu_row(shape, context.quick)
        return
    rates = device_rates()
    yield _routing_row(context.quick)
    for shape in GPU_SHAPES[:3] if context.quick else GPU_SHAPES:
        yield _gpu_row(shape, rates, context.quick)
        torch.cuda.empty_cache()


BENCHMARK = Benchmark(name="kernel.moe", summary="experts and routing beside PyTorch's grouped product", run=run)
