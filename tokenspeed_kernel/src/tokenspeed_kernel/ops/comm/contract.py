"""What the collectives promise.

Every process of the group makes the same call, in the same order, with the same sizes where an op does not say otherwise. A sum is
rounded in the operand's dtype each time that two parts are added, in an order that the back end chooses; the result is the same
bits on every process.
"""

from __future__ import annotations

from tokenspeed_kernel.spec import OpContract
from tokenspeed_kernel.traits import Trait

__all__ = [
    "ALL_GATHER",
    "ALL_REDUCE",
    "ALL_REDUCE_ADD_RMS_NORM",
    "ALL_TO_ALL",
    "CONTRACTS",
    "REDUCE_FORMATS",
    "REDUCTIONS",
    "REDUCE_SCATTER",
]

REDUCTIONS = ("sum", "max", "min")
"""What can be done to elements on their way."""
REDUCE_FORMATS = ("fp32", "fp64", "bf16", "fp16", "int64", "int32", "int8", "uint8")
"""Formats that can be added and compared. Data is moved in any format, fp8 as plain bytes."""

_BACKEND = Trait("backend", "back end of the group for the tensor's device: gloo, nccl, ...")
_WORLD_SIZE = Trait("world_size", "number of processes in the group")
_REDUCE = Trait("reduce", "sum, max or min", default="sum")
_UNEVEN = Trait("uneven", "processes bring or take different numbers of rows", default=False)

ALL_REDUCE = OpContract(
    name="comm.all_reduce",
    operands=("x",),
    parameters=("x", "group", "reduce", "out"),
    traits=(_BACKEND, _WORLD_SIZE, _REDUCE),
    summary="the sum (or max, min) of all processes' x, on every process",
    by_position=True,
)
REDUCE_SCATTER = OpContract(
    name="comm.reduce_scatter",
    operands=("x",),
    parameters=("x", "group", "reduce", "sizes", "out"),
    traits=(_BACKEND, _WORLD_SIZE, _REDUCE, _UNEVEN),
    summary="each process's share of the rows of the sum (or max, min) of all processes' x",
    by_position=True,
)
ALL_GATHER = OpContract(
    name="comm.all_gather",
    operands=("x",),
    parameters=("x", "group", "sizes", "out"),
    traits=(_BACKEND, _WORLD_SIZE, _UNEVEN),
    summary="the rows of all processes' x in order of rank, on every process",
    by_position=True,
)
ALL_TO_ALL = OpContract(
    name="comm.all_to_all",
    operands=("x",),
    parameters=("x", "group", "send_sizes", "receive_sizes", "out"),
    traits=(_BACKEND, _WORLD_SIZE, _UNEVEN),
    summary="a share of the rows of x to each process, and what each sends to this one, in order of rank",
    by_position=True,
)
ALL_REDUCE_ADD_RMS_NORM = OpContract(
    name="comm.all_reduce_add_rms_norm",
    operands=("x", "residual", "weight"),
    parameters=("x", "residual", "weight", "group", "eps", "out", "residual_out"),
    traits=(_BACKEND, _WORLD_SIZE),
    summary="residual_out = all_reduce(x) + residual; out = rms_norm(residual_out, weight)",
    by_position=True,
)
CONTRACTS = (ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER, ALL_TO_ALL, ALL_REDUCE_ADD_RMS_NORM)
