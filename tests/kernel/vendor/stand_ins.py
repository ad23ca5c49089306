"""Stand-ins for vendor libraries that need a GPU: their recorded signatures over plain PyTorch, as strict as the libraries are.

Recorded from flashinfer-python 0.7.2.post1, sgl-flash-mla 1.0.0, tokenspeed-deepgemm 2.5.0.post20260604 and the operator schemas of
TensorRT-LLM 1.0. Where a library leaves something undefined (rows without keys, rows behind a group), these give NaN.
"""

from __future__ import annotations

import dataclasses
import math
from types import ModuleType
from typing import Any

import torch

NAN = float("nan")


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, causal: bool, cap: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """[n, H, D] queries at the tail of [L, Hkv, D] keys; NaN for a query that sees none. The LSE has base 2."""
    n, num_heads, _ = q.shape
    length, num_kv_heads, _ = k.shape
    if length == 0:
        return torch.full((n, num_heads, v.shape[-1]), NAN), torch.full((n, num_heads), NAN)
    k, v = (one.double().repeat_interleave(num_heads // num_kv_heads, 1) for one in (k, v))
    logits = torch.einsum("nhd,lhd->nhl", q.double(), k) * scale
    logits = cap * torch.tanh(logits / cap) if cap else logits
    if causal:
        hidden = torch.arange(length) > torch.arange(n).unsqueeze(1) + length - n
        logits.masked_fill_(hidden.unsqueeze(1), -math.inf)
    return torch.einsum("nhl,lhd->nhd", logits.softmax(-1), v), logits.logsumexp(-1) / math.log(2)


def rows_of(cache: torch.Tensor, pages: torch.Tensor, length: int) -> torch.Tensor:
    """The first `length` rows of those pages; the library would read outside of the cache where a page is not in it."""
    assert bool(((pages >= 0) & (pages < cache.shape[0])).all()), "a page outside of the cache was asked for"
    return cache[pages.long()].flatten(0, 1)[:length]


def check_workspace(buffer: torch.Tensor) -> None:
    """As the library: aligned bytes."""
    assert buffer.dtype is torch.uint8 and buffer.numel() >= 1 << 20 and buffer.data_ptr() % 16 == 0


def check_csr(indptr: torch.Tensor, indices: torch.Tensor) -> None:
    """int32, consistent."""
    assert indptr.dtype is torch.int32 and indices.dtype is torch.int32
    assert indptr[0] == 0 and indptr[-1] == len(indices)


class _Paged:
    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        **_: Any,
    ) -> None:
        assert kv_layout == "NHD" and not use_cuda_graph
        check_workspace(float_workspace_buffer)

    def _run(self, q: torch.Tensor, caches: Any, out: torch.Tensor | None, return_lse: bool, starts: torch.Tensor) -> Any:
        facts = self.facts  # type: ignore[attr-defined]
        assert q.is_contiguous() and q.dtype is facts["q_data_type"] and q.shape[1:] == (facts["heads"], facts["dim"])
        k_cache, v_cache = caches
        assert k_cache.stride() == v_cache.stride() and k_cache.dtype is facts["kv_data_type"]
        assert k_cache.shape[1:3] == (facts["page_size"], facts["kv_heads"])
        results, lses = [], []
        for row in range(len(starts) - 1):
            pages = facts["indices"][facts["indptr"][row] : facts["indptr"][row + 1]]
            length = max(len(pages) - 1, 0) * facts["page_size"] + int(facts["last"][row])
            keys, values = (rows_of(cache, pages, length) for cache in (k_cache, v_cache))
            queries = q[starts[row] : starts[row + 1]]
            one, lse = attend(queries, keys, values, facts["sm_scale"], facts["causal"], facts["cap"])
            results.append(one)
            lses.append(lse)
        return deliver(torch.cat(results), torch.cat(lses), q, out, return_lse)


def deliver(result: torch.Tensor, lse: torch.Tensor, q: torch.Tensor, out: torch.Tensor | None, return_lse: bool) -> Any:
    """Write into `out`, which must be contiguous and of q's dtype."""
    if out is None:
        out = torch.empty(result.shape, dtype=q.dtype)
    assert out.is_contiguous() and out.dtype is q.dtype and out.shape == result.shape
    out.copy_(result)
    return (out, lse.float()) if return_lse else out


class BatchDecodeWithPagedKVCacheWrapper(_Paged):
    """Recorded: constructor, `plan`, `run`."""

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: Any = None,
        paged_kv_indices_buffer: Any = None,
        paged_kv_last_page_len_buffer: Any = None,
        backend: str = "auto",
        jit_args: Any = None,
    ) -> None:
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph)
        self.use_tensor_cores = use_tensor_cores

    def plan(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        window_right: int = 0,
        logits_soft_cap: float | None = None,
        q_data_type: Any = "float16",
        kv_data_type: Any = None,
        o_data_type: Any = None,
        data_type: Any = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
        block_tables: Any = None,
        seq_lens: Any = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        q_len_per_req: int = 1,
        is_causal: bool | None = None,
    ) -> None:
        check_csr(indptr, indices)
        assert last_page_len.dtype is torch.int32
        assert self.use_tensor_cores or num_qo_heads == num_kv_heads
        self.facts = {"indptr": indptr, "indices": indices, "last": last_page_len, "heads": num_qo_heads, "dim": head_dim}
        self.facts |= {"kv_heads": num_kv_heads, "page_size": page_size, "q_data_type": q_data_type, "kv_data_type": kv_data_type}
        self.facts |= {"sm_scale": sm_scale, "cap": logits_soft_cap or 0.0, "causal": False}

    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: Any,
        *args: Any,
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: torch.Tensor | None = None,
        q_len_per_req: int | None = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        kv_cache_sf: Any = None,
    ) -> Any:
        return self._run(q, paged_kv_cache, out, return_lse, torch.arange(q.shape[0] + 1))


