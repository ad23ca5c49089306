"""Public op that rotates new queries and keys and writes keys and values into a paged cache."""

from __future__ import annotations

from typing import Final, NoReturn

import torch
from torch.compiler import is_compiling

from tokenspeed_kernel.dispatch import NEW_CALL, BoundOp, check_devices, register_library_op
from tokenspeed_kernel.errors import ShapeError
from tokenspeed_kernel.ops.kvcache.contract import ROPE_WRITE_KV
from tokenspeed_kernel.ops.operands import OPERAND_ERRORS, refuse_kinds
from tokenspeed_kernel.signature import Format

__all__ = ["rope_write_kv"]

_OP: Final = BoundOp(ROPE_WRITE_KV)
_FP8: Final = torch.float8_e4m3fn
_BY_TENSOR: Final = Format.parse("fp8_e4m3@tensor")
_BY_HEAD: Final = Format.parse("fp8_e4m3@head")


def rope_write_kv(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    interleaved: bool = False,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    q_out: torch.Tensor | None = None,
    solution: str | None = None,
) -> torch.Tensor:
    """Rotate new tokens' queries and keys by their positions, and write keys and values into their slots of a paged cache.

    One launch that does what `rope.apply_rope` and then `kvcache.write_kv` (with scales, `kvcache.write_scaled_kv`) do: a rotated
    key is rounded to k's dtype before it is scaled. k and v stay as they are.

    Args:
        q: [num_tokens, num_heads, head_dim] fp32, fp16, bf16 (fp64 on the CPU), last dimension contiguous.
        k: [num_tokens, num_kv_heads, head_dim] of q's dtype, last dimension contiguous.
        v: as k.
        positions: [num_tokens] int32 or int64, rows of ``cos_sin_cache``. The CPU raises IndexError for others; a GPU, which
            cannot, fills the token's rotated elements with NaN.
        cos_sin_cache: [max_position, rotary_dim] fp32, cosines then sines, from `rope_cos_sin`; contiguous.
        k_cache: [num_pages, page_size, num_kv_heads, head_dim] of k's dtype, or float8_e4m3fn with scales; last dimension
            contiguous.
        v_cache: as k_cache.
        slot_mapping: [num_tokens] int64, page * page_size + offset; of a token whose slot is negative or beyond the cache only the
            queries are rotated. No two tokens may have the same slot.
        interleaved: pairs are neighbours (2i, 2i + 1), as in GPT-J; else (i, i + rotary_dim / 2), as in GPT-NeoX and Llama.
        k_scale: only with fp8 caches: [] or [num_kv_heads] fp32, positive; what a stored key is multiplied by to give its value.
        v_scale: as k_scale, of the same shape.
        q_out: optional, like q, written in place; may be q itself.
        solution: solution or kernel to use instead of the best that qualifies.
    Returns:
        q_out, or a new tensor of q's shape and dtype; the caches are written.
    Raises:
        ShapeError: shapes, dtypes or strides disagree.  NoKernelError: nothing qualifies.
    Source: RoFormer, arXiv:2104.09864, section 3.4.2; paging arXiv:2309.06180, section 4; fp8 arXiv:2209.05433, table 1.
    """
    if is_compiling():
        operands = (q, k, v, positions, cos_sin_cache, k_cache, v_cache, slot_mapping)
        rotated: torch.Tensor = _LIBRARY_OP(*operands, interleaved, k_scale, v_scale, solution)
        return rotated if q_out is None else q_out.copy_(rotated)
    try:
        operands = (q, k, v, positions, cos_sin_cache, k_cache, v_cache, slot_mapping)
        given: tuple[torch.Tensor, ...] = operands
        if k_scale is not None and v_scale is not None:
            given += (k_scale, v_scale)
        if q_out is not None and q_out is not q:
            given += (q_out,)
        key = (q.shape, interleaved, k_scale is None, v_scale is None, q_out is None, q_out is q, solution)
        looks_same, kernel = _OP.seen.get(key, NEW_CALL)
        if not looks_same(*given):
            _check(*operands, k_scale, v_scale, q_out)
            device = q.device
            names = ("k", "v", "positions", "cos_sin_cache", "k_cache", "v_cache", "slot_mapping")
            check_devices(
                _OP.contract.name,
                device,
                **dict(zip(names, operands[1:], strict=True)),
                k_scale=k_scale,
                v_scale=v_scale,
                q_out=q_out,
            )
            stored: torch.dtype | Format = k_cache.dtype
            if k_scale is not None:
                stored = _BY_HEAD if k_scale.dim() else _BY_TENSOR
            traits = (q.shape[2], cos_sin_cache.shape[1], interleaved, k_cache.shape[1])
            kernel = _OP.kernel(device, (q.dtype, q.dtype, q.dtype, cos_sin_cache.dtype, stored, stored), traits, solution)
            _OP.remember(key, kernel, *given)
        result: torch.Tensor = kernel(
            q, k, v, positions, cos_sin_cache, k_cache, v_cache, slot_mapping, interleaved, k_scale, v_scale, q_out
        )
        return result
    except OPERAND_ERRORS as error:
        refuse_kinds(rope_write_kv, locals(), error)
        raise


