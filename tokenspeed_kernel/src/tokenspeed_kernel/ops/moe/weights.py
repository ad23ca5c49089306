"""The life of a mixture-of-experts layer, second step: weights brought into the order that the plan's kernel reads."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tokenspeed_kernel.errors import ShapeError
from tokenspeed_kernel.ops.moe.experts import Experts, check_weights
from tokenspeed_kernel.ops.moe.plan import MoePlan
from tokenspeed_kernel.quantized import QuantizedTensor
from tokenspeed_kernel.signature import Format

__all__ = ["MoeWeights", "SharedExpert", "process_shared_expert", "process_weights"]

_NAME = "moe.process_weights"
_ORDERS = ("gate_up", "up_gate", "interleaved")


@dataclass(frozen=True, slots=True, eq=False)
class MoeWeights:
    """Expert weights that were processed for one plan; only `process_weights` makes them.

    Attributes:
        plan: whose `apply` takes them.
        w13: [num_experts, 2 * intermediate_size, hidden_size], the gate's rows first.
        w2: [num_experts, hidden_size, intermediate_size].
        w13_bias: [num_experts, 2 * intermediate_size], or None.
        w2_bias: [num_experts, hidden_size], or None.
    """

    plan: MoePlan
    w13: Experts
    w2: Experts
    w13_bias: torch.Tensor | None
    w2_bias: torch.Tensor | None

    @property
    def size_bytes(self) -> int:
        """Bytes of all parts together."""
        parts = [one for one in (self.w13, self.w2, self.w13_bias, self.w2_bias) if one is not None]
        return sum(one.size_bytes if isinstance(one, QuantizedTensor) else one.nbytes for one in parts)


@dataclass(frozen=True, slots=True, eq=False)
class SharedExpert:
    """An expert that every token goes through; only `process_shared_expert` makes it.

    Attributes:
        plan: whose `apply` takes it.
        w13: [2 * its intermediate size, hidden_size], the gate's rows first.
        w2: [hidden_size, its intermediate size].
        gate: [1, hidden_size], whose product with a token decides how much counts; or None.
    """

    plan: MoePlan
    w13: torch.Tensor | QuantizedTensor
    w2: torch.Tensor | QuantizedTensor
    gate: torch.Tensor | None


def process_weights(
    plan: MoePlan,
    w13: Experts,
    w2: Experts,
    *,
    w13_bias: torch.Tensor | None = None,
    w2_bias: torch.Tensor | None = None,
    order: str = "gate_up",
) -> MoeWeights:
    """Bring the weights of the experts on this rank into the order that the plan's kernel reads; once, after loading.

    Where they are in that order already, the result shares their memory; otherwise the originals may be freed.

    Args:
        plan: made for these formats.
        w13: [num_local_experts, 2 * intermediate_size, hidden_size]; a tensor of any strides, or a `QuantizedTensor`.
        w2: [num_local_experts, hidden_size, intermediate_size].
        w13_bias: [num_local_experts, 2 * intermediate_size], where the experts have biases; rows in the order of w13.
        w2_bias: [num_local_experts, hidden_size], where the experts have biases.
        order: of the rows of w13: `gate_up` and `up_gate` (one half after the other), or `interleaved` (gate, up, gate, up, ...).
    Returns:
        Weights for `apply` with this plan.
    Raises:
        ShapeError: shapes, formats, devices or biases are not those of the plan, or the rows of a format with scales of 128 rows
            cannot be reordered.
    Source: `docs/contracts/moe.md`.
    """
    _check_plan(_NAME, plan)
    if order not in _ORDERS:
        raise ShapeError(_NAME, expected=f"order in {{{', '.join(_ORDERS)}}}", got=repr(order))
    for name, stack in (("w13", w13), ("w2", w2)):
        _check_format(_NAME, name, stack, plan.weight_format, plan.device)
    config = plan.config
    sizes = check_weights(_NAME, w13, w2, w13_bias, w2_bias)
    expected = (config.local_experts, config.hidden_size, config.intermediate_size)
    if sizes != expected:
        raise ShapeError(
            _NAME,
            expected=f"{expected[0]} experts of hidden_size={expected[1]}, intermediate_size={expected[2]}, as planned",
            got=f"{sizes[0]} experts of hidden_size={sizes[1]}, intermediate_size={sizes[2]}",
            fix="pass this rank's experts, or make a plan for these sizes",
        )
    for name, bias in (("w13_bias", w13_bias), ("w2_bias", w2_bias)):
        if (bias is not None) != config.biased:
            expected_bias = f"a {name}" if config.biased else f"no {name}"
            raise ShapeError(_NAME, expected=f"{expected_bias}, as planned", got="none" if bias is None else "one")
        if bias is not None and (bias.dtype is not plan.bias_dtype or bias.device != plan.device):
            wanted_bias = f"{name} {plan.bias_dtype} on {plan.device}"
            raise ShapeError(_NAME, expected=wanted_bias, got=f"{bias.dtype} on {bias.device}")
    inner = config.intermediate_size
    first = _reordered(w13, inner, order)
    if w13_bias is not None and order != "gate_up":
        w13_bias = w13_bias.index_select(1, _row_index(inner, order, w13_bias.device))
    biases = (None if one is None else one.contiguous() for one in (w13_bias, w2_bias))
    return MoeWeights(plan, _contiguous(first), _contiguous(w2), *biases)


def process_shared_expert(
    plan: MoePlan,
    w13: torch.Tensor | QuantizedTensor,
    w2: torch.Tensor | QuantizedTensor,
    *,
    gate: torch.Tensor | None = None,
    order: str = "gate_up",
) -> SharedExpert:
    """Bring the weights of an expert that every token goes through into the order that `apply` reads.

    Args:
        plan: of the layer.
        w13: [2 * its intermediate size, hidden_size], dtype of x or a `QuantizedTensor` in any format that `gemm.mm` takes.
        w2: [hidden_size, its intermediate size]; as w13.
        gate: optional [hidden_size] or [1, hidden_size], dtype of x: the result is multiplied by `sigmoid(gate @ x)`.
        order: of the rows of w13, as in `process_weights`.
    Returns:
        The expert for `apply` with this plan. Its activation is that of the other experts.
    Raises:
        ShapeError: shapes, dtypes or devices disagree.
    Source: Dai et al., DeepSeekMoE, arXiv:2401.06066, section 3.2; the gate: Qwen, Qwen1.5-MoE (2024).
    """
    op = "moe.process_shared_expert"
    _check_plan(op, plan)
    if order not in _ORDERS:
        raise ShapeError(op, expected=f"order in {{{', '.join(_ORDERS)}}}", got=repr(order))
    hidden = plan.config.hidden_size
    first, second = tuple(w13.shape), tuple(w2.shape)
    if len(first) != 2 or len(second) != 2 or first != (2 * second[1], hidden) or second[0] != hidden:
        raise ShapeError(
            op, expected=f"w13 [2 * inner, {hidden}] and w2 [{hidden}, inner]", got=f"w13 {list(first)} and w2 {list(second)}"
        )
    for name, part in (("w13", w13), ("w2", w2), ("gate", gate)):
        wrong_dtype = isinstance(part, torch.Tensor) and part.dtype is not plan.x_dtype
        if part is not None and (part.device != plan.device or wrong_dtype):
            got = f"{part.dtype if isinstance(part, torch.Tensor) else part.format} on {part.device}"
            raise ShapeError(op, expected=f"{name} {plan.x_dtype} or quantized, on {plan.device}", got=got)
    if gate is not None:
        if gate.numel() != hidden:
            raise ShapeError(op, expected=f"gate [1, {hidden}]", got=f"{list(gate.shape)}")
        gate = gate.reshape(1, hidden).contiguous()
    return SharedExpert(plan, _contiguous(_reordered(w13, second[1], order)), _contiguous(w2), gate)


def _check_plan(op: str, plan: MoePlan) -> None:
    if not isinstance(plan, MoePlan):
        raise ShapeError(op, expected="a MoePlan", got=type(plan).__name__, fix="make one with moe.plan")


def _check_format(op: str, name: str, stack: Experts, wanted: Format, device: torch.device) -> None:
    if not isinstance(stack, torch.Tensor | QuantizedTensor):
        raise ShapeError(op, expected=f"{name} as a tensor or a QuantizedTensor", got=type(stack).__name__)
    got = stack.format if isinstance(stack, QuantizedTensor) else Format.of(stack.dtype)
    if got != wanted or stack.device != device:
        raise ShapeError(
            op,
            expected=f"{name} in {wanted} on {device}, as planned",
            got=f"{got} on {stack.device}",
            fix="convert the weights, or make a plan for this format and device",
        )


def _row_index(inner: int, order: str, device: torch.device) -> torch.Tensor:
    """Row of the original for each row, gate first."""
    places = torch.arange(2 * inner, device=device)
    return places.view(inner, 2).t().reshape(-1) if order == "interleaved" else places.roll(inner)


def _reordered(stack: Experts, inner: int, order: str) -> Experts:
    if order == "gate_up":
        return stack
    index = _row_index(inner, order, stack.device)
    if isinstance(stack, torch.Tensor):
        return stack.index_select(stack.dim() - 2, index)
    block = max(stack.format.block[0], 1)
    scale, zero = stack.scale, stack.zero_point
    if scale is not None and stack.format.scale != "tensor":
        if block > 1 and (order == "interleaved" or inner % block):
            raise ShapeError(
                _NAME,
                expected=f"{stack.format} with the gate's rows first, or halves of a multiple of {block} rows",
                got=f"order={order!r}, intermediate_size={inner}",
                fix="reorder the rows before quantizing",
            )
        blocks = _row_index(inner // block, order, stack.device) if block > 1 else index
        scale = scale.index_select(scale.dim() - 2, blocks)
    if zero is not None:
        zero = zero.index_select(zero.dim() - 2, index)
    # Bytes, because not every dtype of 8 bits can be indexed.
    data = stack.data.view(torch.uint8).index_select(stack.data.dim() - 2, index).view(stack.data.dtype)
    return QuantizedTensor(data, stack.format, stack.shape, scale, stack.global_scale, zero)


def _contiguous(stack: Experts) -> Experts:
    if isinstance(stack, torch.Tensor):
        return stack.contiguous()
    if all(part.is_contiguous() for part in stack.parts):
        return stack
    parts = (stack.scale, stack.global_scale, stack.zero_point)
    scale, total, zero = (None if part is None else part.contiguous() for part in parts)
    return QuantizedTensor(stack.data.contiguous(), stack.format, stack.shape, scale, total, zero)

