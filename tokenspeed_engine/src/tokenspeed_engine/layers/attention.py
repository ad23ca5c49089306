"""Self-attention over the paged cache."""

from __future__ import annotations

import torch
from torch import Tensor

from tokenspeed_engine.kvcache import KVPool
from tokenspeed_engine.layers.batch import DecodeRows, ExtendRows, ForwardBatch
from tokenspeed_engine.layers.linear import Linear
from tokenspeed_engine.layers.module import Module
from tokenspeed_engine.layers.norm import RMSNorm
from tokenspeed_engine.layers.rotary import Rotary
from tokenspeed_engine.parallel import Mesh, Placement, Shard
from tokenspeed_kernel.ops.attention import mha_decode, mha_extend
from tokenspeed_kernel.ops.kvcache import write_kv


class PagedAttention(Module):
    """Writes new keys and values into a layer's pages and attends to them; heads are split over the ranks.

    Args:
        layer: which layer of the pool.
        head_dim: D.
        softmax_scale: factor of the logits.
        sliding_window: W, the query's own key included; None sees everything before it.
    """

    input_placement: Placement = Shard(-1)
    output_placement: Placement = Shard(-1)

    def __init__(self, layer: int, head_dim: int, *, softmax_scale: float, sliding_window: int | None = None) -> None:
        self._layer = layer
        self._head_dim = head_dim
        self._scale = softmax_scale
        self._window = sliding_window

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, batch: ForwardBatch, kv: KVPool) -> Tensor:
        """q [T, Hq, D], k and v [T, Hkv, D] -> [T, Hq * D]."""
        k_cache, v_cache = kv.layer(self._layer)
        write_kv(k, v, k_cache, v_cache, batch.slot_mapping)
        decode, extend = batch.decode, batch.extend
        if extend is None:
            assert decode is not None  # a batch has rows
            out = self._decode(q, k_cache, v_cache, decode, None)
        elif decode is None:
            out = self._extend(q, k_cache, v_cache, extend, None)
        else:
            first_extend = decode.num_requests
            out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
            self._decode(q[:first_extend], k_cache, v_cache, decode, out[:first_extend])
            self._extend(q[first_extend:], k_cache, v_cache, extend, out[first_extend:])
        return out.view(batch.num_tokens, -1)

    def _decode(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, rows: DecodeRows, out: Tensor | None) -> Tensor:
        return mha_decode(
            q,
            k_cache,
            v_cache,
            rows.page_table,
            rows.seq_lens,
            max_seqlen_k=rows.max_seqlen_k,
            softmax_scale=self._scale,
            sliding_window=self._window,
            out=out,
            plan=rows.plan,
        )

    def _extend(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, rows: ExtendRows, out: Tensor | None) -> Tensor:
        return mha_extend(
            q,
            k_cache,
            v_cache,
            rows.page_table,
            rows.cu_seqlens_q,
            rows.seq_lens,
            max_seqlen_q=rows.max_seqlen_q,
            max_seqlen_k=rows.max_seqlen_k,
            softmax_scale=self._scale,
            sliding_window=self._window,
            out=out,
            plan=rows.plan,
        )


class SelfAttention(Module):
    """Projections, optional norm of each head's queries and keys, rotation, attention, output projection.

    Args:
        layer: which layer.
        hidden_size: H.
        num_heads: query heads of the whole model.
        num_kv_heads: KV heads of the whole model.
        head_dim: D.
        rotary: the shared table.
        softmax_scale: factor of the logits; None is D ** -0.5.
        qkv_bias: bias on q, k and v.
        out_bias: bias on the output projection.
        qk_norm_eps: RMSNorm over D on queries and keys with this epsilon; None is no norm.
        sliding_window: see PagedAttention.
    """

    def __init__(
        self,
        layer: int,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        rotary: Rotary,
        *,
        softmax_scale: float | None = None,
        qkv_bias: bool = False,
        out_bias: bool = False,
        qk_norm_eps: float | None = None,
        sliding_window: int | None = None,
    ) -> None:
        sizes = (num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * head_dim)
        self.qkv = Linear(hidden_size, sizes, bias=qkv_bias, split="out")
        self.q_norm = None if qk_norm_eps is None else RMSNorm(head_dim, qk_norm_eps)
        self.k_norm = None if qk_norm_eps is None else RMSNorm(head_dim, qk_norm_eps)
        scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
        self.core = PagedAttention(layer, head_dim, softmax_scale=scale, sliding_window=sliding_window)
        self.out = Linear(num_heads * head_dim, hidden_size, bias=out_bias, split="in")
        self.rotary = rotary
        self._heads = (num_heads, num_kv_heads)
        self._head_dim = head_dim

    def place(self, mesh: Mesh) -> None:
        """See `Module.place`.

        Raises:
            ValueError: the heads do not divide by the number of ranks.
        """
        num_heads, num_kv_heads = self._heads
        if num_heads % mesh.size or num_kv_heads % mesh.size:
            raise ValueError(
                f"attention: {num_heads} query heads and {num_kv_heads} KV heads do not divide by {mesh.size} ranks. "
                f"Fix: use a number of ranks that divides {num_kv_heads}."
            )
        self._heads = (num_heads // mesh.size, num_kv_heads // mesh.size)

    def flow(self) -> list[tuple[str, Module]]:
        """The modules in the order in which the activation passes them."""
        return [("qkv", self.qkv), ("core", self.core), ("out", self.out)]

    def __call__(self, x: Tensor, batch: ForwardBatch, kv: KVPool) -> Tensor:
        """[rows, H] -> [rows, H]."""
        num_heads, num_kv_heads = self._heads
        heads = self.qkv(x).view(x.shape[0], num_heads + 2 * num_kv_heads, self._head_dim)
        q, k, v = heads.split_with_sizes((num_heads, num_kv_heads, num_kv_heads), 1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        self.rotary(q, k, batch.positions)
        return self.out(self.core(q, k, v, batch, kv))
