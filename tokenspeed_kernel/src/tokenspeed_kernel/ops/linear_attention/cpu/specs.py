"""CPU kernels of the linear-attention ops."""

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
from tokenspeed_kernel.spec import CPU, Band, KernelSpec, Verified, VerifiedBy

__all__ = ["SPECS"]

_MODULES: Final = (
    ("gdn", GDN_PREFILL),
    ("gdn", GDN_DECODE),
    ("causal_conv1d", CAUSAL_CONV1D_PREFILL),
    ("causal_conv1d", CAUSAL_CONV1D_UPDATE),
    ("mamba2", MAMBA2_PREFILL),
    ("mamba2", SELECTIVE_STATE_UPDATE),
)

SPECS: Final = tuple(
    KernelSpec(
        op=contract.name,
        name=f"cpu_{contract.name.partition('.')[2]}",
        solution="cpu",
        band=Band.PERFORMANT,
        implementation=f"tokenspeed_kernel.ops.linear_attention.cpu.{module}:{contract.name.partition('.')[2]}",
        capability=CPU,
        formats=FORMATS[contract.name],
        verified=(Verified(VerifiedBy.SILICON, "x86-64 AVX2"),),
    )
    for module, contract in _MODULES
)
