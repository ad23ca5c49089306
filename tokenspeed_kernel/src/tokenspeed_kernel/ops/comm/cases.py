"""Cases of the collectives.

They run in the group that is initialised, of whatever size: every process runs the same cases in the same order, and each brings
other values. Where none is, the group of the processes that torchrun started is made, or one of this process alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from tokenspeed_kernel.case import Case, Tolerance
from tokenspeed_kernel.ops.comm.contract import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_REDUCE_ADD_RMS_NORM,
    ALL_TO_ALL,
    REDUCE_SCATTER,
)

__all__ = ["BOTH", "CASES", "SUMS", "exchanged_inputs", "gathered_inputs", "normed_inputs", "reduced_inputs", "scattered_inputs"]

_Build = Callable[[torch.Generator, torch.device, torch.dtype], dict[str, Any]]
# Each of up to 8 summands may be added with a rounding of its own; the terms are near 1, their sums may cancel.
SUMS = {
    torch.float32: Tolerance(1e-5, 1e-5),
    torch.float16: Tolerance(4e-3, 1.6e-2),
    torch.bfloat16: Tolerance(3.2e-2, 1.3e-1),
}


def _group() -> tuple[str, int, int]:
    """Name of the default group, its size, and this process's rank in it."""
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"
        if dist.is_torchelastic_launched():  # by torchrun, which has told each process its rank
            dist.init_process_group(backend)
        else:
            store = dist.HashStore()  # type: ignore[attr-defined]
            dist.init_process_group(backend, store=store, rank=0, world_size=1)
    world = dist.group.WORLD
    assert world is not None
    return world.group_name, dist.get_world_size(), dist.get_rank()


def _mine(
    generator: torch.Generator, device: torch.device, dtype: torch.dtype, shape: tuple[int, ...], layout: str
) -> torch.Tensor:
    """This process's values, drawn after those of the processes before it."""
    _, _, rank = _group()
    torch.randn(math.prod(shape) * rank, generator=generator)
    if dtype.itemsize == 1:  # fp8: every bit pattern, NaN among them
        return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8).to(device).view(dtype)
    if layout == "transposed":
        return torch.randn(*shape[:-2], shape[-1], shape[-2], generator=generator).to(device, dtype).transpose(-1, -2)
    if layout == "sliced":
        return torch.randn(*shape[:-1], 2 * shape[-1] + 1, generator=generator).to(device, dtype)[..., 1::2]
    if layout == "special":
        x = torch.randn(shape, generator=generator)
        x[..., 0], x[..., 1], x[..., 2] = float("inf"), -0.0, 3e38
        return x.to(device, dtype)
    return torch.randn(shape, generator=generator).to(device, dtype)


def _sizes(kind: str, world_size: int, rows: int) -> list[int] | None:
    """Row counts for each process: none, all but the first, or ever more."""
    if kind == "even":
        return None
    return [rows * (rank > 0 or world_size == 1) if kind == "one empty" else rows + rank for rank in range(world_size)]


