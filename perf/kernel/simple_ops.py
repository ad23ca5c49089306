"""The simple ops (norm, activation, embedding, gemm) beside PyTorch's own, on the cases that the tests use.

Inputs rotate through enough copies that weights come from memory, as in a model, and not from a cache.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn import functional

from perf.graph_replay import replay_us
from perf.harness import Benchmark, Context, Row, time_pair_s
from tokenspeed_kernel.case import Case
from tokenspeed_kernel.testing import family_cases, public_op

# PyTorch's way to the same result, in the fewest calls.
_PEERS: dict[str, Callable[..., torch.Tensor]] = {
    "norm.rms_norm": lambda x, weight, eps: functional.rms_norm(x, weight.shape, weight, eps),
    "norm.fused_add_rms_norm": lambda x, residual, weight, eps: functional.rms_norm(x.add(residual), weight.shape, weight, eps),
    "activation.silu_and_mul": lambda gate_up: (
        functional.silu(gate_up[..., : gate_up.shape[-1] // 2]) * gate_up[..., gate_up.shape[-1] // 2 :]
    ),
    "embedding.embedding": lambda token_ids, weight: functional.embedding(input=token_ids, weight=weight),
    "gemm.mm": lambda x, weight, bias: functional.linear(input=x, weight=weight, bias=bias),
}
_FAMILIES = ("norm", "activation", "embedding", "gemm")
_ROTATE_BYTES = 256 << 20
_MAX_COPIES = 64
# Reads of the H200, measured; about what one kernel of a graph costs besides.
_H200_BYTES_PER_S, _H200_KERNEL_S = 4.6e12, 1.15e-6


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value


def _bytes(inputs: dict[str, Any], result: Any) -> int:
    """Bytes that must move: inputs once (of an embedding only the rows that are read) and outputs once."""
    outputs = list(_tensors(result if isinstance(result, tuple) else (result,)))
    written = sum(one.numel() * one.element_size() for one in outputs)
    if "token_ids" in inputs:
        return 2 * written
    return written + sum(one.numel() * one.element_size() for one in _tensors(inputs.values()))


def _row(case: Case, device: torch.device, dtype: torch.dtype, quick: bool) -> Row:
    generator = torch.Generator().manual_seed(0)
    inputs = case.build(generator, device, dtype)
    public, peer = public_op(case.op), _PEERS[case.op]
    num_bytes = _bytes(inputs, public(**inputs))
    total = sum(one.numel() * one.element_size() for one in _tensors(inputs.values()))
    count = 1 if quick else max(1, min(_MAX_COPIES, _ROTATE_BYTES // max(total, 1)))
    copies = [inputs] + [
        {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in inputs.items()}
        for _ in range(count - 1)
    ]
    mine, theirs = itertools.cycle(copies), itertools.cycle(copies)

    def ours() -> object:
        return public(**next(mine))

    def other() -> object:
        return peer(**next(theirs))

    limit = None
    if device.type == "cuda":
        pair = replay_us([ours] * max(count, 8)), replay_us([other] * max(count, 8))
        if "H200" in torch.cuda.get_device_name(device):
            limit = (num_bytes / _H200_BYTES_PER_S + _H200_KERNEL_S) * 1e6
    else:
        seconds = time_pair_s(ours, other, repeats=3 if quick else 15)
        pair = seconds[0] * 1e6, seconds[1] * 1e6
    label = f"{case} {str(dtype).removeprefix('torch.')} {device.type}"
    return Row(label, pair[0], pair[1], "us", peer_name=f"torch {torch.__version__}", limit=limit, note=f"{count} copies")


def _plain_cases(family: str) -> Iterator[Case]:
    """Cases that PyTorch can do as well: `kernel.gemm` has those with quantized operands, and the stacks."""
    for case in family_cases(family):
        formats = ("fp8", "mxfp", "nvfp4", "int4", "gguf", "mxint4")
        if case.op in _PEERS and not any(name in case.label for name in formats):
            yield case


def run(context: Context) -> Iterator[Row]:
    """Yield a row for each case that is worth timing, on this machine's fastest device."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    for family in _FAMILIES:
        for case in _plain_cases(family):
            for dtype in (torch.bfloat16, torch.float32) if cuda else (torch.float32, torch.bfloat16):
                if case.bench:
                    yield _row(case, device, dtype, context.quick)


BENCHMARK = Benchmark(name="kernel.simple_ops", summary="norm, activation, embedding, gemm beside PyTorch's own", run=run)
