"""`topk_routing`: which experts a token goes to, and with which weights."""

from __future__ import annotations

import torch
from torch.compiler import is_compiling

from tokenspeed_kernel.dispatch import BoundOp, check_devices, register_library_op
from tokenspeed_kernel.errors import ShapeError
from tokenspeed_kernel.ops.moe.contract import GROUP_SCORES, SCORINGS, TOPK_ROUTING
from tokenspeed_kernel.ops.operands import OPERAND_ERRORS, check_operands, refuse_kinds, tensor_error

__all__ = ["topk_routing"]

_NAME = TOPK_ROUTING.name
_op = BoundOp(TOPK_ROUTING)
_table = _op.table


def topk_routing(
    logits: torch.Tensor,
    top_k: int,
    *,
    scoring: str = "softmax",
    renormalize: bool = False,
    correction_bias: torch.Tensor | None = None,
    num_groups: int = 1,
    top_groups: int = 1,
    group_score: str = "max",
    scaling_factor: float = 1.0,
    weights_out: torch.Tensor | None = None,
    ids_out: torch.Tensor | None = None,
    solution: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose each token's `top_k` experts, best first; of equal ones the one with the lowest index.

    An expert's score is the softmax over all logits, or the sigmoid of its own, in float32; `topk_softmax` chooses by the logits
    and takes the softmax over the chosen ones alone. Chosen is by score plus bias; what is returned is the score without it.
    With groups, experts are chosen from the `top_groups` best groups of neighbouring experts.

    A NaN logit counts as the lowest number, an infinite one as the largest of its sign: every weight is finite.

    Args:
        logits: [num_tokens, num_experts] fp32, bf16 or fp16, any strides.
        top_k: experts of a token; at most the experts of `top_groups` groups.
        scoring: `softmax`, `sigmoid` or `topk_softmax`.
        renormalize: divide the weights of a token by their sum plus 1e-20, so that 0 stays 0. (Those of `topk_softmax` sum to 1.)
        correction_bias: optional [num_experts], fp32 or dtype of logits; added for choosing only.
        num_groups: groups into which the experts are divided, equally.
        top_groups: groups that a token may choose from.
        group_score: what a group is worth: the `max` of its experts, or the sum of its two best, `top2_sum`.
        scaling_factor: multiplies the weights last; dimensionless.
        weights_out: optional [num_tokens, top_k] fp32, written in place.
        ids_out: optional [num_tokens, top_k] int32, written in place.
        solution: solution or kernel to insist on; chosen by the registry where left out.
    Returns:
        (topk_weights fp32, topk_ids int32), each [num_tokens, top_k].
    Raises:
        ShapeError: shapes or options disagree.  NoKernelError: nothing qualifies.
    Source: DeepSeek-V3, arXiv:2412.19437, section 2.1.2 (sigmoid, bias, groups); DeepSeek-V2, arXiv:2405.04434, section 2.2.2
        (groups by their maximum); Shazeer et al., arXiv:1701.06538, section 2.1 (softmax over the chosen).
    """
    options = (scoring, renormalize, correction_bias, num_groups, top_groups, group_score, scaling_factor, solution)
    if is_compiling():
        weights, ids = _library_topk_routing(logits, top_k, *options)
        return (
            weights if weights_out is None else weights_out.copy_(weights),
            ids if ids_out is None else ids_out.copy_(ids),
        )
    try:
        return _run_topk_routing(logits, top_k, *options, weights_out, ids_out)
    except OPERAND_ERRORS as error:
        refuse_kinds(topk_routing, locals(), error)
        raise


# The library op's implementation: a compiled graph calls it at run time, when nothing is being compiled any more.
def _run_topk_routing(
    logits: torch.Tensor,
    top_k: int,
    scoring: str = "softmax",
    renormalize: bool = False,
    correction_bias: torch.Tensor | None = None,
    num_groups: int = 1,
    top_groups: int = 1,
    group_score: str = "max",
    scaling_factor: float = 1.0,
    solution: str | None = None,
    weights_out: torch.Tensor | None = None,
    ids_out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    try:
        shape, device = logits.shape, logits.device
    except AttributeError:
        raise tensor_error(_NAME, logits=logits) from None
    if len(shape) != 2:
        raise ShapeError(_NAME, expected="logits [num_tokens, num_experts]", got=f"{list(shape)}")
    num_experts = shape[1]
    key = (
        device,
        logits.dtype,
        num_experts,
        top_k,
        scoring,
        num_groups,
        top_groups,
        group_score,
        None if correction_bias is None else (correction_bias.dtype, correction_bias.device, correction_bias.shape),
        None if weights_out is None else (weights_out.dtype, weights_out.device),
        None if ids_out is None else (ids_out.dtype, ids_out.device),
        solution,
    )
    kernel = _table.get(key)
    if kernel is None:
        check_operands(_NAME, logits=logits, correction_bias=correction_bias, weights_out=weights_out, ids_out=ids_out)
        _check_options(num_experts, top_k, scoring, num_groups, top_groups, group_score)
        if correction_bias is not None and correction_bias.shape != (num_experts,):
            raise ShapeError(_NAME, expected=f"correction_bias [{num_experts}]", got=f"{list(correction_bias.shape)}")
        _check_dtype("weights_out", weights_out, torch.float32)
        _check_dtype("ids_out", ids_out, torch.int32)
        check_devices(_NAME, device, correction_bias=correction_bias, weights_out=weights_out, ids_out=ids_out)
        traits = (scoring, num_groups > 1, correction_bias is not None, num_experts, top_k)
        dtypes = (logits.dtype, None if correction_bias is None else correction_bias.dtype)
        kernel = _op.bind(key, device, dtypes, traits, solution)
    for name, given in (("weights_out", weights_out), ("ids_out", ids_out)):
        if given is not None and given.shape != (shape[0], top_k):
            raise ShapeError(_NAME, expected=f"{name} [{shape[0]}, {top_k}]", got=f"{list(given.shape)}")
    result: tuple[torch.Tensor, torch.Tensor] = kernel(
        logits,
        top_k,
        scoring=scoring,
        renormalize=renormalize,
        correction_bias=correction_bias,
        num_groups=num_groups,
        top_groups=top_groups,
        group_score=group_score,
        scaling_factor=scaling_factor,
        weights_out=weights_out,
        ids_out=ids_out,
    )
    return result


def _check_options(num_experts: int, top_k: int, scoring: str, num_groups: int, top_groups: int, group_score: str) -> None:
    """Only when a kernel is bound: all of these are in the table's key."""
    if scoring not in SCORINGS:
        raise ShapeError(_NAME, expected=f"scoring in {{{', '.join(SCORINGS)}}}", got=repr(scoring))
    if group_score not in GROUP_SCORES:
        raise ShapeError(_NAME, expected=f"group_score in {{{', '.join(GROUP_SCORES)}}}", got=repr(group_score))
    if num_groups < 1 or num_experts % num_groups or not 1 <= top_groups <= num_groups:
        raise ShapeError(
            _NAME,
            expected=f"num_groups that divides {num_experts} experts, and 1 <= top_groups <= num_groups",
            got=f"num_groups={num_groups}, top_groups={top_groups}",
        )
    choices = num_experts // num_groups * top_groups
    if not 1 <= top_k <= choices:
        raise ShapeError(
            _NAME,
            expected=f"1 <= top_k <= {choices}, the experts that a token may choose from",
            got=f"top_k={top_k}",
            fix="lower top_k, or raise top_groups",
        )


def _check_dtype(name: str, given: torch.Tensor | None, dtype: torch.dtype) -> None:
    if given is not None and given.dtype is not dtype:
        raise ShapeError(_NAME, expected=f"{name} {dtype}", got=f"{given.dtype}")


def _fake_topk_routing(logits: torch.Tensor, top_k: int, *_: object, **__: object) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (logits.shape[0], top_k)
    return logits.new_empty(shape, dtype=torch.float32), logits.new_empty(shape, dtype=torch.int32)


_library_topk_routing = register_library_op(
    'topk_routing(Tensor logits, int top_k, str scoring="softmax", bool renormalize=False, Tensor? correction_bias=None, '
    'int num_groups=1, int top_groups=1, str group_score="max", float scaling_factor=1.0, str? solution=None) '
    "-> (Tensor, Tensor)",
    _run_topk_routing,
    _fake_topk_routing,
)
