"""Latent attention kernels of vendor libraries."""

from __future__ import annotations

from typing import Final

from tokenspeed_kernel.signature import Signature
from tokenspeed_kernel.spec import Band, Capability, KernelSpec, Library, Verified, VerifiedBy
from tokenspeed_kernel.traits import OneOf

__all__ = ["SPECS"]

_BOTH: Final = OneOf(False, True)
_DIMS: Final = {"latent_dim": OneOf(512), "rope_dim": OneOf(64), "causal": _BOTH, "return_lse": _BOTH}
_FLASHINFER: Final = Library("flashinfer", "flashinfer-python", ">=0.7.2")


def _flashinfer(op: str) -> KernelSpec:
    return KernelSpec(
        op=f"mla.{op}",
        name=f"flashinfer_{op}",
        solution="flashinfer",
        band=Band.PERFORMANT,
        implementation=f"tokenspeed_kernel.ops.mla.vendor.flashinfer_mla:{op}",
        capability=Capability(("nvidia>=sm_80",)),
        formats=Signature.same(("q", "kv_cache"), ("bf16", "fp16")),
        traits=_DIMS,
        requires=(_FLASHINFER,),
        graph_safe=False,  # it plans on the host, which waits for the device
        verified=(Verified(VerifiedBy.SILICON, "H200 (sm_90)", "flashinfer-python 0.7.2.post1, bf16"),),
    )


SPECS: Final = (
    KernelSpec(
        op="mla.mla_decode",
        name="flash_mla_decode_sm90",
        solution="flash_mla",
        band=Band.PERFORMANT,
        priority=1,  # 286 us, 4.2 TB/s, at 128 x 8192 keys and 16 heads on an H200
        implementation="tokenspeed_kernel.ops.mla.vendor.flash_mla:mla_decode",
        capability=Capability(("sm_90a",)),
        formats=Signature.same(("q", "kv_cache"), ("bf16",)),
        traits={**_DIMS, "page_size": OneOf(64)},
        # Its wheel names a torch of its own: pip install --no-deps sgl-flash-mla.
        requires=(Library("flash_mla", "sgl-flash-mla"),),
        graph_safe=False,  # with several queries a request it looks at the page table on the host
        verified=(Verified(VerifiedBy.SILICON, "H200 (sm_90)", "sgl-flash-mla 1.0.0"),),
    ),
    _flashinfer("mla_decode"),
    _flashinfer("mla_extend"),
)
