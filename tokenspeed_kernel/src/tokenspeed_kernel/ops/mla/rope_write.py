"""Public op that rotates the rope parts of new queries and keys and writes latent rows into a paged cache."""

from __future__ import annotations

from typing import Final

import torch
from torch.compiler import is_compiling

from tokenspeed_kernel.dispatch import NEW_CALL, BoundOp, check_devices, register_library_op
from tokenspeed_kernel.ops.mla.check import refuse
from tokenspeed_kernel.ops.mla.contract import ROPE_WRITE_MLA
from tokenspeed_kernel.ops.operands import OPERAND_ERRORS, refuse_kinds

__all__ = ["rope_write_mla"]

_OP: Final = BoundOp(ROPE_WRITE_MLA)


def rope_write_mla(
    q_rope: torch.Tensor,
    k_rope: torch.Tensor,
    latent: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    interleaved: bool = False,
    q_out: torch.Tensor | None = None,
    solution: str | None = None,
) -> torch.Tensor:
    """Rotate the rope parts of new tokens' queries and keys, and write latent rows into their slots of a paged cache.

    One launch that does what `rope.apply_rope` and then `mla.write_mla_cache` do. k_rope and latent stay as they are.

    Args:
        q_rope: [num_tokens, num_heads, rope_dim] fp32, fp16, bf16 (fp64 on the CPU), last dimension contiguous; as a rule the last
            elements of each query head.
        k_rope: [num_tokens, rope_dim] of q_rope's dtype, last dimension contiguous; one for all heads.
        latent: [num_tokens, latent_dim] of q_rope's dtype, last dimension contiguous.
        positions: [num_tokens] int32 or int64, rows of ``cos_sin_cache``. The CPU raises IndexError for others; a GPU, which
            cannot, fills the token's rotated elements with NaN.
        cos_sin_cache: [max_position, rope_dim] fp32, cosines then sines, from `rope_cos_sin`; contiguous.
        kv_cache: [num_pages, page_size, latent_dim + rope_dim] of q_rope's dtype, last dimension contiguous.
        slot_mapping: [num_tokens] int64, page * page_size + offset; of a token whose slot is negative or beyond the cache only the
            queries are rotated. No two tokens may have the same slot.
        interleaved: pairs are neighbours (2i, 2i + 1), as in GPT-J; else (i, i + rope_dim / 2), as in GPT-NeoX and Llama.
        q_out: optional, like q_rope, written in place; may be q_rope itself.
        solution: solution or kernel to use instead of the best that qualifies.
    Returns:
        q_out, or a new tensor of q_rope's shape and dtype; the cache is written.
    Raises:
        ShapeError: shapes, dtypes or strides disagree.  NoKernelError: nothing qualifies.
    Source: DeepSeek-V2, arXiv:2405.04434, section 2.1; RoFormer, arXiv:2104.09864, section 3.4.2.
    """
    operands = (q_rope, k_rope, latent, positions, cos_sin_cache, kv_cache, slot_mapping)
    if is_compiling():
        rotated: torch.Tensor = _LIBRARY_OP(*operands, interleaved, solution)
        return rotated if q_out is None else q_out.copy_(rotated)
    try:
        given: tuple[torch.Tensor, ...] = operands
        if q_out is not None and q_out is not q_rope:
            given += (q_out,)
        key = (q_rope.shape, interleaved, q_out is None, q_out is q_rope, solution)
        looks_same, kernel = _OP.seen.get(key, NEW_CALL)
        if not looks_same(*given):
            _check(*operands, q_out)
            device, dtype = q_rope.device, q_rope.dtype
            others = {"k_rope": k_rope, "latent": latent, "positions": positions, "cos_sin_cache": cos_sin_cache}
            check_devices(_OP.contract.name, device, **others, kv_cache=kv_cache, slot_mapping=slot_mapping, q_out=q_out)
            traits = (latent.shape[1], q_rope.shape[2], interleaved, kv_cache.shape[1])
            kernel = _OP.kernel(device, (dtype, dtype, dtype, cos_sin_cache.dtype, dtype), traits, solution)
            _OP.remember(key, kernel, *given)
        result: torch.Tensor = kernel(q_rope, k_rope, latent, positions, cos_sin_cache, kv_cache, slot_mapping, interleaved, q_out)
        return result
    except OPERAND_ERRORS as error:
        refuse_kinds(rope_write_mla, locals(), error)
        raise


