"""How a tensor lies on the ranks of a mesh."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Replicate:
    """Every rank holds the whole tensor."""


@dataclass(frozen=True, slots=True)
class Shard:
    """Each rank holds an equal, contiguous part along one dimension, in rank order.

    Attributes:
        dim: the dimension; activations count from the end (-1 is the feature dimension), so that it does not depend on how
            many leading dimensions there are.
    """

    dim: int


@dataclass(frozen=True, slots=True)
class Partial:
    """Each rank holds a tensor of the whole shape; the tensor is their sum."""


Placement = Replicate | Shard | Partial
"""One of the three."""
