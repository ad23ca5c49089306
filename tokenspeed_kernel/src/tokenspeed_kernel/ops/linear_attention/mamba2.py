"""Public ops of Mamba2's selective state space."""

from __future__ import annotations

from typing import Final, NoReturn

import torch
from torch.compiler import is_compiling

from tokenspeed_kernel.dispatch import NEW_CALL, BoundOp, Kernel, check_devices, register_library_op
from tokenspeed_kernel.errors import ShapeError
from tokenspeed_kernel.ops.linear_attention.check import check_out, refuse
from tokenspeed_kernel.ops.linear_attention.contract import MAMBA2_PREFILL, SELECTIVE_STATE_UPDATE
from tokenspeed_kernel.ops.operands import OPERAND_ERRORS, refuse_kinds

__all__ = ["mamba2_prefill", "selective_state_update"]

_PREFILL: Final = BoundOp(MAMBA2_PREFILL)
_UPDATE: Final = BoundOp(SELECTIVE_STATE_UPDATE)
_PREFILL_SEEN: Final = _PREFILL.seen
_UPDATE_SEEN: Final = _UPDATE.seen
_PREFILL_NAME: Final = MAMBA2_PREFILL.name
_UPDATE_NAME: Final = SELECTIVE_STATE_UPDATE.name
_FP32: Final = torch.float32
_INTS: Final = (torch.int64, torch.int32)


def mamba2_prefill(
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    states: torch.Tensor,
    state_indices: torch.Tensor,
    cu_seqlens: torch.Tensor,
    *,
    has_initial_state: torch.Tensor | None = None,
    d: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] | None = None,
    out: torch.Tensor | None = None,
    solution: str | None = None,
) -> torch.Tensor:
    """Run the selective state space over each request's tokens, from and to its state in a pool.

    For each head, with its state S [head_dim, state_dim] and the token's x, b, c and step
    delta = clamp(softplus(dt + dt_bias)): S = exp(delta a) S + delta x b'; output = (S c + d x) silu(z).
    Head h uses b and c of group h // (H / G).

    Args:
        x: [num_tokens, H, head_dim] fp32, fp16 or bf16, last dimension contiguous.
        dt: [num_tokens, H] fp32 or x's dtype, the step before bias, softplus and limit; any strides.
        a: [H] fp32, negative.
        b: [num_tokens, G, state_dim] of x's dtype, last dimension contiguous; G divides H.
        c: as b.
        states: [num_slots, H, head_dim, state_dim] fp32, last dimension contiguous; the requests' slots are written in place.
        state_indices: [num_reqs] int32 or int64, slot of each request, no valid one twice. A request whose slot is outside the pool
            (-1, say) is ignored: its rows of the output are 0.
        cu_seqlens: [num_reqs + 1] int32, request r's tokens are rows [cu[r], cu[r + 1]); from 0 to num_tokens. A request without
            tokens keeps its state.
        has_initial_state: [num_reqs] bool; where False the request starts from 0, and its slot is not read. None: all True.
        d: optional [H] fp32 or x's dtype, weight of the skip connection.
        z: optional, like x, the gate.
        dt_bias: optional [H] of d's dtype, added to dt.
        dt_softplus: apply softplus to the step.
        dt_limit: (lowest, highest) step after softplus; None for no limit.
        out: optional, like x, last dimension contiguous, written in place; it must not overlap an input.
        solution: solution or kernel to use instead of the best that qualifies.
    Returns:
        out, or a new tensor of x's shape and dtype.
    Raises:
        ShapeError: shapes, dtypes, strides or the limit do not fit.  NoKernelError: nothing qualifies.
    Source: Transformers are SSMs, arXiv:2405.21060, equation 2 with the scalar-identity structure of section 5.
    """
    if is_compiling():
        result: torch.Tensor = _PREFILL_LIBRARY(
            x,
            dt,
            a,
            b,
            c,
            states,
            state_indices,
            cu_seqlens,
            has_initial_state,
            d,
            z,
            dt_bias,
            dt_softplus,
            None if dt_limit is None else list(dt_limit),
            solution,
        )
        return result if out is None else out.copy_(result)
    try:
        if dt_limit is not None:
            _check_limit(_PREFILL_NAME, dt_limit)
        operands: tuple[torch.Tensor, ...] = (x, dt, a, b, c, states, state_indices, cu_seqlens)
        if d is not None:
            operands += (d,)
        if z is not None:
            operands += (z,)
        if dt_bias is not None:
            operands += (dt_bias,)
        if has_initial_state is not None:
            operands += (has_initial_state,)
        if out is not None:
            operands += (out,)
        key = (x.shape, d is None, z is None, dt_bias is None, has_initial_state is None, out is None, solution)
        looks_same, kernel = _PREFILL_SEEN.get(key, NEW_CALL)
        if not looks_same(*operands):
            kernel = _bind_prefill(
                x, dt, a, b, c, states, state_indices, cu_seqlens, has_initial_state, d, z, dt_bias, out, solution
            )
            _PREFILL.remember(key, kernel, *operands)
        computed: torch.Tensor = kernel(
            x, dt, a, b, c, states, state_indices, cu_seqlens, has_initial_state, d, z, dt_bias, dt_softplus, dt_limit, out
        )
        return computed
    except OPERAND_ERRORS as error:
        refuse_kinds(mamba2_prefill, locals(), error)
        raise


