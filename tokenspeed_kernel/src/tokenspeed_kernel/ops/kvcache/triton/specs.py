"""Triton kernels of the cache ops."""

from __future__ import annotations

from typing import Final

from tokenspeed_kernel.ops.kvcache.contract import (
    COPY_PAGES,
    QUANTIZE_KV,
    ROPE_WRITE_KV,
    SCALED_FORMATS,
    TRANSFER_PAGES,
    WRITE_KV,
    WRITE_SCALED_KV,
    rope_write_formats,
)
from tokenspeed_kernel.signature import Signature
from tokenspeed_kernel.spec import TRITON_PORTABLE, Band, KernelSpec, Verified, VerifiedBy

_FLOATS: Final = ("fp32", "bf16", "fp16")
_FORMATS: Final = {
    WRITE_KV.name: tuple(Signature.of(k=new, v=new, k_cache=kept, v_cache=kept) for new in _FLOATS for kept in _FLOATS),
    ROPE_WRITE_KV.name: rope_write_formats(_FLOATS),
    **SCALED_FORMATS,
}
_VERIFIED: Final = (
    Verified(VerifiedBy.SILICON, "H200 (sm_90)"),
    Verified(VerifiedBy.INTERPRETER, "x86-64"),
    Verified(VerifiedBy.COMPILED, "sm_80, sm_90, sm_100, sm_120, gfx942, gfx950"),
)

SPECS: Final = tuple(
    KernelSpec(
        op=contract.name,
        name=f"triton_{contract.name.partition('.')[2]}",
        solution="triton",
        band=Band.PORTABLE,
        implementation=f"tokenspeed_kernel.ops.kvcache.triton.{module}:{contract.name.partition('.')[2]}",
        capability=TRITON_PORTABLE,
        formats=_FORMATS.get(contract.name, ()),
        requires=("triton",),
        graph_safe=True,
        verified=_VERIFIED,
    )
    for module, contract in (
        ("write_kv", WRITE_KV),
        ("scaled", WRITE_SCALED_KV),
        ("scaled", QUANTIZE_KV),
        ("rope_write", ROPE_WRITE_KV),
        ("pages", COPY_PAGES),
        ("pages", TRANSFER_PAGES),
    )
)
