"""Public ops of the gated delta rule."""

from __future__ import annotations

from typing import Final, NoReturn

import torch
from torch.compiler import is_compiling

from tokenspeed_kernel.dispatch import NEW_CALL, BoundOp, Kernel, check_devices, register_library_op
from tokenspeed_kernel.ops.linear_attention.check import check_out, refuse
from tokenspeed_kernel.ops.linear_attention.contract import GDN_DECODE, GDN_PREFILL
from tokenspeed_kernel.ops.operands import OPERAND_ERRORS, refuse_kinds

__all__ = ["gdn_decode", "gdn_prefill"]

_PREFILL: Final = BoundOp(GDN_PREFILL)
_DECODE: Final = BoundOp(GDN_DECODE)
_PREFILL_SEEN: Final = _PREFILL.seen
_DECODE_SEEN: Final = _DECODE.seen
_FP32: Final = torch.float32
_INT32: Final = torch.int32
_INTS: Final = (torch.int64, torch.int32)


def gdn_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    states: torch.Tensor,
    state_indices: torch.Tensor,
    cu_seqlens: torch.Tensor,
    *,
    has_initial_state: torch.Tensor | None = None,
    scale: float | None = None,
    qk_l2norm: bool = False,
    out: torch.Tensor | None = None,
    solution: str | None = None,
) -> torch.Tensor:
    """Run the gated delta rule over each request's tokens, from and to its state in a pool.

    For each value head, with its state S [key_dim, value_dim] and the token's q, k, v, g, beta:
    S = exp(g) S; S = S + beta k (v - S'k)'; output = scale S'q. Value head h uses query and key head h // (Hv / Hk).

    Args:
        q: [num_tokens, Hk, key_dim] fp32, fp16 or bf16, last dimension contiguous.
        k: as q.
        v: [num_tokens, Hv, value_dim] of q's dtype, last dimension contiguous; Hk divides Hv.
        g: [num_tokens, Hv] fp32, logarithm of the decay (at most 0), base e; any strides.
        beta: [num_tokens, Hv] fp32 or q's dtype, weight of the correction, in 0..1; any strides.
        states: [num_slots, Hv, key_dim, value_dim] fp32, last dimension contiguous; the requests' slots are written in place.
        state_indices: [num_reqs] int32 or int64, slot of each request, no valid one twice. A request whose slot is outside the pool
            (-1, say) is ignored: its rows of the output are 0.
        cu_seqlens: [num_reqs + 1] int32, request r's tokens are rows [cu[r], cu[r + 1]); from 0 to num_tokens. A request without
            tokens keeps its state.
        has_initial_state: [num_reqs] bool; where False the request starts from 0, and its slot is not read. None: all True.
        scale: float, dimensionless; key_dim ** -0.5 when None.
        qk_l2norm: divide each q and k by its Euclidean length first, x / sqrt(sum(x^2) + 1e-6).
        out: optional, like v, last dimension contiguous, written in place; it must not overlap an input.
        solution: solution or kernel to use instead of the best that qualifies.
    Returns:
        out, or a new tensor of v's shape and dtype.
    Raises:
        ShapeError: shapes, dtypes or strides disagree.  NoKernelError: nothing qualifies.
    Source: Gated Delta Networks, arXiv:2412.06464, equation 10.
    """
    if is_compiling():
        result: torch.Tensor = _PREFILL_LIBRARY(
            q, k, v, g, beta, states, state_indices, cu_seqlens, has_initial_state, scale, qk_l2norm, solution
        )
        return result if out is None else out.copy_(result)
    try:
        operands: tuple[torch.Tensor, ...] = (q, k, v, g, beta, states, state_indices, cu_seqlens)
        if has_initial_state is not None:
            operands = (*operands, has_initial_state)
        if out is not None:
            operands = (*operands, out)
        key = (q.shape, has_initial_state is None, out is None, solution)
        looks_same, kernel = _PREFILL_SEEN.get(key, NEW_CALL)
        if not looks_same(*operands):
            kernel = _bind_prefill(q, k, v, g, beta, states, state_indices, cu_seqlens, has_initial_state, out, solution)
            _PREFILL.remember(key, kernel, *operands)
        computed: torch.Tensor = kernel(
            q, k, v, g, beta, states, state_indices, cu_seqlens, has_initial_state, scale, qk_l2norm, out
        )
        return computed
    except OPERAND_ERRORS as error:
        refuse_kinds(gdn_prefill, locals(), error)
        raise


