"""The truth of the kvcache family: one token, or one page, at a time."""

from __future__ import annotations

import torch

from tokenspeed_kernel.ops.rope import reference as rope


def write_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Store each token's key and value in its slot; see the public op for the contract."""
    num_pages, page_size = k_cache.shape[:2]
    for token, slot in enumerate(slot_mapping.tolist()):
        if 0 <= slot < num_pages * page_size:
            page, offset = divmod(slot, page_size)
            k_cache[page, offset] = k[token].to(k_cache.dtype)
            v_cache[page, offset] = v[token].to(v_cache.dtype)


def write_scaled_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
) -> None:
    """Store each token's scaled key and value in its slot; see the public op for the contract."""
    write_kv(_scaled(k, k_scale), _scaled(v, v_scale), k_cache, v_cache, slot_mapping)


def rope_write_kv(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    interleaved: bool = False,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    q_out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Rotate, then store; see the public op for the contract."""
    rotated_q, rotated_k = rope.apply_rope(q, k, positions, cos_sin_cache, interleaved=interleaved, q_out=q_out)
    if k_scale is None or v_scale is None:
        write_kv(rotated_k, v, k_cache, v_cache, slot_mapping)
    else:
        write_scaled_kv(rotated_k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale)
    return rotated_q


def quantize_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
    *,
    k_out: torch.Tensor | None = None,
    v_out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale and round; see the public op for the contract."""
    kept = (_scaled(k, k_scale), _scaled(v, v_scale))
    outs = (torch.empty_like(made) if out is None else out for made, out in zip(kept, (k_out, v_out), strict=True))
    k_out, v_out = (out.copy_(made) for made, out in zip(kept, outs, strict=True))
    return k_out, v_out


def copy_pages(
    pool: torch.Tensor, src_pages: torch.Tensor, dst_pages: torch.Tensor, *, scratch: torch.Tensor | None = None
) -> None:
    """Copy each pair's page as it was before the call; see the public op for the contract."""
    before = [pool[src].clone() if 0 <= src < pool.shape[0] else None for src in src_pages.tolist()]
    for page, dst in zip(before, dst_pages.tolist(), strict=True):
        if page is not None and 0 <= dst < pool.shape[0]:
            pool[dst] = page


def transfer_pages(
    src_pool: torch.Tensor, dst_pool: torch.Tensor, src_pages: torch.Tensor, dst_pages: torch.Tensor
) -> None:
    """Copy each pair's page; see the public op for the contract."""
    for src, dst in zip(src_pages.tolist(), dst_pages.tolist(), strict=True):
        if 0 <= src < src_pool.shape[0] and 0 <= dst < dst_pool.shape[0]:
            dst_pool[dst] = src_pool[src]


def _scaled(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """[num_tokens, num_heads, head_dim] fp8: divided in float32, bounded to what fp8 holds; NaN stays NaN."""
    divided = x.float() / (scale if scale.dim() == 0 else scale[:, None])
    return divided.clamp(-448.0, 448.0).to(torch.float8_e4m3fn).contiguous()
