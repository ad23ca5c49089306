"""`fused_experts`: every token through its experts, as one op over weights as they are."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.compiler import is_compiling

from tokenspeed_kernel.dispatch import NEW_CALL, BoundOp, Kernel, check_devices, register_library_op
from tokenspeed_kernel.errors import ShapeError
from tokenspeed_kernel.ops.moe.contract import ACTIVATION_FORMATS, FUSED_EXPERTS
from tokenspeed_kernel.ops.moe.gate import GatedActivation
from tokenspeed_kernel.ops.operands import OPERAND_ERRORS, check_operands, refuse_kinds, tensor_error
from tokenspeed_kernel.quantized import QuantizedTensor
from tokenspeed_kernel.signature import Format
from tokenspeed_kernel.traits import TraitValue

__all__ = [
    "Experts",
    "check_activation_format",
    "check_call",
    "check_weights",
    "expert_traits",
    "format_of",
    "fused_experts",
    "library_fused_experts",
]

Experts = torch.Tensor | QuantizedTensor
"""Matrices of all experts that lie here: [num_experts, rows, columns]."""

_NAME = FUSED_EXPERTS.name
_op = BoundOp(FUSED_EXPERTS)
_table = _op.table
_PLAIN_GATE = GatedActivation()


def fused_experts(
    x: torch.Tensor,
    w13: Experts,
    w2: Experts,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    *,
    w13_bias: torch.Tensor | None = None,
    w2_bias: torch.Tensor | None = None,
    activation: GatedActivation | None = None,
    activation_format: str | None = None,
    first_expert: int = 0,
    addend: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    solution: str | None = None,
) -> torch.Tensor:
    """Send each token through its experts: `sum over s of topk_weights[t, s] * w2[e] @ gated(w13[e] @ x[t])`, e = topk_ids[t, s].

    Pairs whose id is outside [first_expert, first_expert + num_experts), such as -1 or an expert of another rank, add nothing: a
    token without any expert here gets 0, or its addend. The gated values between the products are rounded to x's dtype; sums are
    float32. `plan`, `process_weights` and `apply` do the same for weights that are kept: they check and choose once.

    Args:
        x: [num_tokens, hidden_size] fp32, bf16 or fp16, any strides.
        w13: [num_experts, 2 * intermediate_size, hidden_size], the rows of the gate first, then those of up: dtype of x, any
            strides, or a `QuantizedTensor`.
        w2: [num_experts, hidden_size, intermediate_size]; as w13.
        topk_ids: [num_tokens, top_k] int32; global ids.
        topk_weights: [num_tokens, top_k] fp32.
        w13_bias: optional [num_experts, 2 * intermediate_size], dtype of x or fp32.
        w2_bias: optional [num_experts, hidden_size], dtype of x or fp32; weighted with the expert's result.
        activation: gate; SwiGLU without clamp where left out.
        activation_format: format to which tokens and gated values are rounded before each product, as `quantize` does, so that fp8
            numbers are multiplied: `fp8_e4m3@token` with weights in fp8_e4m3 with scales of a `tensor` or `channel`,
            `fp8_e4m3@block_1x128` with `block_128x128`. Left out, they stay as they are.
        first_expert: id of w13's first expert.
        addend: optional [num_tokens, hidden_size], dtype of x, added before rounding: the output of a shared expert.
        out: optional [num_tokens, hidden_size], dtype of x, written in place; it must not overlap x, but may be addend.
        solution: solution or kernel to insist on; chosen by the registry where left out.
    Returns:
        out, or a new contiguous [num_tokens, hidden_size], dtype of x.
    Raises:
        ShapeError: shapes, dtypes or formats disagree.  NoKernelError: nothing qualifies.
    Source: Shazeer et al., Outrageously Large Neural Networks, arXiv:1701.06538, equation 1; gated experts: Shazeer, GLU Variants
        Improve Transformer, arXiv:2002.05202, equation 6; rows in fp8: DeepSeek-V3, arXiv:2412.19437, section 3.3.2.
    """
    gate = activation or _PLAIN_GATE
    if is_compiling():
        result = library_fused_experts(
            x, w13, w2, topk_ids, topk_weights, w13_bias, w2_bias, gate, first_expert, addend, solution, activation_format
        )
        return result if out is None else out.copy_(result)
    try:
        return _run_fused_experts(
            x, w13, w2, topk_ids, topk_weights, w13_bias, w2_bias, gate, first_expert, addend, solution, out, activation_format
        )
    except OPERAND_ERRORS as error:
        refuse_kinds(fused_experts, locals(), error)
        raise


def format_of(stack: Experts) -> Format | torch.dtype:
    """Return what selection is told about a stack of matrices."""
    return stack.dtype if isinstance(stack, torch.Tensor) else stack.format


def expert_traits(
    gate: GatedActivation, biased: bool, activation_format: str | None, num_experts: int, top_k: int, hidden: int, inner: int
) -> tuple[TraitValue, ...]:
    """Values of the contract's traits, in its order."""
    return gate.kind, gate.clamped, biased, activation_format or "none", num_experts, top_k, hidden, inner


