"""Sparse attention kernels for the host processor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from tokenspeed_kernel.ops.dsa.formats import fp8_formats, plain_formats
from tokenspeed_kernel.signature import Signature
from tokenspeed_kernel.spec import CPU, Band, KernelSpec, Verified, VerifiedBy
from tokenspeed_kernel.traits import Constraint, OneOf

__all__ = ["SPECS"]

_FORMATS: Final = ("fp64", "fp32", "bf16", "fp16")
_LSE: Final = {"return_lse": OneOf(False, True)}


def _spec(op: str, module: str, formats: tuple[Signature, ...], traits: Mapping[str, Constraint] | None = None) -> KernelSpec:
    return KernelSpec(
        op=f"dsa.{op}",
        name=f"cpu_{op}",
        solution="cpu",
        band=Band.PERFORMANT,
        implementation=f"tokenspeed_kernel.ops.dsa.cpu.{module}:{op}",
        capability=CPU,
        formats=formats,
        traits=traits or {},
        verified=(Verified(VerifiedBy.SILICON, "x86-64 AVX2"),),
    )


def _indexer(keys: str) -> tuple[Signature, ...]:
    return (*plain_formats(keys), *fp8_formats(keys), *Signature.same(("q", keys), ("fp64",)))


SPECS: Final = (
    _spec("indexer_scores", "indexer", _indexer("k_cache")),
    _spec("indexer_scores_ragged", "indexer", _indexer("k")),
    _spec("topk_slots", "topk", Signature.same(("scores",), ("fp32",))),
    _spec("sparse_decode", "sparse", Signature.same(("q", "kv_cache"), _FORMATS), _LSE),
    _spec("sparse_prefill", "sparse", Signature.same(("q", "kv_cache"), _FORMATS), _LSE),
)
