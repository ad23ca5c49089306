"""The ranks that share one model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist


@dataclass(frozen=True, slots=True)
class Mesh:
    """A row of ranks that split each layer among them (tensor parallelism).

    Attributes:
        size: number of ranks.
        rank: this process, 0..size-1.
        group: the torch.distributed process group; None when size is 1.
    """

    size: int = 1
    rank: int = 0
    group: Any = None

    def __post_init__(self) -> None:
        if self.size < 1 or not 0 <= self.rank < self.size:
            raise ValueError(f"mesh: expected rank in 0..size-1, got rank {self.rank} of {self.size}")
        if self.size > 1 and self.group is None:
            raise ValueError("mesh: several ranks need a process group. Fix: use Mesh.of_world() after init_process_group().")

    @classmethod
    def of_world(cls) -> Mesh:
        """All ranks of the initialized torch.distributed world; a single rank when there is none."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return cls()
        return cls(dist.get_world_size(), dist.get_rank(), dist.group.WORLD)
