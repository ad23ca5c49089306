"""Philox-4x32 in 64-bit integer arithmetic, all rows at once."""

from __future__ import annotations

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_MULTIPLIERS = torch.tensor([[0xD2511F53], [0xCD9E8D57]])
_WEYL = torch.tensor([[0x9E3779B9], [0xBB67AE85]])
_ROUNDS = torch.arange(10).view(10, 1, 1)


def cpu_philox_uniform(seeds: Tensor, counters: Tensor, stream: int, out: Tensor) -> Tensor:
    """One double in [0, 1) for each (seed, counter, stream); see the api."""
    counters = counters.to(torch.int64)
    # Row 0 and 1 of `even` are the words that get multiplied, c0 and c2; those of `odd` are c1 and c3. `odd` keeps whatever
    # stands above its low 32 bits: it only enters an exclusive or whose result is masked.
    even = torch.stack((counters & _MASK, torch.full_like(counters, stream & _MASK)))
    odd = torch.stack((counters >> 32, torch.zeros_like(counters)))
    keys = (torch.stack((seeds & _MASK, (seeds >> 32) & _MASK)) + _ROUNDS * _WEYL).unbind(0)
    for key in keys:
        # The low 64 bits of the product are right although int64 wraps: both factors are below 2**32.
        swapped = (even * _MULTIPLIERS).flip(0)
        even = ((swapped >> 32) ^ odd).bitwise_xor_(key).bitwise_and_(_MASK)
        odd = swapped
    result = (((even[0] >> 5) << 26) + ((odd[0] & _MASK) >> 6)).to(torch.float64).mul_(2.0**-53)
    return out.copy_(result)