def selective_state_update(
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    states: torch.Tensor,
    state_indices: torch.Tensor,
    *,
    d: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] | None = None,
    out: torch.Tensor | None = None,
    solution: str | None = None,
) -> torch.Tensor:
    """Advance the selective state space by each request's newest tokens, one or a few, token by token; see `mamba2_prefill`.

    Args:
        x: [num_reqs, q_len, H, head_dim] fp32, fp16 or bf16, last dimension contiguous.
        dt: [num_reqs, q_len, H] fp32 or x's dtype, the step before bias, softplus and limit; any strides.
        a: [H] fp32, negative.
        b: [num_reqs, q_len, G, state_dim] of x's dtype, last dimension contiguous; G divides H.
        c: as b.
        states: [num_slots, H, head_dim, state_dim] fp32, last dimension contiguous; the requests' slots are written in place.
        state_indices: [num_reqs] int32 or int64, slot of each request, no valid one twice. A request whose slot is outside the pool
            (-1, say) is ignored: its rows of the output are 0.
        d: optional [H] fp32 or x's dtype, weight of the skip connection.
        z: optional, like x, the gate.
        dt_bias: optional [H] of d's dtype, added to dt.
        dt_softplus: apply softplus to the step.
        dt_limit: (lowest, highest) step after softplus; None for no limit.
        out: optional, like x, last dimension contiguous, written in place; it must not overlap an input.
        solution: solution or kernel to use instead of the best that qualifies.
    Returns:
        out, or a new tensor of x's shape and dtype.
    Raises:
        ShapeError: shapes, dtypes, strides or the limit do not fit.  NoKernelError: nothing qualifies.
    Source: Transformers are SSMs, arXiv:2405.21060, equation 2 with the scalar-identity structure of section 5.
    """
    if is_compiling():
        limit = None if dt_limit is None else list(dt_limit)
        result: torch.Tensor = _UPDATE_LIBRARY(x, dt, a, b, c, states, state_indices, d, z, dt_bias, dt_softplus, limit, solution)
        return result if out is None else out.copy_(result)
    try:
        if dt_limit is not None:
            _check_limit(_UPDATE_NAME, dt_limit)
        operands: tuple[torch.Tensor, ...] = (x, dt, a, b, c, states, state_indices)
        if d is not None:
            operands += (d,)
        if z is not None:
            operands += (z,)
        if dt_bias is not None:
            operands += (dt_bias,)
        if out is not None:
            operands += (out,)
        key = (x.shape, d is None, z is None, dt_bias is None, out is None, solution)
        looks_same, kernel = _UPDATE_SEEN.get(key, NEW_CALL)
        if not looks_same(*operands):
            kernel = _bind_update(x, dt, a, b, c, states, state_indices, d, z, dt_bias, out, solution)
            _UPDATE.remember(key, kernel, *operands)
        computed: torch.Tensor = kernel(x, dt, a, b, c, states, state_indices, d, z, dt_bias, dt_softplus, dt_limit, out)
        return computed
    except OPERAND_ERRORS as error:
        refuse_kinds(selective_state_update, locals(), error)
        raise