def _check(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    q_out: torch.Tensor | None,
) -> None:
    """Refuse an operand that does not fit, and say which."""
    if q.dim() != 3 or q.stride(2) != 1:
        _refuse("q [num_tokens, num_heads, head_dim], last dimension contiguous", q)
    num_tokens, _, head_dim = q.shape
    dtype = str(q.dtype).removeprefix("torch.")
    if k.dim() != 3 or k.shape[0] != num_tokens or k.shape[2] != head_dim or k.dtype is not q.dtype or k.stride(2) != 1:
        _refuse(f"k [{num_tokens}, num_kv_heads, {head_dim}] {dtype}, last dimension contiguous", k)
    if v.shape != k.shape or v.dtype is not k.dtype or v.stride(2) != 1:
        _refuse(f"v like k, {list(k.shape)} {dtype}, last dimension contiguous", v)
    if positions.shape != (num_tokens,) or positions.dtype not in (torch.int32, torch.int64):
        _refuse(f"positions [{num_tokens}] int32 or int64", positions)
    if cos_sin_cache.dim() != 2 or cos_sin_cache.shape[1] > head_dim or cos_sin_cache.shape[1] % 2:
        _refuse(f"cos_sin_cache [max_position, rotary_dim], rotary_dim even and at most {head_dim}", cos_sin_cache)
    if not cos_sin_cache.is_contiguous():
        _refuse("cos_sin_cache contiguous", cos_sin_cache, "build it with rope_cos_sin")
    if (k_scale is None) != (v_scale is None):
        expected, fix = "k_scale and v_scale together", "pass torch.ones([]) for the one that scales nothing"
        raise ShapeError(ROPE_WRITE_KV.name, expected=expected, got="one of them", fix=fix)
    stored = dtype if k_scale is None else "float8_e4m3fn"
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        fits = cache.dtype is (q.dtype if k_scale is None else _FP8) and cache.dim() == 4 and cache.shape[2:] == k.shape[1:]
        if not fits or cache.shape[:2] != k_cache.shape[:2] or cache.stride(3) != 1:
            shape = f"[num_pages, page_size, {k.shape[1]}, {head_dim}]"
            unscaled = cache.dtype is _FP8 and k_scale is None
            remedy = "pass k_scale and v_scale with an fp8 cache" if unscaled else None
            _refuse(f"{name} {shape} {stored}, last dimension contiguous", cache, remedy)
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if scale is not None and (scale.dtype is not torch.float32 or (scale.dim() != 0 and scale.shape != k.shape[1:2])):
            _refuse(f"{name} [] or [{k.shape[1]}] float32", scale, "give one scale for all heads, or one for each")
    if k_scale is not None and v_scale is not None and k_scale.shape != v_scale.shape:
        _refuse(f"v_scale like k_scale, {list(k_scale.shape)}", v_scale)
    if slot_mapping.shape != (num_tokens,) or slot_mapping.dtype is not torch.int64:
        _refuse(f"slot_mapping [{num_tokens}] int64", slot_mapping)
    if q_out is not None and (q_out.shape != q.shape or q_out.dtype is not q.dtype or q_out.stride(2) != 1):
        _refuse(f"q_out like q, {list(q.shape)} {dtype}, last dimension contiguous", q_out)


def _refuse(expected: str, got: torch.Tensor, fix: str | None = None) -> NoReturn:
    shown = f"{list(got.shape)} {str(got.dtype).removeprefix('torch.')} with strides {list(got.stride())}"
    raise ShapeError(ROPE_WRITE_KV.name, expected=expected, got=shown, fix=fix)


def _eager(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    interleaved: bool,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    solution: str | None,
) -> torch.Tensor:
    operands = (q, k, v, positions, cos_sin_cache, k_cache, v_cache, slot_mapping)
    q_out = q.new_empty(q.shape)
    return rope_write_kv(*operands, interleaved=interleaved, k_scale=k_scale, v_scale=v_scale, q_out=q_out, solution=solution)


def _fake(q: torch.Tensor, *_: object) -> torch.Tensor:
    return q.new_empty(q.shape)


_LIBRARY_OP: Final = register_library_op(
    "rope_write_kv(Tensor q, Tensor k, Tensor v, Tensor positions, Tensor cos_sin_cache, Tensor(a!) k_cache, Tensor(b!) v_cache, "
    "Tensor slot_mapping, bool interleaved, Tensor? k_scale, Tensor? v_scale, str? solution) -> Tensor",
    _eager,
    _fake,
)
