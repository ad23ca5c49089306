"""Public ops of the causal convolution over time."""

from __future__ import annotations

from typing import Final, NoReturn

import torch
from torch.compiler import is_compiling

from tokenspeed_kernel.dispatch import NEW_CALL, BoundOp, Kernel, check_devices, register_library_op
from tokenspeed_kernel.errors import ShapeError
from tokenspeed_kernel.ops.linear_attention.check import check_out, refuse
from tokenspeed_kernel.ops.linear_attention.contract import CAUSAL_CONV1D_PREFILL, CAUSAL_CONV1D_UPDATE
from tokenspeed_kernel.ops.operands import OPERAND_ERRORS, refuse_kinds

__all__ = ["causal_conv1d_prefill", "causal_conv1d_update"]

_PREFILL: Final = BoundOp(CAUSAL_CONV1D_PREFILL)
_UPDATE: Final = BoundOp(CAUSAL_CONV1D_UPDATE)
_PREFILL_SEEN: Final = _PREFILL.seen
_UPDATE_SEEN: Final = _UPDATE.seen
_PREFILL_NAME: Final = CAUSAL_CONV1D_PREFILL.name
_UPDATE_NAME: Final = CAUSAL_CONV1D_UPDATE.name
_INTS: Final = (torch.int64, torch.int32)


def causal_conv1d_prefill(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    states: torch.Tensor,
    state_indices: torch.Tensor,
    cu_seqlens: torch.Tensor,
    *,
    has_initial_state: torch.Tensor | None = None,
    activation: str | None = None,
    out: torch.Tensor | None = None,
    solution: str | None = None,
) -> torch.Tensor:
    """Convolve each channel over its request's time, each output seeing its own input and the width - 1 before it.

    out[t, c] = activation(bias[c] + sum over j < width of weight[c, j] x[t - (width - 1) + j, c]). Inputs before the request's
    first token come from its state, which afterwards holds the last width - 1 inputs, the oldest first.

    Args:
        x: [num_tokens, num_channels] fp32, fp16 or bf16, last dimension contiguous.
        weight: [num_channels, width] fp32 or x's dtype, any strides; the last tap is the newest input's.
        bias: optional [num_channels] of weight's dtype.
        states: [num_slots, num_channels, width - 1] fp32 or x's dtype, any strides; the requests' slots are written in place.
        state_indices: [num_reqs] int32 or int64, slot of each request, no valid one twice. A request whose slot is outside the pool
            (-1, say) is ignored: its rows of the output are 0.
        cu_seqlens: [num_reqs + 1] int32, request r's tokens are rows [cu[r], cu[r + 1]); from 0 to num_tokens. A request without
            tokens keeps its state.
        has_initial_state: [num_reqs] bool; where False the request starts from zeros, and its slot is not read. None: all True.
        activation: None or "silu".
        out: optional, like x, last dimension contiguous, written in place; it must not overlap an input.
        solution: solution or kernel to use instead of the best that qualifies.
    Returns:
        out, or a new tensor of x's shape and dtype.
    Raises:
        ShapeError: shapes, dtypes, strides or the activation do not fit.  NoKernelError: nothing qualifies.
    Source: Mamba, arXiv:2312.00752, section 3.4 (the convolution before the state space).
    """
    if is_compiling():
        inputs = (x, weight, bias, states, state_indices, cu_seqlens, has_initial_state)
        result: torch.Tensor = _PREFILL_LIBRARY(*inputs, activation, solution)
        return result if out is None else out.copy_(result)
    try:
        operands: tuple[torch.Tensor, ...] = (x, weight, states, state_indices, cu_seqlens)
        if bias is not None:
            operands += (bias,)
        if has_initial_state is not None:
            operands += (has_initial_state,)
        if out is not None:
            operands += (out,)
        key = (x.shape, bias is None, has_initial_state is None, out is None, activation, solution)
        looks_same, kernel = _PREFILL_SEEN.get(key, NEW_CALL)
        if not looks_same(*operands):
            kernel = _bind_prefill(x, weight, bias, states, state_indices, cu_seqlens, has_initial_state, activation, out, solution)
            _PREFILL.remember(key, kernel, *operands)
        computed: torch.Tensor = kernel(x, weight, bias, states, state_indices, cu_seqlens, has_initial_state, activation, out)
        return computed
    except OPERAND_ERRORS as error:
        refuse_kinds(causal_conv1d_prefill, locals(), error)
        raise