class BatchPrefillWithPagedKVCacheWrapper(_Paged):
    """Recorded: constructor, `plan`, `run`."""

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: Any = None,
        paged_kv_indptr_buf: Any = None,
        paged_kv_indices_buf: Any = None,
        paged_kv_last_page_len_buf: Any = None,
        custom_mask_buf: Any = None,
        mask_indptr_buf: Any = None,
        backend: str = "auto",
        jit_args: Any = None,
        jit_kwargs: Any = None,
        variant_owns_mask: bool = False,
    ) -> None:
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph)

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        head_dim_vo: int | None = None,
        custom_mask: Any = None,
        packed_custom_mask: Any = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: Any = "float16",
        kv_data_type: Any = None,
        o_data_type: Any = None,
        non_blocking: bool = True,
        prefix_len_ptr: Any = None,
        token_pos_in_items_ptr: Any = None,
        token_pos_in_items_len: int = 0,
        max_item_len_ptr: Any = None,
        seq_lens: Any = None,
        seq_lens_q: Any = None,
        block_tables: Any = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        uniform_q_len: int | None = None,
    ) -> None:
        check_csr(paged_kv_indptr, paged_kv_indices)
        assert qo_indptr.dtype is torch.int32
        self.starts = qo_indptr
        self.facts = {"indptr": paged_kv_indptr, "indices": paged_kv_indices, "last": paged_kv_last_page_len, "dim": head_dim_qk}
        self.facts |= {"heads": num_qo_heads, "kv_heads": num_kv_heads, "page_size": page_size, "q_data_type": q_data_type}
        self.facts |= {"kv_data_type": kv_data_type, "sm_scale": sm_scale, "cap": logits_soft_cap or 0.0, "causal": causal}

    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: Any,
        *args: Any,
        q_scale: Any = None,
        k_scale: Any = None,
        v_scale: Any = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        lse_base: str = "log2",
        lse_layout: str = "NH",
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: torch.Tensor | None = None,
        kv_cache_sf: Any = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        use_fp16_softmax: bool | None = None,
        uses_spcompress: bool | None = None,
    ) -> Any:
        return self._run(q, paged_kv_cache, out, return_lse, self.starts)


