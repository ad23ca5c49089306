"""Sparse attention kernels in Triton."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from tokenspeed_kernel.ops.dsa.formats import fp8_formats, plain_formats
from tokenspeed_kernel.signature import Signature
from tokenspeed_kernel.spec import TRITON_PORTABLE, Band, Capability, KernelSpec, Verified, VerifiedBy
from tokenspeed_kernel.traits import Constraint, OneOf, Range

__all__ = ["SPECS"]

_FORMATS: Final = ("fp32", "bf16", "fp16")
# Triton converts from e4m3 where the device does.
_FP8: Final = Capability(("nvidia>=sm_89", "amd>=gfx950"), interpreter=True)
_INDEXER: Final = {"index_dim": Range(1, 256), "num_index_heads": Range(1, 128)}
_ROWS: Final = {"latent_dim": Range(1, 512), "rope_dim": Range(1, 128), "return_lse": OneOf(False, True)}

_SILICON: Final = Verified(VerifiedBy.SILICON, "H200 (sm_90)")
# Faster forms since the cases ran there: timed on the device, or never run on one.
_EARLIER: Final = Verified(VerifiedBy.SILICON, "H200 (sm_90)", "an earlier form")


def _spec(
    op: str,
    module: str,
    formats: tuple[Signature, ...],
    traits: Mapping[str, Constraint] | None = None,
    capability: Capability = TRITON_PORTABLE,
    suffix: str = "",
    silicon: Verified = _EARLIER,
) -> KernelSpec:
    targets = "sm_90, sm_100, sm_120, gfx950" if capability is _FP8 else "sm_80, sm_90, sm_100, sm_120, gfx942, gfx950"
    return KernelSpec(
        op=f"dsa.{op}",
        name=f"triton_{op}{suffix}",
        solution="triton",
        band=Band.PORTABLE,
        implementation=f"tokenspeed_kernel.ops.dsa.triton.{module}:{op}",
        capability=capability,
        formats=formats,
        traits=traits or {},
        requires=("triton",),
        graph_safe=True,
        verified=(silicon, Verified(VerifiedBy.INTERPRETER, "x86-64"), Verified(VerifiedBy.COMPILED, targets)),
    )


SPECS: Final = (
    _spec("indexer_scores", "indexer", plain_formats("k_cache"), _INDEXER),
    _spec("indexer_scores", "indexer", fp8_formats("k_cache"), _INDEXER, _FP8, "_fp8"),
    _spec("indexer_scores_ragged", "indexer", plain_formats("k"), _INDEXER),
    _spec("indexer_scores_ragged", "indexer", fp8_formats("k"), _INDEXER, _FP8, "_fp8"),
    _spec("topk_slots", "topk", Signature.same(("scores",), ("fp32",))),
    _spec("sparse_decode", "sparse", Signature.same(("q", "kv_cache"), _FORMATS), _ROWS, silicon=_SILICON),
    _spec("sparse_prefill", "sparse", Signature.same(("q", "kv_cache"), _FORMATS), _ROWS, silicon=_SILICON),
)
