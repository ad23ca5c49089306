"""A weight of a model: what it is as a whole, and this rank's part of it."""

from __future__ import annotations

import torch

from tokenspeed_engine.parallel.mesh import Mesh
from tokenspeed_engine.parallel.placement import Placement, Replicate, Shard
from tokenspeed_kernel import QuantizedTensor

Part = torch.Tensor | QuantizedTensor
"""Rows of a weight in one format."""


class Parameter:
    """A declared weight; `data` is None until the loader fills it.

    Args:
        shape: of the whole tensor.
        placement: Replicate or Shard(dim).
        pieces: sizes along dimension 0 of tensors that are stacked into this one (fused projections). Each piece is
            sharded on its own, so that a rank's part holds its share of every piece. None: one piece.
        quantizable: the layer that owns it can work with a `QuantizedTensor`.

    Attributes:
        data: this rank's part, of `local_shape`; or several, one below the other, where the stacked pieces differ in format.
        dtype: compute type that it was loaded for; None before.
    """

    __slots__ = ("data", "dtype", "pieces", "placement", "quantizable", "shape")

    def __init__(
        self,
        shape: tuple[int, ...],
        placement: Placement | None = None,
        pieces: tuple[int, ...] | None = None,
        *,
        quantizable: bool = False,
    ) -> None:
        self.shape = shape
        self.placement = placement or Replicate()
        self.pieces = pieces or (shape[0],)
        self.quantizable = quantizable
        self.data: Part | tuple[Part, ...] | None = None
        self.dtype: torch.dtype | None = None
        if sum(self.pieces) != shape[0]:
            raise ValueError(f"parameter: pieces {self.pieces} do not add up to {shape[0]} rows")

    def local_shape(self, mesh: Mesh) -> tuple[int, ...]:
        """Shape of one rank's part.

        Raises:
            ValueError: a sharded dimension does not divide by the number of ranks.
        """
        if not isinstance(self.placement, Shard):
            return self.shape
        dim = self.placement.dim % len(self.shape)
        sizes = self.pieces if dim == 0 else (self.shape[dim],)
        for size in sizes:
            if size % mesh.size:
                raise ValueError(
                    f"parameter of shape {self.shape}: {size} along dimension {dim} does not divide by {mesh.size} ranks"
                )
        return tuple(n // mesh.size if d == dim else n for d, n in enumerate(self.shape))

    def local_part(self, whole: torch.Tensor, mesh: Mesh) -> torch.Tensor:
        """This rank's view of one whole piece."""
        if not isinstance(self.placement, Shard) or mesh.size == 1:
            return whole
        dim = self.placement.dim % whole.dim()
        size = whole.shape[dim] // mesh.size
        return whole.narrow(dim, mesh.rank * size, size)

    def tensor(self) -> torch.Tensor:
        """The loaded data, where it is a plain tensor.

        Raises:
            RuntimeError: it has not been loaded, was released after being repacked, or is quantized.
        """
        (part,) = self.parts()
        if not isinstance(part, torch.Tensor):
            raise RuntimeError(f"parameter of shape {self.shape} is quantized ({part.format})")
        return part

    def parts(self) -> tuple[Part, ...]:
        """The loaded data: one part, or several one below the other.

        Raises:
            RuntimeError: it has not been loaded, or was released after being repacked.
        """
        if self.data is None:
            raise RuntimeError(f"parameter of shape {self.shape} is not loaded")
        return self.data if isinstance(self.data, tuple) else (self.data,)

    @property
    def size_bytes(self) -> int:
        """Memory that the loaded data takes."""
        return sum(
            part.numel() * part.element_size() if isinstance(part, torch.Tensor) else part.size_bytes for part in self.parts()
        )