def gdn_decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    states: torch.Tensor,
    state_indices: torch.Tensor,
    *,
    scale: float | None = None,
    qk_l2norm: bool = False,
    out: torch.Tensor | None = None,
    solution: str | None = None,
) -> torch.Tensor:
    """Advance the gated delta rule by each request's newest tokens, one or a few, token by token; see `gdn_prefill`.

    Args:
        q: [num_reqs, q_len, Hk, key_dim] fp32, fp16 or bf16, last dimension contiguous.
        k: as q.
        v: [num_reqs, q_len, Hv, value_dim] of q's dtype, last dimension contiguous; Hk divides Hv.
        g: [num_reqs, q_len, Hv] fp32, logarithm of the decay (at most 0), base e; any strides.
        beta: [num_reqs, q_len, Hv] fp32 or q's dtype, weight of the correction, in 0..1; any strides.
        states: [num_slots, Hv, key_dim, value_dim] fp32, last dimension contiguous; the requests' slots are written in place.
        state_indices: [num_reqs] int32 or int64, slot of each request, no valid one twice. A request whose slot is outside the pool
            (-1, say) is ignored: its rows of the output are 0.
        scale: float, dimensionless; key_dim ** -0.5 when None.
        qk_l2norm: divide each q and k by its Euclidean length first, x / sqrt(sum(x^2) + 1e-6).
        out: optional, like v, last dimension contiguous, written in place; it must not overlap an input.
        solution: solution or kernel to use instead of the best that qualifies.
    Returns:
        out, or a new tensor of v's shape and dtype.
    Raises:
        ShapeError: shapes, dtypes or strides disagree.  NoKernelError: nothing qualifies.
    Source: Gated Delta Networks, arXiv:2412.06464, equation 10.
    """
    if is_compiling():
        result: torch.Tensor = _DECODE_LIBRARY(q, k, v, g, beta, states, state_indices, scale, qk_l2norm, solution)
        return result if out is None else out.copy_(result)
    try:
        operands: tuple[torch.Tensor, ...] = (q, k, v, g, beta, states, state_indices)
        if out is not None:
            operands = (*operands, out)
        key = (q.shape, out is None, solution)
        looks_same, kernel = _DECODE_SEEN.get(key, NEW_CALL)
        if not looks_same(*operands):
            kernel = _bind_decode(q, k, v, g, beta, states, state_indices, out, solution)
            _DECODE.remember(key, kernel, *operands)
        computed: torch.Tensor = kernel(q, k, v, g, beta, states, state_indices, scale, qk_l2norm, out)
        return computed
    except OPERAND_ERRORS as error:
        refuse_kinds(gdn_decode, locals(), error)
        raise


