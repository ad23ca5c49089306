"""The truth for the sampling family: float64, one row at a time, a full sort, no cleverness.

The tokens of a row have one order, called the *total order* everywhere in this family: larger logit first, equal logits by
lower id. Every filter keeps a prefix of it, except that min-p keeps or drops equal logits together.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tokenspeed_kernel.ops.sampling.contract import GREEDY_TEMPERATURE, INVALID_TOKEN

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)


def philox4x32(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Return the four 32-bit words of Philox-4x32 with ten rounds.

    Source: Salmon, Moraes, Dror, Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011, section 3.3.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & _MASK, (p0 >> 32) ^ c3 ^ k1, p0 & _MASK
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def reference_philox_uniform(seeds: Tensor, counters: Tensor, stream: int, out: Tensor) -> Tensor:
    """One double in [0, 1) for each (seed, counter, stream); see the api."""
    values = []
    for seed, counter in zip(seeds.tolist(), counters.tolist(), strict=True):
        words = philox4x32((counter & _MASK, (counter >> 32) & _MASK, stream & _MASK, 0), (seed & _MASK, (seed >> 32) & _MASK))
        values.append(((words[0] >> 5) * 2**26 + (words[1] >> 6)) / 2**53)
    result = torch.tensor(values, dtype=torch.float64, device=seeds.device)
    return out.copy_(result)


def reference_argmax(logits: Tensor, out: Tensor) -> Tensor:
    """Id of the largest logit of each row, the lowest of equal ones; see the api."""
    ids = [_first_in_order(row) for row in logits.double()]
    result = torch.tensor(ids, dtype=torch.int32, device=logits.device)
    return out.copy_(result)


def _first_in_order(row: Tensor) -> int:
    top = row.max()
    if not bool(torch.isfinite(top)):  # max() of a row with a NaN is NaN
        return INVALID_TOKEN
    return int((row == top).nonzero()[0])


def reference_sampling_probs(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, out: Tensor
) -> Tensor:
    """The distribution that `sample` draws from, as float32; see the api."""
    result = _probabilities(logits, temperature, top_k, top_p, min_p).float()
    return out.copy_(result)


def reference_sample(
    logits: Tensor,
    uniform: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    out: Tensor,
) -> Tensor:
    """Inverse of the cumulative distribution in order of ids; see the api."""
    probabilities = _probabilities(logits, temperature, top_k, top_p, min_p)
    ids = []
    for row, draw in zip(probabilities, uniform.tolist(), strict=True):
        if bool(row.isnan().any()):
            ids.append(INVALID_TOKEN)
            continue
        cumulative = row.cumsum(0)
        # Rounding may leave the sum a little under the draw: the last token that can be drawn takes the rest.
        reached = (cumulative > draw * cumulative[-1]) & (row > 0)
        candidates = reached.nonzero() if bool(reached.any()) else row.nonzero()[-1:]
        ids.append(int(candidates[0]))
    result = torch.tensor(ids, dtype=torch.int32, device=logits.device)
    return out.copy_(result)


def _probabilities(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Float64 [R, V]; a row that cannot be sampled is all NaN."""
    greedy_limit = torch.tensor(GREEDY_TEMPERATURE, dtype=torch.float32).item()
    result = torch.zeros(logits.shape, dtype=torch.float64, device=logits.device)
    for index, row in enumerate(logits.double()):
        best = _first_in_order(row)
        heat = float(temperature[index])
        if best == INVALID_TOKEN:
            result[index] = float("nan")
        elif not heat > greedy_limit:
            result[index, best] = 1.0
        else:
            result[index] = _filtered(row, heat, int(top_k[index]), float(top_p[index]), float(min_p[index]))
    return result