def check_activation_format(op: str, activation_format: str | None, weight: Format) -> None:
    """Check that rows of one format can be multiplied by weights of another.

    Raises:
        ShapeError: they do not go together, or the format of the rows is not known.
    """
    if activation_format is None or str(weight) in ACTIVATION_FORMATS.get(activation_format, ()):
        return
    pairs = "; ".join(f"{rows} with weights in {' or '.join(weights)}" for rows, weights in ACTIVATION_FORMATS.items())
    got = f"{activation_format!r} with weights in {weight}"
    raise ShapeError(op, expected=f"activation_format: {pairs}", got=got, fix="leave it out to multiply rows as they are")


def check_weights(
    op: str,
    w13: Experts,
    w2: Experts,
    w13_bias: torch.Tensor | None,
    w2_bias: torch.Tensor | None,
) -> tuple[int, int, int]:
    """Return (num_experts, hidden_size, intermediate_size).

    Raises:
        ShapeError: the shapes disagree.
    """
    first, second = w13.shape, w2.shape
    if len(first) != 3 or len(second) != 3 or first != (second[0], 2 * second[2], second[1]):
        raise ShapeError(
            op,
            expected="w13 [num_experts, 2 * intermediate_size, hidden_size] and w2 [num_experts, hidden_size, intermediate_size]",
            got=f"w13 {list(first)} and w2 {list(second)}",
            fix="stack the experts; weights stored as [.., in, out] need .transpose(1, 2)",
        )
    if 0 in second:
        raise ShapeError(op, expected="experts, hidden_size and intermediate_size of at least 1", got=f"w2 {list(second)}")
    for name, bias, wanted in (("w13_bias", w13_bias, first[:2]), ("w2_bias", w2_bias, second[:2])):
        if bias is not None and bias.shape != wanted:
            raise ShapeError(op, expected=f"{name} {list(wanted)}", got=f"{list(bias.shape)}")
    return second[0], second[1], second[2]


def check_call(
    op: str,
    x: torch.Tensor,
    hidden: int,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    addend: torch.Tensor | None,
    out: torch.Tensor | None,
) -> None:
    """Check what changes from call to call.

    Raises:
        ShapeError: the shapes disagree.
    """
    shape, ids_shape = x.shape, topk_ids.shape
    if len(shape) != 2 or shape[1] != hidden:
        raise ShapeError(op, expected=f"x [num_tokens, {hidden}]", got=f"{list(shape)}")
    if len(ids_shape) != 2 or ids_shape[0] != shape[0] or topk_weights.shape != ids_shape:
        raise ShapeError(
            op,
            expected=f"topk_ids and topk_weights [{shape[0]}, top_k]",
            got=f"{list(ids_shape)} and {list(topk_weights.shape)}",
        )
    if addend is not None and addend.shape != shape:
        raise ShapeError(op, expected=f"addend {list(shape)}", got=f"{list(addend.shape)}")
    if out is not None and out.shape != shape:
        raise ShapeError(op, expected=f"out {list(shape)}", got=f"{list(out.shape)}")


def check_dtypes(
    op: str,
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    addend: torch.Tensor | None,
    out: torch.Tensor | None,
) -> None:
    """Only when a kernel is bound: these dtypes and devices are in the table's key.

    Raises:
        ShapeError: an operand has another dtype, or lies on another device.
    """
    for name, operand, dtype in (
        ("topk_ids", topk_ids, torch.int32),
        ("topk_weights", topk_weights, torch.float32),
        ("addend", addend, x.dtype),
        ("out", out, x.dtype),
    ):
        if operand is not None and operand.dtype is not dtype:
            raise ShapeError(op, expected=f"{name} {dtype}", got=f"{operand.dtype}", fix=f"pass {name}.to({dtype})")
    check_devices(op, x.device, topk_ids=topk_ids, topk_weights=topk_weights, addend=addend, out=out)