def causal_conv1d_update(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    states: torch.Tensor,
    state_indices: torch.Tensor,
    *,
    activation: str | None = None,
    out: torch.Tensor | None = None,
    solution: str | None = None,
) -> torch.Tensor:
    """Convolve each request's newest tokens, one or a few; see `causal_conv1d_prefill`.

    Args:
        x: [num_reqs, q_len, num_channels] fp32, fp16 or bf16, last dimension contiguous.
        weight: [num_channels, width] fp32 or x's dtype, any strides; the last tap is the newest input's.
        bias: optional [num_channels] of weight's dtype.
        states: [num_slots, num_channels, width - 1] fp32 or x's dtype, any strides; the requests' slots are written in place.
        state_indices: [num_reqs] int32 or int64, slot of each request, no valid one twice. A request whose slot is outside the pool
            (-1, say) is ignored: its rows of the output are 0.
        activation: None or "silu".
        out: optional, like x, last dimension contiguous, written in place; it must not overlap an input.
        solution: solution or kernel to use instead of the best that qualifies.
    Returns:
        out, or a new tensor of x's shape and dtype.
    Raises:
        ShapeError: shapes, dtypes, strides or the activation do not fit.  NoKernelError: nothing qualifies.
    Source: Mamba, arXiv:2312.00752, section 3.4 (the convolution before the state space).
    """
    if is_compiling():
        result: torch.Tensor = _UPDATE_LIBRARY(x, weight, bias, states, state_indices, activation, solution)
        return result if out is None else out.copy_(result)
    try:
        operands: tuple[torch.Tensor, ...] = (x, weight, states, state_indices)
        if bias is not None:
            operands += (bias,)
        if out is not None:
            operands += (out,)
        key = (x.shape, bias is None, out is None, activation, solution)
        looks_same, kernel = _UPDATE_SEEN.get(key, NEW_CALL)
        if not looks_same(*operands):
            kernel = _bind_update(x, weight, bias, states, state_indices, activation, out, solution)
            _UPDATE.remember(key, kernel, *operands)
        computed: torch.Tensor = kernel(x, weight, bias, states, state_indices, activation, out)
        return computed
    except OPERAND_ERRORS as error:
        refuse_kinds(causal_conv1d_update, locals(), error)
        raise


def _bind_prefill(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    states: torch.Tensor,
    state_indices: torch.Tensor,
    cu_seqlens: torch.Tensor,
    has_initial_state: torch.Tensor | None,
    activation: str | None,
    out: torch.Tensor | None,
    solution: str | None,
) -> Kernel:
    """Check every operand, and return the kernel."""
    op = _PREFILL_NAME
    try:
        _, channels = x.shape
        num_channels, width = weight.shape
        _, state_channels, places = states.shape
        (num_reqs,) = state_indices.shape
    except ValueError:
        _refuse(op, x, weight, bias, states, state_indices, cu_seqlens, has_initial_state)
    if (
        channels != num_channels
        or state_channels != num_channels
        or places != width - 1
        or (bias is not None and bias.shape != (num_channels,))
        or (not x.is_contiguous() and x.stride()[1] != 1)
        or state_indices.dtype not in _INTS
        or cu_seqlens.shape != (num_reqs + 1,)
        or cu_seqlens.dtype is not torch.int32
        or (has_initial_state is not None and (has_initial_state.shape != (num_reqs,) or has_initial_state.dtype is not torch.bool))
    ):
        _refuse(op, x, weight, bias, states, state_indices, cu_seqlens, has_initial_state)
    if activation is not None and activation != "silu":
        _refuse_activation(op, activation)
    if out is not None:
        check_out(op, x, out)
    dtype, weight_dtype, states_dtype = x.dtype, weight.dtype, states.dtype
    device = x.device
    dtypes = (dtype, weight_dtype, None if bias is None else bias.dtype, states_dtype)
    operands = {"weight": weight, "bias": bias, "states": states, "state_indices": state_indices, "cu_seqlens": cu_seqlens}
    check_devices(op, device, **operands, has_initial_state=has_initial_state)
    return _PREFILL.kernel(device, dtypes, (width,), solution)