def _bind_prefill(
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    states: torch.Tensor,
    state_indices: torch.Tensor,
    cu_seqlens: torch.Tensor,
    has_initial_state: torch.Tensor | None,
    d: torch.Tensor | None,
    z: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    out: torch.Tensor | None,
    solution: str | None,
) -> Kernel:
    """Check every operand, and return the kernel."""
    op = _PREFILL_NAME
    dtype, dt_dtype = x.dtype, dt.dtype
    x_shape, b_shape = x.shape, b.shape
    try:
        num_tokens, num_heads, head_dim = x_shape
        b_rows, groups, state_dim = b_shape
        _, state_heads, state_rows, state_columns = states.shape
        (num_reqs,) = state_indices.shape
    except ValueError:
        _refuse(op, x, dt, a, b, c, states, state_indices, d, z, dt_bias, cu_seqlens, has_initial_state)
    if (
        not groups
        or num_heads % groups
        or b_rows != num_tokens
        or c.shape != b_shape
        or dt.shape != (num_tokens, num_heads)
        or a.shape != (num_heads,)
        or state_heads != num_heads
        or state_rows != head_dim
        or state_columns != state_dim
        or (d is not None and d.shape != (num_heads,))
        or (dt_bias is not None and dt_bias.shape != (num_heads,))
        or (z is not None and (z.shape != x_shape or (not z.is_contiguous() and z.stride()[2] != 1)))
        or (not x.is_contiguous() and x.stride()[2] != 1)
        or (not b.is_contiguous() and b.stride()[2] != 1)
        or (not c.is_contiguous() and c.stride()[2] != 1)
        or (not states.is_contiguous() and states.stride()[3] != 1)
        or cu_seqlens.shape != (num_reqs + 1,)
        or b.dtype is not dtype
        or c.dtype is not dtype
        or (z is not None and z.dtype is not dtype)
        or a.dtype is not _FP32
        or states.dtype is not _FP32
        or cu_seqlens.dtype is not torch.int32
        or state_indices.dtype not in _INTS
        or (has_initial_state is not None and (has_initial_state.shape != (num_reqs,) or has_initial_state.dtype is not torch.bool))
    ):
        _refuse(op, x, dt, a, b, c, states, state_indices, d, z, dt_bias, cu_seqlens, has_initial_state)
    if out is not None:
        check_out(op, x, out)
    device = x.device
    dtypes = (dtype, dt_dtype, _FP32, dtype, dtype, _FP32, *(_dtype_of(one) for one in (d, z, dt_bias)))
    operands = {"dt": dt, "a": a, "b": b, "c": c, "states": states, "d": d, "z": z, "dt_bias": dt_bias}
    others = {"state_indices": state_indices, "cu_seqlens": cu_seqlens, "has_initial_state": has_initial_state}
    check_devices(op, device, **operands, **others)
    return _PREFILL.kernel(device, dtypes, (head_dim, state_dim), solution)


def _bind_update(
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    states: torch.Tensor,
    state_indices: torch.Tensor,
    d: torch.Tensor | None,
    z: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    out: torch.Tensor | None,
    solution: str | None,
) -> Kernel:
    """Check every operand, and return the kernel."""
    op = _UPDATE_NAME
    dtype, dt_dtype = x.dtype, dt.dtype
    x_shape, b_shape = x.shape, b.shape
    try:
        num_reqs, q_len, num_heads, head_dim = x_shape
        b_reqs, b_len, groups, state_dim = b_shape
        _, state_heads, state_rows, state_columns = states.shape
    except ValueError:
        _refuse(op, x, dt, a, b, c, states, state_indices, d, z, dt_bias)
    if (
        not groups
        or num_heads % groups
        or b_reqs != num_reqs
        or b_len != q_len
        or c.shape != b_shape
        or dt.shape != (num_reqs, q_len, num_heads)
        or a.shape != (num_heads,)
        or state_heads != num_heads
        or state_rows != head_dim
        or state_columns != state_dim
        or state_indices.shape != (num_reqs,)
        or (d is not None and d.shape != (num_heads,))
        or (dt_bias is not None and dt_bias.shape != (num_heads,))
        or (z is not None and (z.shape != x_shape or (not z.is_contiguous() and z.stride()[3] != 1)))
        or (not x.is_contiguous() and x.stride()[3] != 1)
        or (not b.is_contiguous() and b.stride()[3] != 1)
        or (not c.is_contiguous() and c.stride()[3] != 1)
        or (not states.is_contiguous() and states.stride()[3] != 1)
        or b.dtype is not dtype
        or c.dtype is not dtype
        or (z is not None and z.dtype is not dtype)
        or a.dtype is not _FP32
        or states.dtype is not _FP32
        or state_indices.dtype not in _INTS
    ):
        _refuse(op, x, dt, a, b, c, states, state_indices, d, z, dt_bias)
    if out is not None:
        check_out(op, x, out)
    device = x.device
    dtypes = (dtype, dt_dtype, _FP32, dtype, dtype, _FP32, *(_dtype_of(one) for one in (d, z, dt_bias)))
    operands = {"dt": dt, "a": a, "b": b, "c": c, "states": states, "d": d, "z": z, "dt_bias": dt_bias}
    check_devices(op, device, **operands, state_indices=state_indices)
    return _UPDATE.kernel(device, dtypes, (head_dim, state_dim), solution)


def _dtype_of(operand: torch.Tensor | None) -> torch.dtype | None:
    return None if operand is None else operand.dtype


def _packed(x: torch.Tensor) -> bool:
    return x.stride(-1) == 1 or x.is_contiguous()


def _check_limit(op: str, dt_limit: tuple[float, float]) -> None:
    if len(dt_limit) != 2 or not dt_limit[0] <= dt_limit[1]:
        expected = "dt_limit (lowest, highest), lowest <= highest"
        raise ShapeError(op, expected=expected, got=repr(tuple(dt_limit)), fix="pass None for no limit")