# The library op's implementation: a compiled graph calls it at run time, when nothing is being compiled any more.
def _run_fused_experts(
    x: torch.Tensor,
    w13: Experts,
    w2: Experts,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    w13_bias: torch.Tensor | None,
    w2_bias: torch.Tensor | None,
    gate: GatedActivation,
    first_expert: int,
    addend: torch.Tensor | None,
    solution: str | None,
    out: torch.Tensor | None,
    activation_format: str | None = None,
) -> torch.Tensor:
    if type(w13) is QuantizedTensor or type(w2) is QuantizedTensor:
        kernel = _kernel(x, w13, w2, topk_ids, topk_weights, w13_bias, w2_bias, gate, addend, solution, out, activation_format)
    else:
        operands: tuple[Any, ...] = (x, w13, w2, topk_ids, topk_weights)
        if w13_bias is not None:
            operands += (w13_bias,)
        if w2_bias is not None:
            operands += (w2_bias,)
        if addend is not None:
            operands += (addend,)
        if out is not None:
            operands += (out,)
        kind = None if gate is _PLAIN_GATE else (gate.kind, gate.clamped)
        given = (w13_bias is None, w2_bias is None, addend is None, out is None)
        key = (x.shape, w13.shape, given, kind, activation_format, solution)
        looks_same, kernel = _op.seen.get(key, NEW_CALL)
        if not looks_same(*operands):
            kernel = _kernel(x, w13, w2, topk_ids, topk_weights, w13_bias, w2_bias, gate, addend, solution, out, activation_format)
            _op.remember(key, kernel, *operands)
    result: torch.Tensor = kernel(
        x,
        w13,
        w2,
        topk_ids,
        topk_weights,
        w13_bias=w13_bias,
        w2_bias=w2_bias,
        activation=gate,
        activation_format=activation_format,
        first_expert=first_expert,
        addend=addend,
        out=out,
    )
    return result


def _kernel(
    x: torch.Tensor,
    w13: Experts,
    w2: Experts,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    w13_bias: torch.Tensor | None,
    w2_bias: torch.Tensor | None,
    gate: GatedActivation,
    addend: torch.Tensor | None,
    solution: str | None,
    out: torch.Tensor | None,
    activation_format: str | None,
) -> Kernel:
    """Check the operands, and return the kernel; of quantized weights only what changes from call to call is checked again."""
    try:
        shape, ids_shape, shares, first, second = x.shape, topk_ids.shape, topk_weights.shape, w13.shape, w2.shape
    except AttributeError:
        raise tensor_error(_NAME, x=x, w13=w13, w2=w2, topk_ids=topk_ids, topk_weights=topk_weights) from None
    if len(shape) != 2 or len(ids_shape) != 2 or ids_shape[0] != shape[0] or shares != ids_shape:
        check_call(_NAME, x, x.shape[-1] if shape else 0, topk_ids, topk_weights, None, None)
    if addend is not None and addend.shape != shape:
        raise ShapeError(_NAME, expected=f"addend {list(shape)}", got=f"{list(addend.shape)}")
    if out is not None and out.shape != shape:
        raise ShapeError(_NAME, expected=f"out {list(shape)}", got=f"{list(out.shape)}")
    device = x.device
    # What is in the key was checked when it was entered: all shapes but the number of tokens.
    key = (
        device,
        x.dtype,
        shape[1],
        ids_shape[1],
        first,
        second,
        _hashed_format(w13),
        _hashed_format(w2),
        w13.device,
        w2.device,
        topk_ids.dtype,
        topk_weights.dtype,
        topk_ids.device,
        topk_weights.device,
        None if w13_bias is None else (w13_bias.shape, w13_bias.dtype, w13_bias.device),
        None if w2_bias is None else (w2_bias.shape, w2_bias.dtype, w2_bias.device),
        None if addend is None else (addend.dtype, addend.device),
        None if out is None else (out.dtype, out.device),
        gate.kind,
        gate.clamped,
        activation_format,
        solution,
    )
    kernel = _table.get(key)
    if kernel is None:
        others = {"w13_bias": w13_bias, "w2_bias": w2_bias, "addend": addend, "out": out}
        check_operands(_NAME, x=x, w13=w13, w2=w2, topk_ids=topk_ids, topk_weights=topk_weights, **others)
        num_experts, hidden, inner = check_weights(_NAME, w13, w2, w13_bias, w2_bias)
        check_call(_NAME, x, hidden, topk_ids, topk_weights, addend, out)
        check_dtypes(_NAME, x, topk_ids, topk_weights, addend, out)
        parts = {"w13": _data(w13), "w2": _data(w2), "w13_bias": w13_bias, "w2_bias": w2_bias}
        check_devices(_NAME, device, **parts)
        for stack in (w13, w2):
            stored = stack.format if isinstance(stack, QuantizedTensor) else Format.of(stack.dtype)
            check_activation_format(_NAME, activation_format, stored)
        dtypes = (
            x.dtype,
            format_of(w13),
            format_of(w2),
            None if w13_bias is None else w13_bias.dtype,
            None if w2_bias is None else w2_bias.dtype,
            None if addend is None else addend.dtype,
        )
        biased = w13_bias is not None or w2_bias is not None
        traits = expert_traits(gate, biased, activation_format, num_experts, ids_shape[1], hidden, inner)
        kernel = _op.bind(key, device, dtypes, traits, solution)
    return kernel


