"""Public op of speculative decoding: which of a chain of draft tokens the model itself would have given."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.compiler import is_compiling

from tokenspeed_kernel.dispatch import NEW_CALL, BoundOp, register_library_op
from tokenspeed_kernel.errors import ShapeError
from tokenspeed_kernel.ops.operands import OPERAND_ERRORS, refuse_kinds
from tokenspeed_kernel.ops.sampling import checks, contract

__all__ = ["verify_chain"]

_OP = "sampling.verify_chain"
_VERIFY = BoundOp(next(one for one in contract.CONTRACTS if one.name == _OP))
_Result = tuple[Tensor, Tensor]


def verify_chain(
    logits: Tensor,
    draft_ids: Tensor,
    uniform: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    *,
    draft_probs: Tensor | None = None,
    accept_uniform: Tensor | None = None,
    out: Tensor | None = None,
    num_tokens_out: Tensor | None = None,
    solution: str | None = None,
) -> _Result:
    """Accept a prefix of each request's draft tokens, and add one token: from 1 to K + 1 tokens a request.

    Lossless: the tokens are distributed as if each had been drawn by `sample` from the logits that follow the tokens before it.

    Without `draft_probs` (greedy drafts, n-grams) each position's token is drawn as `sample` does, and the chain goes on while the
    draft has the same token: a request's tokens are those that it would get without drafts, bit for bit where the logits are. With
    `draft_probs` q, a draft d at a position with distribution p is accepted where accept_uniform * q(d) < p(d); the first one that
    is not is replaced by a draw from max(p - q, 0), normalized. After the last draft the token is a plain draw.

    Args:
        logits: [R, K + 1, V] fp32, bf16 or fp16, any strides; [r, i] follows the first i draft tokens. R may be 0, K too.
        draft_ids: [R, K] int32; an id outside 0..V-1, such as -1, ends the row's chain: what is after it is ignored.
        uniform: [R, K + 1] fp64 in [0, 1): `philox_uniform` of the request's seed and the output index of each position.
        temperature: [R] fp32.
        top_k: [R] int32.
        top_p: [R] fp32.
        min_p: [R] fp32; all four as in `sample`.
        draft_probs: optional [R, K, V] fp32, any strides: the distributions that the drafts were drawn from, each from its own.
        accept_uniform: [R, K] fp64 in [0, 1), given with draft_probs: as `uniform`, of another stream (`ACCEPT_STREAM`).
        out: optional [R, K + 1] int32, contiguous, written in place.
        num_tokens_out: optional [R] int32, written in place.
        solution: solution or kernel to insist on.
    Returns:
        (tokens [R, K + 1] int32, padded with -1; num_tokens [R] int32). A position that cannot be sampled (see `sample`) ends the
        row before it; only then num_tokens may be 0. Stop tokens are the caller's to look for.
    Raises:
        ShapeError: shapes, dtypes or devices disagree, or one of draft_probs and accept_uniform comes alone.
        NoKernelError: nothing qualifies.
    Source: Leviathan et al., Fast Inference from Transformers via Speculative Decoding, arXiv:2211.17192, algorithm 1.
    """
    if is_compiling():
        both: _Result = _library_verify_chain(
            logits, draft_ids, uniform, temperature, top_k, top_p, min_p, draft_probs, accept_uniform, solution
        )
        tokens, number = both
        return (tokens if out is None else out.copy_(tokens), number if num_tokens_out is None else num_tokens_out.copy_(number))
    try:
        return _run_verify_chain(
            logits, draft_ids, uniform, temperature, top_k, top_p, min_p, draft_probs, accept_uniform, solution, out, num_tokens_out
        )
    except OPERAND_ERRORS as error:
        refuse_kinds(verify_chain, locals(), error)
        raise


# The library op's implementation: a compiled graph calls it at run time, when nothing is being compiled any more.
def _run_verify_chain(
    logits: Tensor,
    draft_ids: Tensor,
    uniform: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    draft_probs: Tensor | None = None,
    accept_uniform: Tensor | None = None,
    solution: str | None = None,
    out: Tensor | None = None,
    num_tokens_out: Tensor | None = None,
) -> _Result:
    operands: tuple[Tensor, ...] = (logits, draft_ids, uniform, temperature, top_k, top_p, min_p)
    if draft_probs is not None:
        operands += (draft_probs,)
    if accept_uniform is not None:
        operands += (accept_uniform,)
    if out is not None:
        operands += (out,)
    if num_tokens_out is not None:
        operands += (num_tokens_out,)
    key = (logits.shape, draft_probs is None, accept_uniform is None, out is None, num_tokens_out is None, solution)
    looks_same, kernel = _VERIFY.seen.get(key, NEW_CALL)
    if not looks_same(*operands):
        shape = logits.shape
        if len(shape) != 3 or not shape[1] or not shape[2]:
            raise ShapeError(_OP, expected="logits [R, K + 1, V] with V >= 1", got=str(list(shape)))
        num_rows, positions, vocab_size = shape
        device = logits.device
        checks.require(_OP, "draft_ids", draft_ids, (num_rows, positions - 1), torch.int32, device)
        checks.require(_OP, "uniform", uniform, (num_rows, positions), torch.float64, device)
        checks.require(_OP, "temperature", temperature, (num_rows,), torch.float32, device)
        checks.require(_OP, "top_k", top_k, (num_rows,), torch.int32, device)
        checks.require(_OP, "top_p", top_p, (num_rows,), torch.float32, device)
        checks.require(_OP, "min_p", min_p, (num_rows,), torch.float32, device)
        if (draft_probs is None) is not (accept_uniform is None):
            given = "accept_uniform" if draft_probs is None else "draft_probs"
            raise ShapeError(_OP, expected="draft_probs and accept_uniform together", got=f"{given} alone")
        if draft_probs is not None and accept_uniform is not None:
            checks.require(_OP, "draft_probs", draft_probs, (num_rows, positions - 1, vocab_size), torch.float32, device)
            checks.require(_OP, "accept_uniform", accept_uniform, (num_rows, positions - 1), torch.float64, device)
        if out is not None:
            checks.require(_OP, "out", out, (num_rows, positions), torch.int32, device)
            if not out.is_contiguous():
                raise ShapeError(_OP, expected="out contiguous", got=f"strides {out.stride()}")
        if num_tokens_out is not None:
            checks.require(_OP, "num_tokens_out", num_tokens_out, (num_rows,), torch.int32, device)
        kernel = _VERIFY.kernel(device, (logits.dtype, None if draft_probs is None else draft_probs.dtype), (), solution)
        _VERIFY.remember(key, kernel, *operands)
    if out is None:
        out = torch.empty(logits.shape[:2], dtype=torch.int32, device=logits.device)
    if num_tokens_out is None:
        num_tokens_out = torch.empty(logits.shape[0], dtype=torch.int32, device=logits.device)
    result: _Result = kernel(
        logits, draft_ids, uniform, temperature, top_k, top_p, min_p, draft_probs, accept_uniform, out, num_tokens_out
    )
    return result


def _fake_verify_chain(logits: Tensor, *_: object, **__: object) -> _Result:
    num_rows, positions = logits.shape[:2]
    return logits.new_empty((num_rows, positions), dtype=torch.int32), logits.new_empty(num_rows, dtype=torch.int32)


_library_verify_chain = register_library_op(
    "verify_chain(Tensor logits, Tensor draft_ids, Tensor uniform, Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p, "
    "Tensor? draft_probs=None, Tensor? accept_uniform=None, str? solution=None) -> (Tensor, Tensor)",
    _run_verify_chain,
    _fake_verify_chain,
)
