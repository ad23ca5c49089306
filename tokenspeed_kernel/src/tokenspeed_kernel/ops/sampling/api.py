"""Public ops of the sampling family. The total order of tokens and the order of the filters are in `contract`."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.compiler import is_compiling

from tokenspeed_kernel.dispatch import NEW_CALL, BoundOp, Kernel
from tokenspeed_kernel.errors import ShapeError
from tokenspeed_kernel.ops.operands import OPERAND_ERRORS, refuse_kinds
from tokenspeed_kernel.ops.sampling import checks, contract, library

_OPS = {one.name.partition(".")[2]: BoundOp(one) for one in contract.CONTRACTS}
_ARGMAX, _SAMPLE, _PROBS = _OPS["argmax"], _OPS["sample"], _OPS["sampling_probs"]
_UNIFORM, _PENALTIES, _BIAS, _LOG_PROBS = (
    _OPS["philox_uniform"],
    _OPS["apply_penalties"],
    _OPS["apply_logit_bias"],
    _OPS["log_probs"],
)
_FLOAT, _DOUBLE, _INT, _LONG = torch.float32, torch.float64, torch.int32, torch.int64


def argmax(logits: Tensor, *, out: Tensor | None = None, solution: str | None = None) -> Tensor:
    """Return the id of the largest logit of each row; of equal ones, the lowest.

    Args:
        logits: [R, V] fp32, bf16 or fp16, any strides; R may be 0.
        out: optional [R] int32, written in place.
        solution: solution or kernel to insist on.
    Returns:
        [R] int32; -1 (`INVALID_TOKEN`) for a row that holds a NaN or whose maximum is infinite, either sign.
    Raises:
        ShapeError: shapes, dtypes or devices disagree.  NoKernelError: nothing qualifies.
    Source: definition; the ties follow numpy.argmax, the refusal of NaN is this project's.
    """
    if is_compiling():
        return library.into(out, library.argmax(logits, solution))
    try:
        operands = (logits,) if out is None else (logits, out)
        key = (logits.shape, out is None, solution)
        looks_same, kernel = _ARGMAX.seen.get(key, NEW_CALL)
        if not looks_same(*operands):
            num_rows, _ = checks.logits_shape("sampling.argmax", logits)
            if out is not None:
                checks.require("sampling.argmax", "out", out, (num_rows,), _INT, logits.device)
            kernel = _ARGMAX.kernel(logits.device, (logits.dtype,), (), solution)
            _ARGMAX.remember(key, kernel, *operands)
        if out is None:
            out = torch.empty(logits.shape[0], dtype=_INT, device=logits.device)
        result: Tensor = kernel(logits, out)
        return result
    except OPERAND_ERRORS as error:
        refuse_kinds(argmax, locals(), error)
        raise


def sample(
    logits: Tensor,
    uniform: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    *,
    out: Tensor | None = None,
    solution: str | None = None,
) -> Tensor:
    """Draw one token for each row.

    The distribution is softmax(logits / temperature), cut to the first top_k tokens of the total order, then to the shortest prefix
    that holds top_p of what was left, then to tokens at least min_p times as likely as the most likely one. The token is the
    first, in order of ids, at which the running sum exceeds `uniform` times the whole. Sums are exact (integers), so a row's token
    depends on that row alone: not on the batch, the number of threads or the block size. Kernels on different devices round exp
    differently, by about 1e-7 of a weight; a draw that falls so close to a border can differ there.

    A row is greedy, and costs one argmax, where temperature <= 1e-4 (NaN included), top_k == 1 or top_p <= 0. A logit of -inf has
    no weight; neither has a token below 2**-40 of the likelihood of the most likely one.

    Args:
        logits: [R, V] fp32, bf16 or fp16, any strides; R may be 0.
        uniform: [R] fp64 in [0, 1), as from `philox_uniform`.
        temperature: [R] fp32.
        top_k: [R] int32; 0 or less, or V or more, is off.
        top_p: [R] fp32; 1 or more is off; a tiny one keeps the first token.
        min_p: [R] fp32 in 0..1; 0 is off; 1 keeps the most likely token and those equal to it.
        out: optional [R] int32, written in place.
        solution: solution or kernel to insist on.
    Returns:
        [R] int32; -1 (`INVALID_TOKEN`) for a row that holds a NaN or whose maximum is infinite, either sign.
    Raises:
        ShapeError: shapes, dtypes or devices disagree.  NoKernelError: nothing qualifies.
    Source: nucleus: Holtzman et al., arXiv:1904.09751; min-p: Nguyen et al., arXiv:2407.01082. The order of the filters is
        that of transformers' generate; vLLM applies min-p before top-k and top-p.
    """
    if is_compiling():
        drawn = library.sample(logits, uniform, temperature, top_k, top_p, min_p, solution)
        return library.into(out, drawn)
    try:
        operands: tuple[Tensor, ...] = (logits, uniform, temperature, top_k, top_p, min_p)
        if out is not None:
            operands += (out,)
        key = (logits.shape, out is None, solution)
        looks_same, kernel = _SAMPLE.seen.get(key, NEW_CALL)
        if not looks_same(*operands):
            op = "sampling.sample"
            num_rows, _ = checks.logits_shape(op, logits)
            shape, device = (num_rows,), logits.device
            checks.require(op, "uniform", uniform, shape, _DOUBLE, device)
            _require_filters(op, temperature, top_k, top_p, min_p, shape, device)
            if out is not None:
                checks.require(op, "out", out, shape, _INT, device)
            kernel = _SAMPLE.kernel(device, (logits.dtype,), (), solution)
            _SAMPLE.remember(key, kernel, *operands)
        if out is None:
            out = torch.empty(logits.shape[0], dtype=_INT, device=logits.device)
        result: Tensor = kernel(logits, uniform, temperature, top_k, top_p, min_p, out)
        return result
    except OPERAND_ERRORS as error:
        refuse_kinds(sample, locals(), error)
        raise


def sampling_probs(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    *,
    out: Tensor | None = None,
    solution: str | None = None,
) -> Tensor:
    """Return the distribution that `sample` draws from; what it drops has probability 0.

    Args:
        logits, temperature, top_k, top_p, min_p: as in `sample`.
        out: optional [R, V] fp32, contiguous, written in place; not `logits` itself.
        solution: solution or kernel to insist on.
    Returns:
        [R, V] fp32: 1 at the token of a greedy row; all NaN where `sample` gives -1.
    Raises:
        ShapeError: shapes, dtypes or devices disagree.  NoKernelError: nothing qualifies.
    Source: as `sample`.
    """
    if is_compiling():
        return library.into(out, library.sampling_probs(logits, temperature, top_k, top_p, min_p, solution))
    try:
        operands: tuple[Tensor, ...] = (logits, temperature, top_k, top_p, min_p)
        if out is not None:
            operands += (out,)
        key = (logits.shape, out is None, solution)
        looks_same, kernel = _PROBS.seen.get(key, NEW_CALL)
        if not looks_same(*operands) or out is logits:
            op = "sampling.sampling_probs"
            num_rows, vocab_size = checks.logits_shape(op, logits)
            device = logits.device
            _require_filters(op, temperature, top_k, top_p, min_p, (num_rows,), device)
            if out is not None:
                checks.require(op, "out", out, (num_rows, vocab_size), _FLOAT, device)
                if out is logits or not out.is_contiguous():
                    raise ShapeError(op, expected="out contiguous and apart from logits", got=f"strides {out.stride()}")
            kernel = _PROBS.kernel(device, (logits.dtype,), (), solution)
            _PROBS.remember(key, kernel, *operands)
        if out is None:
            out = torch.empty(logits.shape, dtype=_FLOAT, device=logits.device)
        result: Tensor = kernel(logits, temperature, top_k, top_p, min_p, out)
        return result
    except OPERAND_ERRORS as error:
        refuse_kinds(sampling_probs, locals(), error)
        raise


def philox_uniform(
    seeds: Tensor, counters: Tensor, *, stream: int = 0, out: Tensor | None = None, solution: str | None = None
) -> Tensor:
    """Return one random double for each (seed, counter, stream): the same bits on every device, whatever the batch.

    Philox-4x32-10 with key = the seed's 64 bits and counter words (counter low, counter high, stream, 0); the value is the
    upper 27 bits of the first output word and the upper 26 of the second, over 2**53.

    Args:
        seeds: [R] int64; all 64 bits count.
        counters: [R] int64, such as the number of tokens that the request has sampled before.
        stream: 0..2**32-1; separates uses that share seed and counter.
        out: optional [R] fp64, written in place.
        solution: solution or kernel to insist on.
    Returns:
        [R] fp64 in [0, 1).
    Raises:
        ShapeError: shapes, dtypes or devices disagree, or the stream is out of range.  NoKernelError: nothing qualifies.
    Source: Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011.
    """
    if is_compiling():
        return library.into(out, library.philox_uniform(seeds, counters, stream, solution))
    try:
        operands = (seeds, counters) if out is None else (seeds, counters, out)
        key = (seeds.shape, stream, out is None, solution)
        looks_same, kernel = _UNIFORM.seen.get(key, NEW_CALL)
        if not looks_same(*operands):
            op = "sampling.philox_uniform"
            shape, device = (seeds.numel(),), seeds.device
            checks.require(op, "seeds", seeds, shape, _LONG, device)
            checks.require(op, "counters", counters, shape, _LONG, device)
            if not 0 <= stream < 2**32:
                raise ShapeError(op, expected="stream in 0..2**32-1", got=str(stream))
            if out is not None:
                checks.require(op, "out", out, shape, _DOUBLE, device)
            kernel = _UNIFORM.kernel(device, (seeds.dtype,), (), solution)
            _UNIFORM.remember(key, kernel, *operands)
        if out is None:
            out = torch.empty(seeds.shape, dtype=_DOUBLE, device=seeds.device)
        result: Tensor = kernel(seeds, counters, stream, out)
        return result
    except OPERAND_ERRORS as error:
        refuse_kinds(philox_uniform, locals(), error)
        raise


def apply_penalties(
    logits: Tensor,
    row_offsets: Tensor,
    token_ids: Tensor,
    output_counts: Tensor,
    presence: Tensor,
    frequency: Tensor,
    repetition: Tensor,
    *,
    pending: Tensor | None = None,
    out: Tensor | None = None,
    solution: str | None = None,
) -> Tensor:
    """Lower the logits of tokens that were seen.

    For each listed token: a positive logit is divided by `repetition`, another one multiplied by it; then `frequency` times the
    token's output count is subtracted, and `presence` where that count is not 0. Each row lists the distinct tokens of its prompt
    and output once (CSR): memory and time follow what was seen, not R x V.

    Args:
        logits: [R, V] fp32, any strides.
        row_offsets: [R + 1] int32, ascending from 0: row r's entries are row_offsets[r] to row_offsets[r + 1] - 1.
        token_ids: [N] int32, N >= row_offsets[R], distinct within a row; ids outside 0..V-1 are ignored.
        output_counts: [N] int32: how often the token was generated; 0 for one of the prompt alone.
        presence: [R] fp32.
        frequency: [R] fp32.
        repetition: [R] fp32, above 0; 1 is off.
        pending: optional [R] int32: a generated token that the lists do not count yet, such as the last step's, which is
            still on the device; negative for none.
        out: optional [R, V] fp32, written in place; it may be `logits`.
        solution: solution or kernel to insist on.
    Returns:
        out, or a new tensor of that shape and dtype.
    Raises:
        ShapeError: shapes, dtypes or devices disagree.  NoKernelError: nothing qualifies.
    Source: repetition: Keskar et al., arXiv:1909.05858, section 4.1; frequency and presence: OpenAI API reference.
    """
    if is_compiling():
        lists = (row_offsets, token_ids, output_counts)
        changed = library.apply_penalties(logits, *lists, presence, frequency, repetition, pending, solution)
        return library.into(out, changed)
    try:
        operands: tuple[Tensor, ...] = (row_offsets, token_ids, output_counts, presence, frequency, repetition)
        operands = (logits, *operands) if pending is None else (logits, *operands, pending)
        if out is not None and out is not logits:
            operands += (out,)
        key = (logits.shape, pending is None, out is None or out is logits, solution)
        looks_same, kernel = _PENALTIES.seen.get(key, NEW_CALL)
        if not looks_same(*operands):
            kernel = _bind_penalties(
                logits, row_offsets, token_ids, output_counts, presence, frequency, repetition, pending, out, solution
            )
            _PENALTIES.remember(key, kernel, *operands)
        if out is None:
            out = torch.empty_like(logits)
        result: Tensor = kernel(logits, row_offsets, token_ids, output_counts, presence, frequency, repetition, pending, out)
        return result
    except OPERAND_ERRORS as error:
        refuse_kinds(apply_penalties, locals(), error)
        raise


def _bind_penalties(
    logits: Tensor,
    row_offsets: Tensor,
    token_ids: Tensor,
    output_counts: Tensor,
    presence: Tensor,
    frequency: Tensor,
    repetition: Tensor,
    pending: Tensor | None,
    out: Tensor | None,
    solution: str | None,
) -> Kernel:
    """Check every operand, and return the kernel."""
    op = "sampling.apply_penalties"
    num_rows, vocab_size = checks.logits_shape(op, logits)
    shape, listed, device = (num_rows,), tuple(token_ids.shape[:1]), logits.device
    checks.require(op, "row_offsets", row_offsets, (num_rows + 1,), _INT, device)
    checks.require(op, "token_ids", token_ids, listed, _INT, device)
    checks.require(op, "output_counts", output_counts, listed, _INT, device)
    checks.require(op, "presence", presence, shape, _FLOAT, device)
    checks.require(op, "frequency", frequency, shape, _FLOAT, device)
    checks.require(op, "repetition", repetition, shape, _FLOAT, device)
    if pending is not None:
        checks.require(op, "pending", pending, shape, _INT, device)
    if out is not None and out is not logits:
        checks.require(op, "out", out, (num_rows, vocab_size), _FLOAT, device)
    return _PENALTIES.kernel(device, (logits.dtype,), (), solution)


def apply_logit_bias(
    logits: Tensor,
    row_offsets: Tensor,
    token_ids: Tensor,
    bias: Tensor,
    *,
    out: Tensor | None = None,
    solution: str | None = None,
) -> Tensor:
    """Add each row's biases to the logits of its listed tokens; a bias of -inf forbids a token.

    Args:
        logits: [R, V] fp32, any strides.
        row_offsets: [R + 1] int32, ascending from 0: row r's entries are row_offsets[r] to row_offsets[r + 1] - 1.
        token_ids: [N] int32, N >= row_offsets[R], distinct within a row; ids outside 0..V-1 are ignored.
        bias: [N] fp32.
        out: optional [R, V] fp32, written in place; it may be `logits`.
        solution: solution or kernel to insist on.
    Returns:
        out, or a new tensor of that shape and dtype.
    Raises:
        ShapeError: shapes, dtypes or devices disagree.  NoKernelError: nothing qualifies.
    Source: logit_bias of the OpenAI API reference.
    """
    if is_compiling():
        return library.into(out, library.apply_logit_bias(logits, row_offsets, token_ids, bias, solution))
    try:
        operands: tuple[Tensor, ...] = (logits, row_offsets, token_ids, bias)
        if out is not None and out is not logits:
            operands += (out,)
        key = (logits.shape, out is None or out is logits, solution)
        looks_same, kernel = _BIAS.seen.get(key, NEW_CALL)
        if not looks_same(*operands):
            op = "sampling.apply_logit_bias"
            num_rows, vocab_size = checks.logits_shape(op, logits)
            listed, device = tuple(token_ids.shape[:1]), logits.device
            checks.require(op, "row_offsets", row_offsets, (num_rows + 1,), _INT, device)
            checks.require(op, "token_ids", token_ids, listed, _INT, device)
            checks.require(op, "bias", bias, listed, _FLOAT, device)
            if out is not None and out is not logits:
                checks.require(op, "out", out, (num_rows, vocab_size), _FLOAT, device)
            kernel = _BIAS.kernel(device, (logits.dtype,), (), solution)
            _BIAS.remember(key, kernel, *operands)
        if out is None:
            out = torch.empty_like(logits)
        result: Tensor = kernel(logits, row_offsets, token_ids, bias, out)
        return result
    except OPERAND_ERRORS as error:
        refuse_kinds(apply_logit_bias, locals(), error)
        raise


def log_probs(
    logits: Tensor, token_ids: Tensor, *, top_n: int = 0, solution: str | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the natural logarithm of softmax(logits) at the chosen ids, and the most likely alternatives.

    Args:
        logits: [R, V] fp32, bf16 or fp16, any strides: the model's own, for the model's own distribution.
        token_ids: [R] int32.
        top_n: 0..min(V, 128): how many alternatives.
        solution: solution or kernel to insist on.
    Returns:
        logprobs [R] fp32; ranks [R] int32, place of the id in the total order, 1 for the first; top_ids [R, top_n] int32, the
        first of the total order; top_logprobs [R, top_n] fp32. An id outside 0..V-1 has NaN and rank 0. A row that holds a NaN
        or whose maximum is infinite has NaN, rank 0 and ids -1 throughout.
    Raises:
        ShapeError: shapes, dtypes or devices disagree, or top_n is out of range.  NoKernelError: nothing qualifies.
    Source: definition of log-softmax; what is reported follows logprobs of the OpenAI API reference.
    """
    if is_compiling():
        found = library.log_probs(logits, token_ids, top_n, solution)
        return found[0], found[1], found[2], found[3]
    try:
        key = (logits.shape, top_n, solution)
        looks_same, kernel = _LOG_PROBS.seen.get(key, NEW_CALL)
        if not looks_same(logits, token_ids):
            op = "sampling.log_probs"
            num_rows, vocab_size = checks.logits_shape(op, logits)
            checks.require(op, "token_ids", token_ids, (num_rows,), _INT, logits.device)
            limit = min(vocab_size, contract.MAX_TOP_LOGPROBS)
            if not 0 <= top_n <= limit:
                raise ShapeError(op, expected=f"top_n in 0..{limit}", got=str(top_n), fix="ask for fewer alternatives")
            kernel = _LOG_PROBS.kernel(logits.device, (logits.dtype,), (), solution)
            _LOG_PROBS.remember(key, kernel, logits, token_ids)
        result: tuple[Tensor, Tensor, Tensor, Tensor] = kernel(logits, token_ids, top_n)
        return result
    except OPERAND_ERRORS as error:
        refuse_kinds(log_probs, locals(), error)
        raise


def _require_filters(
    op: str,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    shape: tuple[int, ...],
    device: torch.device,
) -> None:
    checks.require(op, "temperature", temperature, shape, _FLOAT, device)
    checks.require(op, "top_k", top_k, shape, _INT, device)
    checks.require(op, "top_p", top_p, shape, _FLOAT, device)
    checks.require(op, "min_p", min_p, shape, _FLOAT, device)