def _check(
    q_rope: torch.Tensor,
    k_rope: torch.Tensor,
    latent: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    q_out: torch.Tensor | None,
) -> None:
    """Refuse an operand that does not fit, and say which."""
    op = ROPE_WRITE_MLA.name
    if q_rope.dim() != 3 or q_rope.shape[2] % 2 or q_rope.stride(2) != 1:
        refuse(op, "q_rope [num_tokens, num_heads, rope_dim], rope_dim even, last dimension contiguous", q_rope, strides=True)
    num_tokens, num_heads, rope_dim = q_rope.shape
    dtype = str(q_rope.dtype).removeprefix("torch.")
    if k_rope.shape != (num_tokens, rope_dim) or k_rope.dtype is not q_rope.dtype or k_rope.stride(1) != 1:
        refuse(op, f"k_rope [{num_tokens}, {rope_dim}] {dtype}, last dimension contiguous", k_rope, strides=True)
    if latent.dim() != 2 or latent.shape[0] != num_tokens or latent.dtype is not q_rope.dtype or latent.stride(1) != 1:
        refuse(op, f"latent [{num_tokens}, latent_dim] {dtype}, last dimension contiguous", latent, strides=True)
    if positions.shape != (num_tokens,) or positions.dtype not in (torch.int32, torch.int64):
        refuse(op, f"positions [{num_tokens}] int32 or int64", positions)
    if cos_sin_cache.dim() != 2 or cos_sin_cache.shape[1] != rope_dim or not cos_sin_cache.is_contiguous():
        fix = "build it with rope_cos_sin"
        refuse(op, f"cos_sin_cache [max_position, {rope_dim}], contiguous", cos_sin_cache, fix=fix, strides=True)
    width = latent.shape[1] + rope_dim
    if kv_cache.dim() != 3 or kv_cache.shape[2] != width or kv_cache.dtype is not q_rope.dtype or kv_cache.stride(2) != 1:
        refuse(op, f"kv_cache [num_pages, page_size, {width}] {dtype}, last dimension contiguous", kv_cache, strides=True)
    if slot_mapping.shape != (num_tokens,) or slot_mapping.dtype is not torch.int64:
        refuse(op, f"slot_mapping [{num_tokens}] int64", slot_mapping)
    if q_out is not None and (q_out.shape != q_rope.shape or q_out.dtype is not q_rope.dtype or q_out.stride(2) != 1):
        expected = f"q_out [{num_tokens}, {num_heads}, {rope_dim}] {dtype}, last dimension contiguous"
        refuse(op, expected, q_out, strides=True)


def _eager(
    q_rope: torch.Tensor,
    k_rope: torch.Tensor,
    latent: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    interleaved: bool,
    solution: str | None,
) -> torch.Tensor:
    operands = (q_rope, k_rope, latent, positions, cos_sin_cache, kv_cache, slot_mapping)
    return rope_write_mla(*operands, interleaved=interleaved, q_out=q_rope.new_empty(q_rope.shape), solution=solution)


def _fake(q_rope: torch.Tensor, *_: object) -> torch.Tensor:
    return q_rope.new_empty(q_rope.shape)


_LIBRARY_OP: Final = register_library_op(
    "rope_write_mla(Tensor q_rope, Tensor k_rope, Tensor latent, Tensor positions, Tensor cos_sin_cache, Tensor(a!) kv_cache, "
    "Tensor slot_mapping, bool interleaved, str? solution) -> Tensor",
    _eager,
    _fake,
)
