"""Verification of draft chains on the CPU: every position's token at once, then the length of the part that agrees."""

from __future__ import annotations

import torch
from torch import Tensor

from tokenspeed_kernel.ops.sampling.contract import INVALID_TOKEN
from tokenspeed_kernel.ops.sampling.cpu.sample import cpu_sample, distributions
from tokenspeed_kernel.ops.sampling.cpu.weights import draw

_UNITS = 2.0**52  # a distribution's sum: integers add exactly in any order


def cpu_verify_chain(
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
    """See `tokenspeed_kernel.ops.sampling.verify_chain`."""
    num_rows, positions, vocab_size = logits.shape
    rows = logits.flatten(0, 1)
    filters = [one[:, None].expand(num_rows, positions).flatten() for one in (temperature, top_k, top_p, min_p)]
    temperatures, ks, ps, least = filters
    cpu_sample(rows, uniform.flatten(), temperatures, ks, ps, least, out.view(-1))
    drafted = (draft_ids >= 0) & (draft_ids < vocab_size)
    if draft_probs is not None and accept_uniform is not None:
        _reject(rows, draft_ids, drafted, uniform, filters, draft_probs, accept_uniform, out)
    # A chain goes on while its token is the draft's.
    agreed = (drafted & (out[:, :-1] == draft_ids)).to(torch.int32).cumprod(1).sum(1, dtype=torch.int32)
    place = torch.arange(positions, dtype=torch.int32)
    last = out.gather(1, agreed[:, None].long())[:, 0]
    number = agreed + (last >= 0)
    out.masked_fill_(place >= number[:, None], INVALID_TOKEN)
    return out, num_tokens_out.copy_(number)


def _reject(
    rows: Tensor,
    draft_ids: Tensor,
    drafted: Tensor,
    uniform: Tensor,
    filters: list[Tensor],
    draft_probs: Tensor,
    accept_uniform: Tensor,
    out: Tensor,
) -> None:
    """Give each position that has a draft the draft's token where it is accepted, else a draw from what the draft left over."""
    places = drafted.nonzero()
    if not places.numel():
        return
    flat = places[:, 0] * out.shape[1] + places[:, 1]
    for members, target in distributions(rows[flat], *[one[flat] for one in filters]):
        request, place = places[members].unbind(1)
        draft = draft_ids[request, place].long()
        proposed = draft_probs[request, place].double()
        chance = proposed.gather(1, draft[:, None])[:, 0]
        accepted = accept_uniform[request, place] * chance < target.gather(1, draft[:, None])[:, 0]
        left = target.sub(proposed.nan_to_num_(0.0)).clamp_(min=0.0).mul_(_UNITS).to(torch.int64)
        some = left.sum(1) > 0
        tokens = torch.where(accepted, draft, out[request, place].long())
        # Where nothing is left, rounding alone set the two apart: the plain draw stands.
        drawn = draw(left, uniform[request, place])
        out[request, place] = torch.where(accepted | ~some, tokens, drawn).to(torch.int32)
