"""Latent attention: FlashInfer, recorded from flashinfer-python 0.7.2.post1, and FlashMLA, from sgl-flash-mla 1.0.0."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch

from .common import attend, check_csr, check_workspace, deliver, rows_of


@dataclasses.dataclass(frozen=True)
class MLAPlanMetadata:
    """Recorded: `csr`."""

    fields: tuple[torch.Tensor, ...]

    @classmethod
    def csr(
        cls, qo_indptr: torch.Tensor, kv_indptr: torch.Tensor, kv_indices: torch.Tensor, kv_len_arr: torch.Tensor
    ) -> MLAPlanMetadata:
        check_csr(kv_indptr, kv_indices)
        assert qo_indptr.dtype is torch.int32 and kv_len_arr.dtype is torch.int32
        return cls((qo_indptr, kv_indptr, kv_indices, kv_len_arr))


class BatchMLAPagedAttentionWrapper:
    """Recorded: constructor, `plan`, `run`, by keyword."""

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        use_cuda_graph: bool = False,
        qo_indptr: Any = None,
        kv_indptr: Any = None,
        kv_indices: Any = None,
        kv_len_arr: Any = None,
        backend: str = "auto",
    ) -> None:
        check_workspace(float_workspace_buffer)

    def plan(
        self,
        qo_indptr: Any = None,
        kv_indptr: Any = None,
        kv_indices: Any = None,
        kv_len_arr: Any = None,
        num_heads: int | None = None,
        head_dim_ckv: int | None = None,
        head_dim_kpe: int | None = None,
        page_size: int | None = None,
        causal: bool | None = None,
        sm_scale: float | None = None,
        q_data_type: Any = None,
        kv_data_type: Any = None,
        use_profiler: bool = False,
        *,
        metadata: MLAPlanMetadata | None = None,
        cum_seq_lens_q: Any = None,
        block_tables: Any = None,
        seq_lens: Any = None,
        max_q_len: int | None = None,
        query_layout: str | None = None,
        kv_cache_layout: str | None = None,
        lse_mode: str = "none",
        output_dtype: Any = None,
        output_scale: str = "none",
        scale_mode: str = "default",
        skip_softmax: bool = False,
        enable_pdl: bool | None = None,
        use_sinks: bool = False,
    ) -> None:
        assert metadata is not None and query_layout == kv_cache_layout == "split" and lse_mode in ("none", "base2")
        self.metadata, self.heads, self.causal, self.scale = metadata, num_heads, causal, sm_scale
        self.dims, self.page_size, self.lse_mode = (head_dim_ckv, head_dim_kpe), page_size, lse_mode
        self.dtypes = q_data_type, kv_data_type

    def run(
        self,
        q_nope: Any = None,
        q_pe: Any = None,
        ckv_cache: Any = None,
        kpe_cache: Any = None,
        out: torch.Tensor | None = None,
        lse: Any = None,
        return_lse: bool = False,
        profiler_buffer: Any = None,
        kv_len: Any = None,
        page_table: Any = None,
        return_lse_base_on_e: bool = False,
        o_scale: float | None = None,
        *,
        query: Any = None,
        kv_cache: Any = None,
        ckv_scale: Any = None,
        ckv_scale_arr: Any = None,
        kpe_scale: Any = None,
        sinks: Any = None,
        skip_softmax_threshold_scale_factor: Any = None,
        bmm1_scale: Any = None,
        bmm2_scale: Any = None,
    ) -> Any:
        assert return_lse == (self.lse_mode == "base2"), "the plan and the call must agree"
        queries, caches = torch.cat(query, -1), torch.cat(kv_cache, -1)
        assert (query[0].shape[-1], query[1].shape[-1]) == self.dims and queries.shape[1] == self.heads
        assert caches.shape[1] == self.page_size and (queries.dtype, caches.dtype) == self.dtypes
        starts, indptr, indices, lens = self.metadata.fields
        parts = []
        for row in range(len(starts) - 1):
            rows = rows_of(caches, indices[indptr[row] : indptr[row + 1]], int(lens[row])).unsqueeze(1)
            values = rows[..., : self.dims[0]]
            own = queries[starts[row] : starts[row + 1]]
            parts.append(attend(own, rows, values, float(self.scale or 0), bool(self.causal), 0.0))
        return deliver(torch.cat([one for one, _ in parts]), torch.cat([one for _, one in parts]), queries, out, return_lse)


class FlashMLASchedMeta:
    """Made by `get_mla_metadata`, filled at the first call."""

    shape: tuple[int, ...] | None = None


def get_mla_metadata(*args: Any, **kwargs: Any) -> tuple[FlashMLASchedMeta, None]:
    """Recorded: flash_mla.get_mla_metadata."""
    return FlashMLASchedMeta(), None


def flash_mla_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: torch.Tensor | None,
    cache_seqlens: torch.Tensor | None,
    head_dim_v: int,
    tile_scheduler_metadata: FlashMLASchedMeta,
    num_splits: None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool | None = None,
    indices: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
    extra_k_cache: torch.Tensor | None = None,
    extra_indices_in_kvcache: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    extra_topk_length: torch.Tensor | None = None,
    enable_batch_invariant: bool = False,
    use_legacy: bool = False,
    kv_format: str | None = None,
    descale_q: torch.Tensor | None = None,
    descale_k: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Recorded: flash_mla.flash_mla_with_kvcache, its dense form."""
    assert use_legacy and num_splits is None and indices is None and not is_fp8_kvcache
    assert isinstance(tile_scheduler_metadata, FlashMLASchedMeta) and tile_scheduler_metadata.shape in (None, tuple(q.shape))
    tile_scheduler_metadata.shape = tuple(q.shape)
    assert block_table is not None and cache_seqlens is not None
    assert block_table.dtype is torch.int32 and cache_seqlens.dtype is torch.int32 and block_table.is_contiguous()
    assert k_cache.dim() == 4 and k_cache.shape[1:] == (64, 1, 576) and q.shape[-1] == 576 and head_dim_v == 512
    assert q.dtype is k_cache.dtype is torch.bfloat16
    results, lses = [], []
    for row in range(q.shape[0]):
        length = int(cache_seqlens[row])
        assert length > 0, "a length of 0"
        rows = rows_of(k_cache.squeeze(2), block_table[row, : -(-length // 64)], length).unsqueeze(1)
        one, lse = attend(q[row], rows, rows[..., :512], float(softmax_scale or 0), causal, 0.0)
        results.append(one)
        lses.append((lse * math.log(2)).T)
    return torch.stack(results).to(q.dtype), torch.stack(lses).float()
