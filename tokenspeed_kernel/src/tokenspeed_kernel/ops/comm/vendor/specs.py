"""The collectives of torch.distributed, whatever its back end."""

from __future__ import annotations

from tokenspeed_kernel.ops.comm.contract import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_REDUCE_ADD_RMS_NORM,
    ALL_TO_ALL,
    REDUCE_FORMATS,
    REDUCE_SCATTER,
    REDUCTIONS,
)
from tokenspeed_kernel.signature import Signature
from tokenspeed_kernel.spec import ANYWHERE, Band, KernelSpec, OpContract, Verified, VerifiedBy
from tokenspeed_kernel.traits import Constraint, OneOf

__all__ = ["SPECS"]

_EVEN_OR_NOT = OneOf(False, True)
_REDUCE = OneOf(*REDUCTIONS)
_REDUCED = Signature.same(("x",), REDUCE_FORMATS)
_NORMED = tuple(
    Signature.of(x=fmt, residual=fmt, weight=weight)
    for fmt in ("fp32", "bf16", "fp16")
    for weight in dict.fromkeys((fmt, "fp32"))
)
_TABLE: tuple[tuple[OpContract, tuple[Signature, ...], dict[str, Constraint]], ...] = (
    (ALL_REDUCE, _REDUCED, {"reduce": _REDUCE}),
    (REDUCE_SCATTER, _REDUCED, {"reduce": _REDUCE, "uneven": _EVEN_OR_NOT}),
    (ALL_GATHER, (), {"uneven": _EVEN_OR_NOT}),
    (ALL_TO_ALL, (), {"uneven": _EVEN_OR_NOT}),
    (ALL_REDUCE_ADD_RMS_NORM, _NORMED, {}),
)

SPECS = tuple(
    KernelSpec(
        op=contract.name,
        name=f"torch_distributed_{contract.name.partition('.')[2]}",
        solution="torch_distributed",
        band=Band.PERFORMANT,
        implementation=f"tokenspeed_kernel.ops.comm.vendor.torch_distributed:{contract.name.partition('.')[2]}",
        capability=ANYWHERE,
        formats=formats,
        traits=traits,
        verified=(Verified(VerifiedBy.SILICON, "x86-64", "Gloo, 1, 2 and 4 processes"),),
    )
    for contract, formats, traits in _TABLE
)
