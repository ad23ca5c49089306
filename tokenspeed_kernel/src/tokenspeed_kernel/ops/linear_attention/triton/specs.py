"""Triton kernels of the linear-attention ops."""

from __future__ import annotations

from typing import Final

from tokenspeed_kernel.ops.linear_attention.contract import (
    CAUSAL_CONV1D_PREFILL,
    CAUSAL_CONV1D_UPDATE,
    FORMATS,
    GDN_DECODE,
    GDN_PREFILL,
    MAMBA2_PREFILL,
    SELECTIVE_STATE_UPDATE,
)
from tokenspeed_kernel.spec import TRITON_PORTABLE, Band, KernelSpec, Verified, VerifiedBy
from tokenspeed_kernel.traits import Constraint, Range

__all__ = ["SPECS"]

# A head's keys, or a state's row, lie whole in one program's registers.
_GDN: Final[dict[str, Constraint]] = {"key_dim": Range(1, 256)}
_CONV: Final[dict[str, Constraint]] = {"width": Range(1, 16)}
_SSM: Final[dict[str, Constraint]] = {"state_dim": Range(1, 256)}
_MODULES: Final = (
    ("gdn", GDN_PREFILL, _GDN),
    ("gdn", GDN_DECODE, _GDN),
    ("causal_conv1d", CAUSAL_CONV1D_PREFILL, _CONV),
    ("causal_conv1d", CAUSAL_CONV1D_UPDATE, _CONV),
    ("mamba2", MAMBA2_PREFILL, _SSM),
    ("mamba2", SELECTIVE_STATE_UPDATE, _SSM),
)

SPECS: Final = tuple(
    KernelSpec(
        op=contract.name,
        name=f"triton_{contract.name.partition('.')[2]}",
        solution="triton",
        band=Band.PORTABLE,
        implementation=f"tokenspeed_kernel.ops.linear_attention.triton.{module}:{contract.name.partition('.')[2]}",
        capability=TRITON_PORTABLE,
        formats=FORMATS[contract.name],
        traits=traits,
        requires=("triton",),
        graph_safe=True,
        verified=(
            Verified(VerifiedBy.SILICON, "H200 (sm_90)"),
            Verified(VerifiedBy.INTERPRETER, "x86-64"),
            Verified(VerifiedBy.COMPILED, "sm_80, sm_90, sm_100, sm_120, gfx942, gfx950"),
        ),
    )
    for module, contract, traits in _MODULES
)