def _hashed_format(stack: Experts) -> object:
    """A format hashes slowly; its two names, which say the same, do not."""
    return (stack.format.logical, stack.format.scale) if type(stack) is QuantizedTensor else format_of(stack)


def _data(stack: Experts) -> torch.Tensor:
    return stack.data if isinstance(stack, QuantizedTensor) else stack


_Parts = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, str, list[int]]


def _taken_apart(stack: Experts) -> _Parts:
    """What the library op takes for a stack; a plain tensor has no format."""
    if isinstance(stack, torch.Tensor):
        return stack, None, None, None, "", []
    return stack.data, stack.scale, stack.global_scale, stack.zero_point, str(stack.format), list(stack.shape)


def library_fused_experts(
    x: torch.Tensor,
    w13: Experts,
    w2: Experts,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    w13_bias: torch.Tensor | None,
    w2_bias: torch.Tensor | None,
    gate: GatedActivation,
    first_expert: int,
    addend: torch.Tensor | None,
    solution: str | None,
    activation_format: str | None = None,
) -> torch.Tensor:
    """Enter the op's form in `torch.library`, while compiling or exporting."""
    result: torch.Tensor = _library(
        x, *_taken_apart(w13), *_taken_apart(w2), topk_ids, topk_weights, w13_bias, w2_bias,
        gate.kind, None if gate.limit == math.inf else gate.limit, gate.alpha, gate.up_offset, first_expert, addend, solution,
        activation_format,
    )  # fmt: skip
    return result


def _run_library(
    x: torch.Tensor,
    w13: torch.Tensor,
    w13_scale: torch.Tensor | None,
    w13_global_scale: torch.Tensor | None,
    w13_zero_point: torch.Tensor | None,
    w13_format: str,
    w13_shape: list[int],
    w2: torch.Tensor,
    w2_scale: torch.Tensor | None,
    w2_global_scale: torch.Tensor | None,
    w2_zero_point: torch.Tensor | None,
    w2_format: str,
    w2_shape: list[int],
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    w13_bias: torch.Tensor | None = None,
    w2_bias: torch.Tensor | None = None,
    activation: str = "swiglu",
    limit: float | None = None,
    alpha: float = 1.0,
    up_offset: float = 0.0,
    first_expert: int = 0,
    addend: torch.Tensor | None = None,
    solution: str | None = None,
    activation_format: str | None = None,
) -> torch.Tensor:
    first: Experts = w13
    if w13_format:
        first = QuantizedTensor(w13, w13_format, tuple(w13_shape), w13_scale, w13_global_scale, w13_zero_point)  # type: ignore[arg-type]
    second: Experts = w2
    if w2_format:
        second = QuantizedTensor(w2, w2_format, tuple(w2_shape), w2_scale, w2_global_scale, w2_zero_point)  # type: ignore[arg-type]
    gate = GatedActivation(activation, math.inf if limit is None else limit, alpha, up_offset)
    arguments = (topk_ids, topk_weights, w13_bias, w2_bias, gate, first_expert, addend, solution, None, activation_format)
    return _run_fused_experts(x, first, second, *arguments)


def _fake(x: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
    return x.new_empty(x.shape)


_STACK = "Tensor {0}, Tensor? {0}_scale, Tensor? {0}_global_scale, Tensor? {0}_zero_point, str {0}_format, SymInt[] {0}_shape"
_library = register_library_op(
    f"fused_experts(Tensor x, {_STACK.format('w13')}, {_STACK.format('w2')}, Tensor topk_ids, Tensor topk_weights, "
    'Tensor? w13_bias=None, Tensor? w2_bias=None, str activation="swiglu", float? limit=None, float alpha=1.0, '
    "float up_offset=0.0, int first_expert=0, Tensor? addend=None, str? solution=None, "
    "str? activation_format=None) -> Tensor",
    _run_library,
    _fake,
)
