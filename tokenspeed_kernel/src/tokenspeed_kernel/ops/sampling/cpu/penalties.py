"""Penalties and biases on the CPU: only the listed logits are touched."""

from __future__ import annotations

import torch
from torch import Tensor


def _entries(row_offsets: Tensor, token_ids: Tensor, vocab_size: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """Row and column of each entry; where ids lie outside the vocabulary, the entries that stay, else None."""
    rows = torch.repeat_interleave(torch.arange(len(row_offsets) - 1), row_offsets.diff().to(torch.int64))
    columns = token_ids.to(torch.int64)
    known = (columns >= 0) & (columns < vocab_size)
    if bool(known.all()):
        return rows, columns, None
    return rows[known], columns[known], known


def cpu_apply_penalties(
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
    if out is not logits:
        out.copy_(logits)
    rows, columns, known = _entries(row_offsets, token_ids, logits.shape[1])
    counts = output_counts if known is None else output_counts[known]
    if pending is not None:  # it may be on the list already, or be new to it
        match = columns == pending[rows]
        counts = counts + match.to(counts.dtype)
        listed = torch.zeros(len(pending), dtype=torch.bool).index_fill_(0, rows[match], True)
        new = ((pending >= 0) & (pending < logits.shape[1]) & ~listed).nonzero()[:, 0]
        rows, columns = torch.cat((rows, new)), torch.cat((columns, pending[new].to(torch.int64)))
        counts = torch.cat((counts, counts.new_ones(len(new))))
    values, factor = out[rows, columns], repetition[rows]
    values = torch.where(values > 0, values / factor, values * factor)
    values = values - counts * frequency[rows] - (counts > 0) * presence[rows]
    return out.index_put_((rows, columns), values)


def cpu_apply_logit_bias(logits: Tensor, row_offsets: Tensor, token_ids: Tensor, bias: Tensor, out: Tensor) -> Tensor:
    """Add each row's biases to the logits of its tokens; see the api."""
    if out is not logits:
        out.copy_(logits)
    rows, columns, known = _entries(row_offsets, token_ids, logits.shape[1])
    return out.index_put_((rows, columns), out[rows, columns] + (bias if known is None else bias[known]))
