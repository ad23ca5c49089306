"""Public op of the rope family."""

from __future__ import annotations

from typing import Final, NoReturn

import torch
from torch.compiler import is_compiling

from tokenspeed_kernel.dispatch import BoundOp, check_devices, register_library_op
from tokenspeed_kernel.errors import ShapeError
from tokenspeed_kernel.ops.operands import OPERAND_ERRORS, refuse_kinds
from tokenspeed_kernel.ops.rope.contract import APPLY_ROPE

_APPLY_ROPE: Final = BoundOp(APPLY_ROPE)


def apply_rope(
    q: torch.Tensor,
    k: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    *,
    interleaved: bool = False,
    q_out: torch.Tensor | None = None,
    k_out: torch.Tensor | None = None,
    solution: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate queries and keys by the angles of their positions.

    The first ``rotary_dim`` elements of each head are rotated in pairs, the others pass through. A pair (a, b) at angle t becomes
    (a cos t - b sin t, b cos t + a sin t), computed in float32 (float64 for float64 inputs) and rounded once.

    Args:
        q: [num_tokens, num_heads, head_dim] fp32, fp16, bf16 (fp64 on the CPU), last dimension contiguous.
        k: [num_tokens, num_kv_heads, head_dim] of q's dtype. Fastest on the CPU as slices of one projection, q's heads first.
        positions: [num_tokens] int32 or int64, rows of ``cos_sin_cache``. The CPU raises IndexError for others; a GPU, which
            cannot, fills the token's rotated elements with NaN.
        cos_sin_cache: [max_position, rotary_dim] fp32, cosines then sines, from `rope_cos_sin`; contiguous.
        interleaved: pairs are neighbours (2i, 2i + 1), as in GPT-J; else (i, i + rotary_dim / 2), as in GPT-NeoX and Llama.
        q_out: optional, like q, written in place; may be q itself.
        k_out: optional, like k, written in place; may be k itself.
        solution: solution or kernel to use instead of the best that qualifies.
    Returns:
        (q_out, k_out), or new tensors.
    Raises:
        ShapeError: shapes, dtypes or strides disagree.  NoKernelError: nothing qualifies.
    Source: RoFormer, arXiv:2104.09864, section 3.4.2.
    """
    if is_compiling():
        rotated_q, rotated_k = _LIBRARY_OP(q, k, positions, cos_sin_cache, interleaved, solution)
        return (
            rotated_q if q_out is None else q_out.copy_(rotated_q),
            rotated_k if k_out is None else k_out.copy_(rotated_k),
        )
    try:
        q_shape, k_shape, table_shape, dtype, device = q.shape, k.shape, cos_sin_cache.shape, q.dtype, q.device
        if (
            len(q_shape) != 3
            or len(k_shape) != 3
            or k_shape[0] != q_shape[0]
            or k_shape[2] != q_shape[2]
            or positions.shape != (q_shape[0],)
            or len(table_shape) != 2
            or table_shape[1] > q_shape[2]
            or not cos_sin_cache.is_contiguous()
            or q.stride()[2] != 1
            or k.stride()[2] != 1
        ):
            _refuse(q, k, positions, cos_sin_cache, q_out, k_out)
        if (q_out is not None and q_out is not q) or (k_out is not None and k_out is not k):
            for like, out in ((q, q_out), (k, k_out)):
                if out is not None and (out.shape != like.shape or out.dtype != dtype or out.stride()[2] != 1):
                    _refuse(q, k, positions, cos_sin_cache, q_out, k_out)
        table_dtype, other_dtype = cos_sin_cache.dtype, None if k.dtype is dtype else k.dtype  # hashing a dtype is slow
        key = (
            device,
            k.device,
            positions.device,
            cos_sin_cache.device,
            dtype,
            other_dtype,
            positions.dtype,
            table_dtype,
            q_shape[2],
            table_shape[1],
            interleaved,
            solution,
        )
        kernel = _APPLY_ROPE.table.get(key)
        if kernel is None:
            if k.dtype != dtype or positions.dtype not in (torch.int32, torch.int64) or table_shape[1] % 2:
                _refuse(q, k, positions, cos_sin_cache, q_out, k_out)
            check_devices("rope.apply_rope", device, k=k, positions=positions, cos_sin_cache=cos_sin_cache)
            traits = (q_shape[2], table_shape[1], interleaved)
            kernel = _APPLY_ROPE.bind(key, device, (dtype, k.dtype, cos_sin_cache.dtype), traits, solution)
        rotated: tuple[torch.Tensor, torch.Tensor] = kernel(
            q, k, positions, cos_sin_cache, interleaved=interleaved, q_out=q_out, k_out=k_out
        )
        return rotated
    except OPERAND_ERRORS as error:
        refuse_kinds(apply_rope, locals(), error)
        raise


def _refuse(
    q: torch.Tensor,
    k: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    q_out: torch.Tensor | None,
    k_out: torch.Tensor | None,
) -> NoReturn:
    """Say which operand does not fit."""

    def fail(expected: str, got: torch.Tensor, fix: str | None = None) -> NoReturn:
        dtype = str(got.dtype).removeprefix("torch.")
        shown = f"{list(got.shape)} {dtype} with strides {list(got.stride())}"
        raise ShapeError("rope.apply_rope", expected=expected, got=shown, fix=fix)

    if q.dim() != 3:
        fail("q [num_tokens, num_heads, head_dim]", q)
    num_tokens, _, head_dim = q.shape
    if k.dim() != 3 or k.shape[0] != num_tokens or k.shape[2] != head_dim or k.dtype != q.dtype:
        fail(f"k [{num_tokens}, num_kv_heads, {head_dim}] {str(q.dtype).removeprefix('torch.')}", k)
    if positions.shape != (num_tokens,) or positions.dtype not in (torch.int32, torch.int64):
        fail(f"positions [{num_tokens}] int32 or int64", positions)
    if cos_sin_cache.dim() != 2 or cos_sin_cache.shape[1] > head_dim or cos_sin_cache.shape[1] % 2:
        fail(f"cos_sin_cache [max_position, rotary_dim], rotary_dim even and at most {head_dim}", cos_sin_cache)
    if not cos_sin_cache.is_contiguous():
        fail("cos_sin_cache contiguous", cos_sin_cache, "build it with rope_cos_sin")
    for name, tensor in (("q", q), ("k", k)):
        if tensor.stride(2) != 1:
            fail(f"{name} with its last dimension contiguous", tensor, f"pass {name}.contiguous()")
    for name, like, out in (("q_out", q, q_out), ("k_out", k, k_out)):
        if out is not None and (out.shape != like.shape or out.dtype != like.dtype or out.stride(2) != 1):
            fail(f"{name} like {name[0]}, last dimension contiguous", out)
    raise AssertionError("unreachable: an operand was refused, but every check of it passes")


def _eager(
    q: torch.Tensor,
    k: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    interleaved: bool,
    solution: str | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    q_out, k_out = _fake(q, k, positions, cos_sin_cache, interleaved, solution)
    return apply_rope(q, k, positions, cos_sin_cache, interleaved=interleaved, q_out=q_out, k_out=k_out, solution=solution)


def _fake(
    q: torch.Tensor,
    k: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    interleaved: bool,
    solution: str | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape)


_LIBRARY_OP: Final = register_library_op(
    "apply_rope(Tensor q, Tensor k, Tensor positions, Tensor cos_sin_cache, bool interleaved, str? solution) -> (Tensor, Tensor)",
    _eager,
    _fake,
)