def _filtered(row: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> Tensor:
    values, order = torch.sort(row, descending=True, stable=True)
    weights = torch.exp((values - values[0]) / temperature)
    if 0 < top_k < row.numel():
        weights[top_k:] = 0
    if top_p < 1:
        before = weights.cumsum(0) - weights
        dropped = before >= top_p * weights.sum()
        dropped[0] = False
        weights[dropped] = 0
    if min_p > 0:
        weights[weights < min_p] = 0  # the first weight is 1
    return torch.zeros_like(weights).scatter_(0, order, weights / weights.sum())


def reference_apply_penalties(
    logits: Tensor,
    row_offsets: Tensor,
    token_ids: Tensor,
    output_counts: Tensor,
    presence: Tensor,
    frequency: Tensor,
    repetition: Tensor,
    pending: Tensor | None,
    out: Tensor,
) -> Tensor:
    """Repetition penalty first, then frequency and presence; see the api."""
    result = logits.clone()
    offsets = row_offsets.tolist()
    for row in range(logits.shape[0]):
        entries = slice(offsets[row], offsets[row + 1])
        counts = dict(zip(token_ids[entries].tolist(), output_counts[entries].tolist(), strict=True))
        if pending is not None and int(pending[row]) >= 0:
            counts[int(pending[row])] = counts.get(int(pending[row]), 0) + 1
        for token, count in counts.items():
            if not 0 <= token < logits.shape[1]:
                continue
            value = logits[row, token]
            value = value / repetition[row] if value > 0 else value * repetition[row]
            result[row, token] = value - count * frequency[row] - (presence[row] if count > 0 else 0.0)
    return out.copy_(result)


def reference_apply_logit_bias(logits: Tensor, row_offsets: Tensor, token_ids: Tensor, bias: Tensor, out: Tensor) -> Tensor:
    """Add each row's biases to the logits of its tokens; see the api."""
    result = logits.clone()
    offsets = row_offsets.tolist()
    for row in range(logits.shape[0]):
        for entry in range(offsets[row], offsets[row + 1]):
            token = int(token_ids[entry])
            if 0 <= token < logits.shape[1]:
                result[row, token] += bias[entry]
    return out.copy_(result)


def reference_log_probs(logits: Tensor, token_ids: Tensor, top_n: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-softmax at the chosen ids, their ranks, and the first `top_n` of the total order; see the api."""
    values = torch.log_softmax(logits.double(), dim=-1)
    order = torch.sort(logits.double(), dim=-1, descending=True, stable=True).indices
    broken = values.isnan().any(-1)  # the rows to which argmax gives INVALID_TOKEN
    valid = (token_ids >= 0) & (token_ids < logits.shape[1]) & ~broken
    ids = token_ids.long().clamp(0, logits.shape[1] - 1)[:, None]
    chosen = values.gather(1, ids)[:, 0].masked_fill(~valid, float("nan"))
    ranks = (order == ids).int().argmax(-1).add(1).masked_fill(~valid, 0)
    top_ids = order[:, :top_n]
    top_values = values.gather(1, top_ids).masked_fill(broken[:, None], float("nan"))
    return chosen.float(), ranks.int(), top_ids.masked_fill(broken[:, None], INVALID_TOKEN).int(), top_values.float()


def reference_verify_chain(
    logits: Tensor,
    draft_ids: Tensor,
    uniform: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    draft_probs: Tensor | None,
    accept_uniform: Tensor | None,
    out: Tensor,
    num_tokens_out: Tensor,
) -> tuple[Tensor, Tensor]:
    """Walk each chain position by position; see the api."""
    num_rows, positions, vocab_size = logits.shape
    tokens = torch.full((num_rows, positions), INVALID_TOKEN, dtype=torch.int32)
    number = torch.zeros(num_rows, dtype=torch.int32)
    for row in range(num_rows):
        filters = [one[row].expand(positions) for one in (temperature, top_k, top_p, min_p)]
        for place, target in enumerate(_probabilities(logits[row], *filters)):
            if bool(target.isnan().any()):
                break
            draft = int(draft_ids[row, place]) if place < positions - 1 else INVALID_TOKEN
            drafted = 0 <= draft < vocab_size
            if drafted and draft_probs is not None and accept_uniform is not None:
                proposed = draft_probs[row, place].double()
                if float(accept_uniform[row, place]) * float(proposed[draft]) < float(target[draft]):
                    token = draft
                else:
                    left = (target - proposed.nan_to_num(0.0)).clamp(min=0.0)
                    # Nothing is left where rounding alone set p and q apart.
                    token = _at(left if bool(left.sum() > 0) else target, float(uniform[row, place]))
            else:
                token = _at(target, float(uniform[row, place]))
            tokens[row, place] = token
            number[row] = place + 1
            if not drafted or token != draft:
                break
    return out.copy_(tokens), num_tokens_out.copy_(number)


def _at(weights: Tensor, draw: float) -> int:
    """First id at which the running sum exceeds the draw times the whole; the last one with a weight where rounding leaves none."""
    cumulative = weights.cumsum(0)
    reached = (cumulative > draw * cumulative[-1]) & (weights > 0)
    return int((reached if bool(reached.any()) else weights > 0).nonzero()[0 if bool(reached.any()) else -1])
