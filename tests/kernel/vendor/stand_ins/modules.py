"""The stand-ins under the names that the wrappers import."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from . import flashinfer, latent, products


def modules() -> dict[str, ModuleType]:
    """The stand-ins under the names that the wrappers import."""
    contents: dict[str, dict[str, Any]] = {
        "flashinfer": {},
        "flashinfer.norm": {"rmsnorm": flashinfer.rmsnorm, "fused_add_rmsnorm": flashinfer.fused_add_rmsnorm},
        "flashinfer.decode": {"BatchDecodeWithPagedKVCacheWrapper": flashinfer.BatchDecodeWithPagedKVCacheWrapper},
        "flashinfer.prefill": {
            "BatchPrefillWithPagedKVCacheWrapper": flashinfer.BatchPrefillWithPagedKVCacheWrapper,
            "BatchPrefillWithRaggedKVCacheWrapper": flashinfer.BatchPrefillWithRaggedKVCacheWrapper,
        },
        "flashinfer.mla": {
            "BatchMLAPagedAttentionWrapper": latent.BatchMLAPagedAttentionWrapper,
            "MLAPlanMetadata": latent.MLAPlanMetadata,
        },
        "flash_mla": {"flash_mla_with_kvcache": latent.flash_mla_with_kvcache, "get_mla_metadata": latent.get_mla_metadata},
        "deep_gemm": {
            "fp8_gemm_nt": products.fp8_gemm_nt,
            "m_grouped_fp8_gemm_nt_contiguous": products.m_grouped_fp8_gemm_nt_contiguous,
            "m_grouped_fp8_gemm_nt_masked": products.m_grouped_fp8_gemm_nt_masked,
            "get_mk_alignment_for_contiguous_layout": products.get_mk_alignment_for_contiguous_layout,
        },
        "tensorrt_llm": {},
    }
    made = {}
    for name, content in contents.items():
        made[name] = ModuleType(name)
        made[name].__dict__.update(content)
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(made[parent], child, made[name])
    return made
