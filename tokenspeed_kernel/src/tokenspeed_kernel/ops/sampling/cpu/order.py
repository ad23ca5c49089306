"""The first tokens of the total order (larger logit first, equal ones by lower id) without sorting a row.

A row is cut into blocks whose maxima cost one vectorised pass. The first token lies in the first block that has the
largest maximum; the first k lie in the k blocks that come first by (maximum, position), because each of these holds a token
that comes before all the tokens of every other block.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MAX_BLOCK = 128  # tokens in a block of a maximum; 64 to 256 measured alike on AVX2
_TOP_BLOCK = 64  # shorter for top-k: each candidate block is gathered


def _block_maxima(logits: Tensor, block: int) -> Tensor:
    """[R, ceil(V / block)]; NaN where a block holds one."""
    vocab_size = logits.shape[1]
    whole = vocab_size // block * block
    maxima = [logits[:, :whole].unfold(1, block, block).amax(-1)] if whole else []
    if whole < vocab_size:
        maxima.append(logits[:, whole:].amax(-1, keepdim=True))
    return maxima[0] if len(maxima) == 1 else torch.cat(maxima, dim=1)


def _block_members(logits: Tensor, blocks: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Values and ids of the blocks' tokens; past the end of the vocabulary the value is -inf."""
    ids = (blocks[..., None] * block + torch.arange(block)).flatten(1)
    values = logits.gather(1, ids.clamp(max=logits.shape[1] - 1))
    if logits.shape[1] % block:
        values = values.masked_fill(ids >= logits.shape[1], float("-inf"))
    return values, ids


def first(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Value [R] and id [R] of each row's first token; the value is NaN where the row holds a NaN."""
    top, block = _block_maxima(logits, _MAX_BLOCK).max(-1)  # the first of equal ones; NaN counts as the largest
    values, ids = _block_members(logits, block[:, None], _MAX_BLOCK)
    position = (values == top[:, None]).to(torch.uint8).argmax(-1, keepdim=True)
    return top, ids.gather(1, position)[:, 0]


def _leading_positions(values: Tensor, count: int) -> Tensor:
    """Positions of the first `count` by (larger value, lower position), in no order."""
    if count >= values.shape[1]:
        return torch.arange(values.shape[1]).expand_as(values)
    top, positions = values.topk(count + 1)
    positions = positions[:, :count]
    tied = (top[:, count - 1] == top[:, count]).nonzero()[:, 0]  # topk breaks ties as it likes
    if tied.numel():
        exact = values[tied].sort(dim=-1, descending=True, stable=True).indices[:, :count]
        positions = positions.index_copy(0, tied, exact)
    return positions


def leading(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Values and ids [R, count] of the first tokens of each row, in ascending order of ids.

    `count` is at most the size of the vocabulary. Rows that hold a NaN give ids in range, and nothing more.
    """
    vocab_size = logits.shape[1]
    if count * _TOP_BLOCK * 2 < vocab_size:
        blocks = _leading_positions(_block_maxima(logits, _TOP_BLOCK), count).sort(-1).values
        candidates, ids = _block_members(logits, blocks, _TOP_BLOCK)
        positions = _leading_positions(candidates, count).sort(-1).values
        return candidates.gather(1, positions), ids.gather(1, positions)
    ids = _leading_positions(logits, count).sort(-1).values
    return logits.gather(1, ids), ids


def by_order(values: Tensor) -> Tensor:
    """Permutation [R, N] that brings `values`, given in ascending order of ids, into the total order."""
    return values.sort(dim=-1, descending=True, stable=True).indices