def _refuse(
    op: str,
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    states: torch.Tensor,
    state_indices: torch.Tensor,
    d: torch.Tensor | None,
    z: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None = None,
    has_initial_state: torch.Tensor | None = None,
) -> NoReturn:
    """Say which operand does not fit."""
    ragged = op == MAMBA2_PREFILL.name
    dims = 3 if ragged else 4
    rows = "num_tokens" if ragged else "num_reqs, q_len"
    if x.dim() != dims or b.dim() != dims:
        shapes = [("x", x, f"[{rows}, H, head_dim]", x.dim() == dims, None), ("b", b, f"[{rows}, G, state_dim]", False, None)]
        refuse(op, shapes)
    *lead, num_heads, head_dim = x.shape
    groups, state_dim = b.shape[-2:]
    per_head, last = [*lead, num_heads], ", last dimension contiguous"
    dtype = str(x.dtype).removeprefix("torch.")
    state = [num_heads, head_dim, state_dim]
    num_reqs = state_indices.shape[0] if state_indices.dim() == 1 else -1
    refuse(
        op,
        [
            ("x", x, f"[{rows}, H, head_dim]{last}", _packed(x), "pass x.contiguous()"),
            ("dt", dt, str(per_head), list(dt.shape) == per_head, None),
            ("a", a, f"[{num_heads}] float32", a.shape == (num_heads,) and a.dtype is _FP32, None),
            ("b", b, f"[{rows}, G, state_dim] {dtype}{last}", b.dtype is x.dtype and _packed(b), None),
            ("b", b, f"with {lead} rows, as x", list(b.shape[:-2]) == lead, None),
            ("b", b, f"with a number of groups that divides {num_heads} heads", groups > 0 and num_heads % groups == 0, None),
            ("c", c, f"like b, {list(b.shape)} {dtype}{last}", c.shape == b.shape and c.dtype is x.dtype and _packed(c), None),
            (
                "states",
                states,
                f"[num_slots, {', '.join(map(str, state))}] float32{last}",
                states.dim() == 4 and list(states.shape[1:]) == state and states.dtype is _FP32 and _packed(states),
                None,
            ),
            ("d", d, f"[{num_heads}]", d is None or d.shape == (num_heads,), None),
            (
                "z",
                z,
                f"like x, {list(x.shape)} {dtype}{last}",
                z is None or (z.shape == x.shape and z.dtype is x.dtype and _packed(z)),
                None,
            ),
            ("dt_bias", dt_bias, f"[{num_heads}]", dt_bias is None or dt_bias.shape == (num_heads,), None),
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


def _pair(dt_limit: list[float] | None) -> tuple[float, float] | None:
    return None if dt_limit is None else (dt_limit[0], dt_limit[1])


def _run_prefill(
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    states: torch.Tensor,
    state_indices: torch.Tensor,
    cu_seqlens: torch.Tensor,
    has_initial_state: torch.Tensor | None,
    d: torch.Tensor | None,
    z: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    dt_softplus: bool,
    dt_limit: list[float] | None,
    solution: str | None,
) -> torch.Tensor:
    return mamba2_prefill(
        x,
        dt,
        a,
        b,
        c,
        states,
        state_indices,
        cu_seqlens,
        has_initial_state=has_initial_state,
        d=d,
        z=z,
        dt_bias=dt_bias,
        dt_softplus=dt_softplus,
        dt_limit=_pair(dt_limit),
        solution=solution,
    )


def _run_update(
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    states: torch.Tensor,
    state_indices: torch.Tensor,
    d: torch.Tensor | None,
    z: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    dt_softplus: bool,
    dt_limit: list[float] | None,
    solution: str | None,
) -> torch.Tensor:
    limit = _pair(dt_limit)
    return selective_state_update(
        x,
        dt,
        a,
        b,
        c,
        states,
        state_indices,
        d=d,
        z=z,
        dt_bias=dt_bias,
        dt_softplus=dt_softplus,
        dt_limit=limit,
        solution=solution,
    )


def _fake(x: torch.Tensor, *others: object) -> torch.Tensor:
    return x.new_empty(x.shape)


_INPUTS: Final = "Tensor x, Tensor dt, Tensor a, Tensor b, Tensor c, Tensor(s!) states, Tensor state_indices"
_OPTIONS: Final = "Tensor? d, Tensor? z, Tensor? dt_bias, bool dt_softplus, float[]? dt_limit, str? solution"
_PREFILL_LIBRARY: Final = register_library_op(
    f"mamba2_prefill({_INPUTS}, Tensor cu_seqlens, Tensor? has_initial_state, {_OPTIONS}) -> Tensor", _run_prefill, _fake
)
_UPDATE_LIBRARY: Final = register_library_op(f"selective_state_update({_INPUTS}, {_OPTIONS}) -> Tensor", _run_update, _fake)
