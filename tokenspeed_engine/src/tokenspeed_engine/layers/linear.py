"""Linear maps and the embedding."""

from __future__ import annotations

import torch
from torch import Tensor

from tokenspeed_engine.layers.module import Module
from tokenspeed_engine.parallel import Mesh, Parameter, Partial, Placement, Replicate, Shard
from tokenspeed_kernel.ops.embedding import embedding
from tokenspeed_kernel.ops.gemm import pack_weight


class Linear(Module):
    """y = x W^T + b.

    Args:
        in_features: K.
        out_features: N; one number, or several for projections that are fused and stacked.
        bias: whether there is one.
        split: None keeps the whole weight on every rank; "out" splits N (output Shard(-1)), "in" splits K (output Partial).
    """

    def __init__(
        self, in_features: int, out_features: int | tuple[int, ...], *, bias: bool = False, split: str | None = None
    ) -> None:
        pieces = (out_features,) if isinstance(out_features, int) else out_features
        weights: dict[str | None, Placement] = {None: Replicate(), "out": Shard(0), "in": Shard(1)}
        outputs: dict[str | None, Placement] = {None: Replicate(), "out": Shard(-1), "in": Partial()}
        self.input_placement = Shard(-1) if split == "in" else Replicate()
        self.output_placement = outputs[split]
        self.weight = Parameter((sum(pieces), in_features), weights[split], pieces, quantizable=True)
        # A bias of a split sum must be added once: it is kept whole, and only rank 0 adds it.
        self.bias = Parameter((sum(pieces),), Shard(0) if split == "out" else Replicate(), pieces) if bias else None
        self._adds_bias = True
        self._is_split_in = split == "in"

    def place(self, mesh: Mesh) -> None:
        """See `Module.place`."""
        self._adds_bias = not self._is_split_in or mesh.rank == 0

    def process_weights(self) -> None:
        """See `Module.process_weights`."""
        # Engines for files of quantized weights round the activations to 8 bits; it concerns no other weight.
        packed = tuple(pack_weight(part, round_activations=True) for part in self.weight.parts())
        # Packing copies on some platforms: the original must not stay beside it. (A tied embedding keeps its own reference.)
        self.weight.data = None
        self._bias = self.bias.tensor() if self.bias is not None and self._adds_bias else None
        self._packed = packed[0]
        self._parts = packed if len(packed) > 1 else ()

    def __call__(self, x: Tensor) -> Tensor:
        """[rows, K] -> [rows, N] (this rank's share)."""
        y = self._joined(x) if self._parts else self._packed(x, self._bias)
        return y if self.finish is None else self.finish(y)

    def _joined(self, x: Tensor) -> Tensor:
        """Pieces of different formats: each its own product."""
        bias, start, products = self._bias, 0, []
        for part in self._parts:
            end = start + part.out_features
            products.append(part(x, None if bias is None else bias[start:end]))
            start = end
        return torch.cat(products, dim=-1)


class Embedding(Module):
    """Rows of a table by token id; the table is split by rows over the ranks.

    Args:
        num_embeddings: V.
        dim: H.
    """

    output_placement: Placement = Partial()

    def __init__(self, num_embeddings: int, dim: int) -> None:
        self.weight = Parameter((num_embeddings, dim), Shard(0), quantizable=True)
        self._first_id = 0

    def place(self, mesh: Mesh) -> None:
        """See `Module.place`."""
        self._first_id = self.weight.local_shape(mesh)[0] * mesh.rank

    def process_weights(self) -> None:
        """See `Module.process_weights`."""
        (self._weight,) = self.weight.parts()
        self._dtype = self.weight.dtype

    def __call__(self, token_ids: Tensor) -> Tensor:
        """[rows] int32 -> [rows, H]; an id outside of this rank's rows gives zeros, so that the ranks' sum is the row."""
        x = embedding(token_ids - self._first_id if self._first_id else token_ids, self._weight, out_dtype=self._dtype)
        return x if self.finish is None else self.finish(x)
