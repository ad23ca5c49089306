"""Triton kernels of the cache op."""

from __future__ import annotations

from typing import Final

from tokenspeed_kernel.signature import Signature
from tokenspeed_kernel.spec import TRITON_PORTABLE, Band, KernelSpec, Verified, VerifiedBy

_FLOATS: Final = ("fp32", "bf16", "fp16")

SPECS: Final = (
    KernelSpec(
        op="kvcache.write_kv",
        name="triton_write_kv",
        solution="triton",
        band=Band.PORTABLE,
        implementation="tokenspeed_kernel.ops.kvcache.triton.write_kv:write_kv",
        capability=TRITON_PORTABLE,
        formats=tuple(Signature.of(k=new, v=new, k_cache=kept, v_cache=kept) for new in _FLOATS for kept in _FLOATS),
        requires=("triton",),
        graph_safe=True,
        verified=(
            Verified(VerifiedBy.SILICON, "H200 (sm_90)"),
            Verified(VerifiedBy.INTERPRETER, "x86-64"),
            Verified(VerifiedBy.COMPILED, "sm_100, gfx950"),
        ),
    ),
)
