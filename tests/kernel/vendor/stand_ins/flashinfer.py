"""FlashInfer: attention over paged and ragged keys, norms. Recorded from flashinfer-python 0.7.2.post1."""

from __future__ import annotations

from typing import Any

import torch

from .common import attend, check_csr, check_workspace, deliver, rows_of


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
