"""Cache kernels for the host processor."""

from __future__ import annotations

from typing import Final

from tokenspeed_kernel.signature import Signature
from tokenspeed_kernel.spec import CPU, Band, KernelSpec, Verified, VerifiedBy

_FLOATS: Final = ("fp64", "fp32", "bf16", "fp16")

SPECS: Final = (
    KernelSpec(
        op="kvcache.write_kv",
        name="cpu_write_kv",
        solution="cpu",
        band=Band.PERFORMANT,
        implementation="tokenspeed_kernel.ops.kvcache.cpu.write_kv:write_kv",
        capability=CPU,
        formats=tuple(Signature.of(k=new, v=new, k_cache=kept, v_cache=kept) for new in _FLOATS for kept in _FLOATS),
        verified=(Verified(VerifiedBy.SILICON, "x86-64 AVX2"),),
    ),
)
