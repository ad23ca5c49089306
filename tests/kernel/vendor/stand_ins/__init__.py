"""Stand-ins for vendor libraries that need a GPU: their recorded signatures over plain PyTorch, as strict as the libraries are.

Where a library leaves something undefined (rows without keys, rows behind a group), these give NaN.
"""

from .cudnn import scaled_dot_product_cudnn_attention
from .flashinfer import (
    BatchDecodeWithPagedKVCacheWrapper,
    BatchPrefillWithPagedKVCacheWrapper,
    BatchPrefillWithRaggedKVCacheWrapper,
    fused_add_rmsnorm,
    rmsnorm,
)
from .latent import BatchMLAPagedAttentionWrapper, MLAPlanMetadata, flash_mla_with_kvcache, get_mla_metadata
from .modules import modules
from .products import (
    TRTLLM_SCHEMA,
    fp8_block_scaling_gemm,
    fp8_gemm_nt,
    m_grouped_fp8_gemm_nt_contiguous,
    m_grouped_fp8_gemm_nt_masked,
)

__all__ = [
    "TRTLLM_SCHEMA",
    "BatchDecodeWithPagedKVCacheWrapper",
    "BatchMLAPagedAttentionWrapper",
    "BatchPrefillWithPagedKVCacheWrapper",
    "BatchPrefillWithRaggedKVCacheWrapper",
    "MLAPlanMetadata",
    "flash_mla_with_kvcache",
    "fp8_block_scaling_gemm",
    "fp8_gemm_nt",
    "fused_add_rmsnorm",
    "get_mla_metadata",
    "m_grouped_fp8_gemm_nt_contiguous",
    "m_grouped_fp8_gemm_nt_masked",
    "modules",
    "rmsnorm",
    "scaled_dot_product_cudnn_attention",
]
