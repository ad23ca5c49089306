"""The reference kernels of the sparse attention family."""

from __future__ import annotations

from typing import Final

from tokenspeed_kernel.spec import ANYWHERE, Band, KernelSpec

__all__ = ["SPECS"]

SPECS: Final = tuple(
    KernelSpec(
        op=f"dsa.{op}",
        name=f"reference_{op}",
        solution="reference",
        band=Band.REFERENCE,
        implementation=f"tokenspeed_kernel.ops.dsa.reference:{op}",
        capability=ANYWHERE,
    )
    for op in ("indexer_scores", "indexer_scores_ragged", "topk_slots", "sparse_decode", "sparse_prefill")
)