class BatchPrefillWithRaggedKVCacheWrapper:
    """Recorded: constructor, `plan`, `run`."""

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: Any = None,
        kv_indptr_buf: Any = None,
        custom_mask_buf: Any = None,
        mask_indptr_buf: Any = None,
        backend: str = "auto",
        jit_args: Any = None,
        jit_kwargs: Any = None,
        variant_owns_mask: bool = False,
    ) -> None:
        check_workspace(float_workspace_buffer)

    def plan(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        head_dim_vo: int | None = None,
        custom_mask: Any = None,
        packed_custom_mask: Any = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: Any = "float16",
        kv_data_type: Any = None,
        o_data_type: Any = None,
        non_blocking: bool = True,
        prefix_len_ptr: Any = None,
        token_pos_in_items_ptr: Any = None,
        token_pos_in_items_len: int = 0,
        max_item_len_ptr: Any = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        seq_lens: Any = None,
        seq_lens_q: Any = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        v_indptr: Any = None,
        o_indptr: Any = None,
        uniform_q_len: int | None = None,
    ) -> None:
        assert qo_indptr.dtype is torch.int32 and kv_indptr.dtype is torch.int32
        queries, keys = qo_indptr.diff(), kv_indptr.diff()
        assert not causal or bool((queries <= keys).all()), "queries before the first key: their rows are undefined"
        self.starts, self.key_starts, self.causal, self.scale = qo_indptr, kv_indptr, causal, sm_scale
        self.cap, self.shape, self.kv_heads = logits_soft_cap or 0.0, (num_qo_heads, head_dim_qk), num_kv_heads
        self.dtypes = q_data_type, kv_data_type

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *args: Any,
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        o_scale: float | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        lse_base: str = "log2",
        lse_layout: str = "NH",
        enable_pdl: bool | None = None,
        kv_cache_sf: Any = None,
    ) -> Any:
        assert q.is_contiguous() and k.is_contiguous() and v.is_contiguous()
        assert q.shape[1:] == self.shape and q.shape[0] == self.starts[-1] and (q.dtype, k.dtype) == self.dtypes
        parts = [
            attend(
                q[self.starts[row] : self.starts[row + 1]],
                k[self.key_starts[row] : self.key_starts[row + 1]],
                v[self.key_starts[row] : self.key_starts[row + 1]],
                float(self.scale or 0),
                self.causal,
                self.cap,
            )
            for row in range(len(self.starts) - 1)
        ]
        return deliver(torch.cat([one for one, _ in parts]), torch.cat([one for _, one in parts]), q, out, return_lse)


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


def rmsnorm(
    input: torch.Tensor, weight: torch.Tensor, eps: float = 1e-06, out: torch.Tensor | None = None, enable_pdl: bool | None = None
) -> torch.Tensor:
    """Recorded: flashinfer.norm.rmsnorm."""
    assert input.dim() in (2, 3) and input.stride(-1) == 1 and weight.is_contiguous() and input.numel()
    wide = input.double()
    result = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.double()
    return result.to(input.dtype) if out is None else out.copy_(result)


def fused_add_rmsnorm(
    input: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float = 1e-06, enable_pdl: bool | None = None
) -> None:
    """Recorded: flashinfer.norm.fused_add_rmsnorm; the sum goes into `residual`, the norm into `input`."""
    assert input.dim() == 2 and input.shape == residual.shape and input.numel()
    residual.copy_(input.double() + residual.double())
    rmsnorm(residual, weight, eps, out=input)


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


_ALIGNMENT = 128


def get_mk_alignment_for_contiguous_layout(*args: Any, **kwargs: Any) -> int:
    """Recorded: deep_gemm.get_mk_alignment_for_contiguous_layout."""
    return _ALIGNMENT