def _bind_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    states: torch.Tensor,
    state_indices: torch.Tensor,
    cu_seqlens: torch.Tensor,
    has_initial_state: torch.Tensor | None,
    out: torch.Tensor | None,
    solution: str | None,
) -> Kernel:
    """Check every operand, and return the kernel."""
    q_shape, dtype, beta_dtype = q.shape, q.dtype, beta.dtype
    try:
        num_tokens, key_heads, key_dim = q_shape
        value_rows, value_heads, value_dim = v.shape
        _, state_heads, state_keys, state_values = states.shape
        (num_reqs,) = state_indices.shape
    except ValueError:
        _refuse(GDN_PREFILL.name, q, k, v, g, beta, states, state_indices, cu_seqlens, has_initial_state)
    per_head = (num_tokens, value_heads)
    if (
        k.shape != q_shape
        or value_rows != num_tokens
        or not key_heads
        or value_heads % key_heads
        or g.shape != per_head
        or beta.shape != per_head
        or state_heads != value_heads
        or state_keys != key_dim
        or state_values != value_dim
        or cu_seqlens.shape != (num_reqs + 1,)
        or (not q.is_contiguous() and q.stride()[2] != 1)
        or (not k.is_contiguous() and k.stride()[2] != 1)
        or (not v.is_contiguous() and v.stride()[2] != 1)
        or (not states.is_contiguous() and states.stride()[3] != 1)
        or k.dtype is not dtype
        or v.dtype is not dtype
        or g.dtype is not _FP32
        or states.dtype is not _FP32
        or cu_seqlens.dtype is not _INT32
        or state_indices.dtype not in _INTS
        or (has_initial_state is not None and (has_initial_state.shape != (num_reqs,) or has_initial_state.dtype is not torch.bool))
    ):
        _refuse(GDN_PREFILL.name, q, k, v, g, beta, states, state_indices, cu_seqlens, has_initial_state)
    if out is not None:
        check_out(GDN_PREFILL.name, v, out)
    device = q.device
    dtypes = (dtype, dtype, dtype, _FP32, beta_dtype, _FP32)
    operands = {"k": k, "v": v, "g": g, "beta": beta, "states": states, "state_indices": state_indices}
    check_devices(GDN_PREFILL.name, device, **operands, cu_seqlens=cu_seqlens, has_initial_state=has_initial_state)
    return _PREFILL.kernel(device, dtypes, (key_dim, value_dim), solution)


def _bind_decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    states: torch.Tensor,
    state_indices: torch.Tensor,
    out: torch.Tensor | None,
    solution: str | None,
) -> Kernel:
    """Check every operand, and return the kernel."""
    q_shape, dtype, beta_dtype = q.shape, q.dtype, beta.dtype
    try:
        num_reqs, q_len, key_heads, key_dim = q_shape
        value_reqs, value_len, value_heads, value_dim = v.shape
        _, state_heads, state_keys, state_values = states.shape
    except ValueError:
        _refuse(GDN_DECODE.name, q, k, v, g, beta, states, state_indices)
    per_head = (num_reqs, q_len, value_heads)
    if (
        k.shape != q_shape
        or value_reqs != num_reqs
        or value_len != q_len
        or not key_heads
        or value_heads % key_heads
        or g.shape != per_head
        or beta.shape != per_head
        or state_heads != value_heads
        or state_keys != key_dim
        or state_values != value_dim
        or state_indices.shape != (num_reqs,)
        or (not q.is_contiguous() and q.stride()[3] != 1)
        or (not k.is_contiguous() and k.stride()[3] != 1)
        or (not v.is_contiguous() and v.stride()[3] != 1)
        or (not states.is_contiguous() and states.stride()[3] != 1)
        or k.dtype is not dtype
        or v.dtype is not dtype
        or g.dtype is not _FP32
        or states.dtype is not _FP32
        or state_indices.dtype not in _INTS
    ):
        _refuse(GDN_DECODE.name, q, k, v, g, beta, states, state_indices)
    if out is not None:
        check_out(GDN_DECODE.name, v, out)
    device = q.device
    dtypes = (dtype, dtype, dtype, _FP32, beta_dtype, _FP32)
    operands = {"k": k, "v": v, "g": g, "beta": beta, "states": states, "state_indices": state_indices}
    check_devices(GDN_DECODE.name, device, **operands)
    return _DECODE.kernel(device, dtypes, (key_dim, value_dim), solution)


def _packed(x: torch.Tensor) -> bool:
    return x.stride(-1) == 1 or x.is_contiguous()


