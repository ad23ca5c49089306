"""The life of a mixture-of-experts layer, last step: a batch through the experts."""

from __future__ import annotations

import torch
from torch.compiler import is_compiling

from tokenspeed_kernel.errors import ShapeError
from tokenspeed_kernel.ops.activation import gelu_and_mul, silu_and_mul, swiglu_clamped
from tokenspeed_kernel.ops.gemm import mm
from tokenspeed_kernel.ops.moe.experts import check_call, check_dtypes, library_fused_experts
from tokenspeed_kernel.ops.moe.gate import GatedActivation
from tokenspeed_kernel.ops.moe.plan import MoePlan
from tokenspeed_kernel.ops.moe.weights import MoeWeights, SharedExpert
from tokenspeed_kernel.ops.operands import tensor_error

__all__ = ["apply"]

_NAME = "moe.apply"


def apply(
    plan: MoePlan,
    weights: MoeWeights,
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    shared_expert: SharedExpert | torch.Tensor | None = None,
) -> torch.Tensor:
    """Send each token through its experts, as `fused_experts` does, with the plan's kernel.

    Args:
        plan: of the layer.
        weights: that `process_weights` made for this plan.
        x: [num_tokens, hidden_size], the plan's x_dtype, any strides.
        topk_ids: [num_tokens, top_k] int32; ids outside the plan's range of experts, such as -1, add nothing.
        topk_weights: [num_tokens, top_k] fp32.
        out: optional [num_tokens, hidden_size], dtype of x, written in place; it must not overlap x.
        shared_expert: added before the result is rounded: what `process_shared_expert` made for this plan, or its result,
            [num_tokens, hidden_size] in dtype of x, where it was computed elsewhere (on a stream of its own).
    Returns:
        out, or a new contiguous [num_tokens, hidden_size], dtype of x.
    Raises:
        ShapeError: weights that were not processed, or for another plan; shapes, dtypes or devices that are not the plan's.
    Source: `docs/contracts/moe.md`.
    """
    if not isinstance(weights, MoeWeights) or weights.plan is not plan:
        raise _weights_error(plan, "weights", weights, "moe.process_weights(plan, w13, w2, ...)")
    try:
        config, device, shape, ids_shape, shares = plan.config, plan.device, x.shape, topk_ids.shape, topk_weights.shape
    except AttributeError:
        raise tensor_error(_NAME, x=x, topk_ids=topk_ids, topk_weights=topk_weights) from None
    # One test on the way through; what it is that does not fit is found out afterwards.
    if (
        len(shape) != 2
        or shape[1] != config.hidden_size
        or ids_shape != (shape[0], config.top_k)
        or shares != ids_shape
        or x.dtype is not plan.x_dtype
        or topk_ids.dtype is not torch.int32
        or topk_weights.dtype is not torch.float32
        or x.device != device
        or topk_ids.device != device
        or topk_weights.device != device
        or (out is not None and (out.shape != shape or out.dtype is not x.dtype or out.device != device))
    ):
        _refuse(plan, x, topk_ids, topk_weights, out)
    addend: torch.Tensor | None = None
    if isinstance(shared_expert, SharedExpert):
        if shared_expert.plan is not plan:
            raise _weights_error(plan, "shared_expert", shared_expert, "moe.process_shared_expert(plan, w13, w2, ...)")
        addend = _shared(shared_expert, x, config.activation)
    elif shared_expert is not None:
        if shared_expert.shape != x.shape or shared_expert.dtype is not x.dtype or shared_expert.device != x.device:
            raise ShapeError(
                _NAME,
                expected=f"shared_expert's result {list(x.shape)} {x.dtype} on {x.device}",
                got=f"{list(shared_expert.shape)} {shared_expert.dtype} on {shared_expert.device}",
            )
        addend = shared_expert
    if is_compiling():
        operands = (x, weights.w13, weights.w2, topk_ids, topk_weights, weights.w13_bias, weights.w2_bias)
        options = (config.activation, config.first_expert, addend, plan.kernel, plan.activation_format)
        compiled = library_fused_experts(*operands, *options)
        return compiled if out is None else out.copy_(compiled)
    result: torch.Tensor = plan.run(
        x,
        weights.w13,
        weights.w2,
        topk_ids,
        topk_weights,
        w13_bias=weights.w13_bias,
        w2_bias=weights.w2_bias,
        activation=config.activation,
        activation_format=plan.activation_format,
        first_expert=config.first_expert,
        addend=addend,
        out=out,
    )
    return result


def _refuse(
    plan: MoePlan, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, out: torch.Tensor | None
) -> None:
    """Say which operand does not fit."""
    config = plan.config
    check_call(_NAME, x, config.hidden_size, topk_ids, topk_weights, None, out)
    if x.dtype is not plan.x_dtype or x.device != plan.device or topk_ids.shape[1] != config.top_k:
        raise ShapeError(
            _NAME,
            expected=f"x {plan.x_dtype} on {plan.device} and top_k={config.top_k}, as planned",
            got=f"x {x.dtype} on {x.device} and top_k={topk_ids.shape[1]}",
            fix="make a plan for what is passed",
        )
    check_dtypes(_NAME, x, topk_ids, topk_weights, None, out)


def _shared(expert: SharedExpert, x: torch.Tensor, activation: GatedActivation) -> torch.Tensor:
    values = mm(x, expert.w13)
    if activation.kind != "swiglu":
        values = gelu_and_mul(values, approximate="tanh" if activation.kind == "gelu_tanh" else "none")
    elif activation.clamped:
        values = swiglu_clamped(values, activation.limit, alpha=activation.alpha, up_offset=activation.up_offset)
    else:
        values = silu_and_mul(values)
    if expert.gate is None:
        return mm(values, expert.w2)
    share = mm(x, expert.gate, out_dtype=torch.float32).sigmoid()
    return (mm(values, expert.w2, out_dtype=torch.float32) * share).to(x.dtype)


def _weights_error(plan: MoePlan, name: str, got: object, fix: str) -> ShapeError:
    if isinstance(got, MoeWeights | SharedExpert):
        what = f"those of another plan, {got.plan!r}"
    else:
        what = f"{type(got).__name__}, which was not processed"
    return ShapeError(_NAME, expected=f"{name} processed for {plan!r}", got=what, fix=f"call {fix} once, and pass its result")
