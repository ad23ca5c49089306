"""Cache kernels for the host processor."""

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
from tokenspeed_kernel.spec import CPU, Band, KernelSpec, Verified, VerifiedBy

_FLOATS: Final = ("fp64", "fp32", "bf16", "fp16")
_FORMATS: Final = {
    WRITE_KV.name: tuple(Signature.of(k=new, v=new, k_cache=kept, v_cache=kept) for new in _FLOATS for kept in _FLOATS),
    ROPE_WRITE_KV.name: rope_write_formats(_FLOATS),
    **SCALED_FORMATS,
}

SPECS: Final = tuple(
    KernelSpec(
        op=contract.name,
        name=f"cpu_{contract.name.partition('.')[2]}",
        solution="cpu",
        band=Band.PERFORMANT,
        implementation=f"tokenspeed_kernel.ops.kvcache.cpu.{module}:{contract.name.partition('.')[2]}",
        capability=CPU,
        formats=_FORMATS.get(contract.name, ()),
        verified=(Verified(VerifiedBy.SILICON, "x86-64 AVX2"),),
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