def reduced_inputs(*shape: int, layout: str = "contiguous", reduce: str = "sum") -> _Build:
    """Make arguments of `all_reduce`."""
    def build(generator: torch.Generator, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
        name, _, _ = _group()
        return {"x": _mine(generator, device, dtype, shape, layout), "group": name, "reduce": reduce}

    return build


def scattered_inputs(rows: int, *row: int, layout: str = "contiguous", reduce: str = "sum", sizes: str = "even") -> _Build:
    """Make arguments of `reduce_scatter`; `sizes` is even, growing, or one empty."""
    def build(generator: torch.Generator, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
        name, world_size, _ = _group()
        counts = _sizes(sizes, world_size, rows)
        shape = (rows * world_size if counts is None else sum(counts), *row)
        x = _mine(generator, device, dtype, shape, layout)
        return {"x": x, "group": name, "reduce": reduce, "sizes": counts}

    return build


def gathered_inputs(
    rows: int, *row: int, layout: str = "contiguous", sizes: str = "even", dtype: torch.dtype | None = None
) -> _Build:
    """Make arguments of `all_gather`; `sizes` is even, growing, or one empty."""
    fixed = dtype

    def build(generator: torch.Generator, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
        name, world_size, rank = _group()
        counts = _sizes(sizes, world_size, rows)
        shape = (rows if counts is None else counts[rank], *row)
        return {"x": _mine(generator, device, fixed or dtype, shape, layout), "group": name, "sizes": counts}

    return build


def exchanged_inputs(
    rows: int, *row: int, layout: str = "contiguous", uneven: bool = False, dtype: torch.dtype | None = None
) -> _Build:
    """Make arguments of `all_to_all`."""
    fixed = dtype

    def build(generator: torch.Generator, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
        name, world_size, rank = _group()
        send = receive = None
        if uneven:  # from rank a to rank b: a * b + rows, none from the last to the first
            table = [[source * target + rows for target in range(world_size)] for source in range(world_size)]
            if world_size > 1:
                table[-1][0] = 0
            send, receive = table[rank], [counts[rank] for counts in table]
        shape = (rows * world_size if send is None else sum(send), *row)
        x = _mine(generator, device, fixed or dtype, shape, layout)
        return {"x": x, "group": name, "send_sizes": send, "receive_sizes": receive}

    return build


def normed_inputs(*shape: int, layout: str = "contiguous", wide: bool = False) -> _Build:
    """Make arguments of `all_reduce_add_rms_norm`; `wide` keeps the weight in float32."""
    def build(generator: torch.Generator, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
        name, _, _ = _group()
        residual = torch.randn(shape, generator=generator).to(device, dtype)
        weight = (torch.randn(shape[-1], generator=generator) + 1).to(device, torch.float32 if wide else dtype)
        x = _mine(generator, device, dtype, shape, layout)
        return {"x": x, "residual": residual, "weight": weight, "group": name, "eps": 1e-5}

    return build


BOTH = ("out", "residual_out")
CASES = (
    *(
        Case(ALL_REDUCE.name, label, build, tolerance=SUMS, bench=bench)
        for label, build, bench in (
            ("empty 0x8", reduced_inputs(0, 8), False),
            ("odd 3x37", reduced_inputs(3, 37), False),
            ("one element", reduced_inputs(1), False),
            ("max 5x6", reduced_inputs(5, 6, reduce="max"), False),
            ("min 5x6", reduced_inputs(5, 6, reduce="min"), False),
            ("transposed 5x24", reduced_inputs(5, 24, layout="transposed"), False),
            ("sliced 4x33", reduced_inputs(4, 33, layout="sliced"), False),
            ("special values 2x8", reduced_inputs(2, 8, layout="special"), False),
            ("16x4096", reduced_inputs(16, 4096), True),
        )
    ),
    *(
        Case(REDUCE_SCATTER.name, label, build, tolerance=SUMS, bench=bench)
        for label, build, bench in (
            ("empty 0x8", scattered_inputs(0, 8), False),
            ("odd 3x37", scattered_inputs(3, 37), False),
            ("max 2x6", scattered_inputs(2, 6, reduce="max"), False),
            ("transposed 5x24", scattered_inputs(5, 24, layout="transposed"), False),
            ("uneven 2x5", scattered_inputs(2, 5, sizes="growing"), False),
            ("uneven min 2x5", scattered_inputs(2, 5, sizes="growing", reduce="min"), False),
            ("one without rows 3x5", scattered_inputs(3, 5, sizes="one empty"), False),
            ("64x4096", scattered_inputs(64, 4096), True),
        )
    ),
    *(
        Case(ALL_GATHER.name, label, build, bench=bench)
        for label, build, bench in (
            ("empty 0x8", gathered_inputs(0, 8), False),
            ("odd 3x37", gathered_inputs(3, 37), False),
            ("vector 5", gathered_inputs(5), False),
            ("transposed 5x24", gathered_inputs(5, 24, layout="transposed"), False),
            ("uneven 2x5", gathered_inputs(2, 5, sizes="growing"), False),
            ("one without rows 3x5", gathered_inputs(3, 5, sizes="one empty"), False),
            ("fp8 3x9", gathered_inputs(3, 9, dtype=torch.float8_e4m3fn), False),
            ("fp8 uneven 3x9", gathered_inputs(3, 9, dtype=torch.float8_e5m2, sizes="growing"), False),
            ("64x4096", gathered_inputs(64, 4096), True),
        )
    ),
    *(
        Case(ALL_TO_ALL.name, label, build, bench=bench)
        for label, build, bench in (
            ("empty 0x8", exchanged_inputs(0, 8), False),
            ("odd 3x37", exchanged_inputs(3, 37), False),
            ("transposed 5x24", exchanged_inputs(5, 24, layout="transposed"), False),
            ("uneven 2x5", exchanged_inputs(2, 5, uneven=True), False),
            ("uneven from none 0x5", exchanged_inputs(0, 5, uneven=True), False),
            ("fp8 3x9", exchanged_inputs(3, 9, dtype=torch.float8_e4m3fn), False),
            ("fp8 uneven 3x9", exchanged_inputs(3, 9, dtype=torch.float8_e4m3fn, uneven=True), False),
            ("64x4096", exchanged_inputs(64, 4096), True),
        )
    ),
    *(
        Case(ALL_REDUCE_ADD_RMS_NORM.name, label, build, outputs=BOTH, tolerance=SUMS, bench=bench)
        for label, build, bench in (
            ("empty 0x64", normed_inputs(0, 64), False),
            ("odd 3x37", normed_inputs(3, 37), False),
            ("3d 2x3x16", normed_inputs(2, 3, 16), False),
            ("fp32 weight 3x40", normed_inputs(3, 40, wide=True), False),
            ("transposed 5x24", normed_inputs(5, 24, layout="transposed"), False),
            ("16x4096", normed_inputs(16, 4096), True),
        )
    ),
)
"""Every kernel of the family meets these."""