def _scaled(values: torch.Tensor, scale: torch.Tensor, rows: int) -> torch.Tensor:
    assert values.dtype is torch.float8_e4m3fn and values.is_contiguous() and scale.dtype is torch.float32
    assert values.shape[-1] % 128 == 0
    assert scale.shape[-2:] == (-(-values.shape[-2] // rows), values.shape[-1] // 128)
    wide = scale.double().repeat_interleave(rows, -2).repeat_interleave(128, -1)
    return values.double() * wide[..., : values.shape[-2], : values.shape[-1]]


def fp8_gemm_nt(
    a: tuple[torch.Tensor, torch.Tensor],
    b: tuple[torch.Tensor, torch.Tensor],
    d: torch.Tensor,
    c: torch.Tensor | None = None,
    recipe: Any = None,
    recipe_a: Any = None,
    recipe_b: Any = None,
    compiled_dims: str = "nk",
    disable_ue8m0_cast: bool = False,
) -> None:
    """Recorded: deep_gemm.fp8_gemm_nt."""
    assert d.dtype is torch.bfloat16 and d.is_contiguous() and d.shape == (a[0].shape[0], b[0].shape[0]) and b[0].shape[0] % 64 == 0
    d.copy_(_scaled(*a, 1) @ _scaled(*b, 128).T)


def m_grouped_fp8_gemm_nt_contiguous(
    a: tuple[torch.Tensor, torch.Tensor],
    b: tuple[torch.Tensor, torch.Tensor],
    d: torch.Tensor,
    grouped_layout: torch.Tensor,
    recipe: Any = None,
    recipe_a: Any = None,
    recipe_b: Any = None,
    compiled_dims: str = "nk",
    disable_ue8m0_cast: bool = False,
    use_psum_layout: bool = False,
    expected_m_for_psum_layout: int | None = None,
) -> None:
    """Recorded: deep_gemm.m_grouped_fp8_gemm_nt_contiguous. A tile's first index says whose all its rows are."""
    assert grouped_layout.dtype is torch.int32 and grouped_layout.is_contiguous() and len(grouped_layout) == len(d) == len(a[0])
    assert len(d) % _ALIGNMENT == 0
    rows, weights = _scaled(*a, 1), _scaled(*b, 128)
    d.fill_(NAN)
    for start in range(0, len(d), _ALIGNMENT):
        owners = grouped_layout[start : start + _ALIGNMENT]
        expert = int(owners[0])
        assert bool(((owners == expert) | (owners == -1)).all()), "an expert's rows do not start at a tile"
        if expert >= 0:
            d[start : start + _ALIGNMENT] = (rows[start : start + _ALIGNMENT] @ weights[expert].T).to(d.dtype)


def m_grouped_fp8_gemm_nt_masked(
    a: tuple[torch.Tensor, torch.Tensor],
    b: tuple[torch.Tensor, torch.Tensor],
    d: torch.Tensor,
    masked_m: torch.Tensor,
    expected_m: int,
    recipe: Any = None,
    recipe_a: Any = None,
    recipe_b: Any = None,
    compiled_dims: str = "nk",
    disable_ue8m0_cast: bool = False,
) -> None:
    """Recorded: deep_gemm.m_grouped_fp8_gemm_nt_masked."""
    assert masked_m.dtype is torch.int32 and masked_m.is_contiguous() and expected_m > 0
    assert bool(((masked_m >= 0) & (masked_m <= d.shape[1])).all())
    rows, weights = _scaled(*a, 1), _scaled(*b, 128)
    d.fill_(NAN)
    for expert, count in enumerate(masked_m.tolist()):
        d[expert, :count] = (rows[expert, :count] @ weights[expert].T).to(d.dtype)


TRTLLM_SCHEMA = "fp8_block_scaling_gemm(Tensor mat1, Tensor mat2, Tensor mat1Scale, Tensor mat2Scale) -> Tensor"


def fp8_block_scaling_gemm(
    mat1: torch.Tensor, mat2: torch.Tensor, mat1Scale: torch.Tensor, mat2Scale: torch.Tensor
) -> torch.Tensor:
    """Recorded: torch.ops.trtllm.fp8_block_scaling_gemm; mat1's scales lie block by block, rows filled up to a multiple of 4."""
    rows, width = mat1.shape
    assert mat2.shape[0] % 16 == 0 and width % 16 == 0 and mat1Scale.is_contiguous() and mat2Scale.is_contiguous()
    stride = -(-rows // 4) * 4
    scale = mat1Scale.reshape(-1)[: stride * -(-width // 128)].view(-1, stride)[:, :rows].T.contiguous()
    return (_scaled(mat1, scale, 1) @ _scaled(mat2, mat2Scale, 128).T).to(torch.bfloat16)


def modules() -> dict[str, ModuleType]:
    """The stand-ins under the names that the wrappers import."""
    contents: dict[str, dict[str, Any]] = {
        "flashinfer": {},
        "flashinfer.norm": {"rmsnorm": rmsnorm, "fused_add_rmsnorm": fused_add_rmsnorm},
        "flashinfer.decode": {"BatchDecodeWithPagedKVCacheWrapper": BatchDecodeWithPagedKVCacheWrapper},
        "flashinfer.prefill": {
            "BatchPrefillWithPagedKVCacheWrapper": BatchPrefillWithPagedKVCacheWrapper,
            "BatchPrefillWithRaggedKVCacheWrapper": BatchPrefillWithRaggedKVCacheWrapper,
        },
        "flashinfer.mla": {
            "BatchMLAPagedAttentionWrapper": BatchMLAPagedAttentionWrapper,
            "MLAPlanMetadata": MLAPlanMetadata,
        },
        "flash_mla": {"flash_mla_with_kvcache": flash_mla_with_kvcache, "get_mla_metadata": get_mla_metadata},
        "deep_gemm": {
            "fp8_gemm_nt": fp8_gemm_nt,
            "m_grouped_fp8_gemm_nt_contiguous": m_grouped_fp8_gemm_nt_contiguous,
            "m_grouped_fp8_gemm_nt_masked": m_grouped_fp8_gemm_nt_masked,
            "get_mk_alignment_for_contiguous_layout": get_mk_alignment_for_contiguous_layout,
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