def _refuse(
    op: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    states: torch.Tensor,
    state_indices: torch.Tensor,
    cu_seqlens: torch.Tensor | None = None,
    has_initial_state: torch.Tensor | None = None,
) -> NoReturn:
    """Say which operand does not fit."""
    ragged = op == GDN_PREFILL.name
    dims = 3 if ragged else 4
    rows = "num_tokens" if ragged else "num_reqs, q_len"
    first = [("q", q, f"[{rows}, Hk, key_dim]", q.dim() == dims, None), ("v", v, f"[{rows}, Hv, value_dim]", v.dim() == dims, None)]
    if not all(one[3] for one in first):
        refuse(op, first)
    lead, dtype, last = list(q.shape[:-2]), str(q.dtype).removeprefix("torch."), ", last dimension contiguous"
    key_heads, key_dim, value_heads, value_dim = *q.shape[-2:], *v.shape[-2:]
    num_reqs = state_indices.shape[0] if state_indices.dim() == 1 else -1
    per_head = [*lead, value_heads]
    state = [value_heads, key_dim, value_dim]
    refuse(
        op,
        [
            ("q", q, f"[{rows}, Hk, key_dim] with at least one head{last}", key_heads > 0 and _packed(q), "pass q.contiguous()"),
            ("k", k, f"like q, {list(q.shape)} {dtype}{last}", k.shape == q.shape and k.dtype is q.dtype and _packed(k), None),
            ("v", v, f"[{rows}, Hv, value_dim] {dtype}{last}", v.dtype is q.dtype and _packed(v), None),
            ("v", v, f"with {lead} rows, as q", list(v.shape[:-2]) == lead, None),
            ("v", v, f"with a multiple of q's {key_heads} heads", value_heads % key_heads == 0, None),
            ("g", g, f"{per_head} float32", list(g.shape) == per_head and g.dtype is _FP32, None),
            ("beta", beta, f"{per_head} float32 or {dtype}", list(beta.shape) == per_head, None),
            (
                "states",
                states,
                f"[num_slots, {', '.join(map(str, state))}] float32{last}",
                states.dim() == 4 and list(states.shape[1:]) == state and states.dtype is _FP32 and _packed(states),
                None,
            ),
            (
                "state_indices",
                state_indices,
                f"[{'num_reqs' if ragged else lead[0]}] int32 or int64",
                state_indices.dim() == 1 and (ragged or num_reqs == lead[0]) and state_indices.dtype in _INTS,
                None,
            ),
            (
                "cu_seqlens",
                cu_seqlens,
                f"[{num_reqs + 1}] int32",
                cu_seqlens is None or (cu_seqlens.shape == (num_reqs + 1,) and cu_seqlens.dtype is torch.int32),
                None,
            ),
            (
                "has_initial_state",
                has_initial_state,
                f"[{num_reqs}] bool",
                has_initial_state is None or (has_initial_state.shape == (num_reqs,) and has_initial_state.dtype is torch.bool),
                None,
            ),
        ],
    )


def _run_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    states: torch.Tensor,
    state_indices: torch.Tensor,
    cu_seqlens: torch.Tensor,
    has_initial_state: torch.Tensor | None,
    scale: float | None,
    qk_l2norm: bool,
    solution: str | None,
) -> torch.Tensor:
    return gdn_prefill(
        q,
        k,
        v,
        g,
        beta,
        states,
        state_indices,
        cu_seqlens,
        has_initial_state=has_initial_state,
        scale=scale,
        qk_l2norm=qk_l2norm,
        solution=solution,
    )


def _run_decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    states: torch.Tensor,
    state_indices: torch.Tensor,
    scale: float | None,
    qk_l2norm: bool,
    solution: str | None,
) -> torch.Tensor:
    return gdn_decode(q, k, v, g, beta, states, state_indices, scale=scale, qk_l2norm=qk_l2norm, solution=solution)


def _fake(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *others: object) -> torch.Tensor:
    return v.new_empty(v.shape)


_INPUTS: Final = "Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor(a!) states, Tensor state_indices"
_PREFILL_LIBRARY: Final = register_library_op(
    f"gdn_prefill({_INPUTS}, Tensor cu_seqlens, Tensor? has_initial_state, float? scale, bool qk_l2norm, str? solution) -> Tensor",
    _run_prefill,
    _fake,
)
_DECODE_LIBRARY: Final = register_library_op(
    f"gdn_decode({_INPUTS}, float? scale, bool qk_l2norm, str? solution) -> Tensor", _run_decode, _fake
)