def _bind_update(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    states: torch.Tensor,
    state_indices: torch.Tensor,
    activation: str | None,
    out: torch.Tensor | None,
    solution: str | None,
) -> Kernel:
    """Check every operand, and return the kernel."""
    op = _UPDATE_NAME
    try:
        num_reqs, _, channels = x.shape
        num_channels, width = weight.shape
        _, state_channels, places = states.shape
    except ValueError:
        _refuse(op, x, weight, bias, states, state_indices)
    if (
        channels != num_channels
        or state_channels != num_channels
        or places != width - 1
        or (bias is not None and bias.shape != (num_channels,))
        or state_indices.shape != (num_reqs,)
        or (not x.is_contiguous() and x.stride()[2] != 1)
        or state_indices.dtype not in _INTS
    ):
        _refuse(op, x, weight, bias, states, state_indices)
    if activation is not None and activation != "silu":
        _refuse_activation(op, activation)
    if out is not None:
        check_out(op, x, out)
    dtype, weight_dtype, states_dtype = x.dtype, weight.dtype, states.dtype
    device = x.device
    dtypes = (dtype, weight_dtype, None if bias is None else bias.dtype, states_dtype)
    check_devices(op, device, weight=weight, bias=bias, states=states, state_indices=state_indices)
    return _UPDATE.kernel(device, dtypes, (width,), solution)


def _refuse_activation(op: str, activation: str) -> NoReturn:
    raise ShapeError(op, expected='activation None or "silu"', got=repr(activation), fix="apply another activation afterwards")


def _refuse(
    op: str,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    states: torch.Tensor,
    state_indices: torch.Tensor,
    cu_seqlens: torch.Tensor | None = None,
    has_initial_state: torch.Tensor | None = None,
) -> NoReturn:
    """Say which operand does not fit."""
    ragged = op == CAUSAL_CONV1D_PREFILL.name
    rows = "num_tokens" if ragged else "num_reqs, q_len"
    shape_fits = x.dim() == (2 if ragged else 3)
    if not shape_fits or weight.dim() != 2:
        expected = f"[{rows}, num_channels]"
        refuse(op, [("x", x, expected, shape_fits, None), ("weight", weight, "[num_channels, width]", False, None)])
    num_channels, width = weight.shape
    num_reqs = state_indices.shape[0] if state_indices.dim() == 1 else -1
    state = (num_channels, width - 1)
    refuse(
        op,
        [
            ("weight", weight, "[num_channels, width], width at least 1", width > 0, None),
            ("x", x, f"[{rows}, {num_channels}], as many channels as weight", x.shape[-1] == num_channels, None),
            ("x", x, "with its last dimension contiguous", x.stride(-1) == 1 or x.is_contiguous(), "pass x.contiguous()"),
            ("bias", bias, f"[{num_channels}]", bias is None or bias.shape == (num_channels,), None),
            ("states", states, f"[num_slots, {state[0]}, {state[1]}]", states.dim() == 3 and states.shape[1:] == state, None),
            (
                "state_indices",
                state_indices,
                f"[{'num_reqs' if ragged else x.shape[0]}] int32 or int64",
                state_indices.dim() == 1 and (ragged or num_reqs == x.shape[0]) and state_indices.dtype in _INTS,
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
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    states: torch.Tensor,
    state_indices: torch.Tensor,
    cu_seqlens: torch.Tensor,
    has_initial_state: torch.Tensor | None,
    activation: str | None,
    solution: str | None,
) -> torch.Tensor:
    return causal_conv1d_prefill(
        x,
        weight,
        bias,
        states,
        state_indices,
        cu_seqlens,
        has_initial_state=has_initial_state,
        activation=activation,
        solution=solution,
    )


def _run_update(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    states: torch.Tensor,
    state_indices: torch.Tensor,
    activation: str | None,
    solution: str | None,
) -> torch.Tensor:
    return causal_conv1d_update(x, weight, bias, states, state_indices, activation=activation, solution=solution)


def _fake(x: torch.Tensor, *others: object) -> torch.Tensor:
    return x.new_empty(x.shape)


_INPUTS: Final = "Tensor x, Tensor weight, Tensor? bias, Tensor(a!) states, Tensor state_indices"
_PREFILL_LIBRARY: Final = register_library_op(
    f"causal_conv1d_prefill({_INPUTS}, Tensor cu_seqlens, Tensor? has_initial_state, str? activation, str? solution) -> Tensor",
    _run_prefill,
    _fake,
)
_UPDATE_LIBRARY: Final = register_library_op(
    f"causal_conv1d_update({_INPUTS}, str? activation, str? solution) -> Tensor", _run_update, _fake
)
