"""Which weights stay as the file stores them, and how the pieces of a stacked one fall into runs of one format."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from tokenspeed_engine.checkpoint import Checkpoint
from tokenspeed_engine.parallel import Mesh, Parameter, Shard
from tokenspeed_kernel import Band, Format
from tokenspeed_kernel.ops.gemm import packing_kernel

KeepFormat = Callable[[str], bool]
"""Takes the name of a block format (Q4_1), and says whether weights stay in it."""


def kernel_format(name: str) -> Format:
    """The kernel package's name for a block format of a file: Q4_1 is gguf_q4_1@inline.

    Raises:
        FormatError: it has none.
    """
    return Format.parse(f"gguf_{name.lower()}@inline")


def fast_kernel(stored: str, device: torch.device) -> str | None:
    """Name of the kernel made for products with weights of a block format on a device, or None where there is none.

    A portable kernel reads less memory too, but unpacks at a price that only a kernel made for the format is known to earn back.
    """
    kernel = packing_kernel(kernel_format(stored), device, round_activations=True)
    return kernel.name if kernel.band >= Band.PERFORMANT else None


def keeper(quantization: str, device: torch.device) -> KeepFormat | None:
    """What decides whether weights of a format stay in it.

    Args:
        quantization: `auto`, `gguf` or `none`, as `ModelConfig` has it.
        device: where the model runs.
    """
    if quantization == "none":
        return None
    if quantization == "gguf":
        return lambda stored: True
    return functools.cache(lambda stored: fast_kernel(stored, device) is not None)


@dataclass(frozen=True, slots=True)
class Run:
    """Successive pieces of a parameter in one format.

    Attributes:
        format: block format, or None for plain numbers.
        names: their tensors.
        num_rows: rows of this rank's share of all of them.
    """

    format: str | None
    names: tuple[str, ...]
    num_rows: int

    @property
    def kernel_format(self) -> Format:
        """The kernel package's name for the block format."""
        assert self.format is not None
        return kernel_format(self.format)


def kept_formats(
    parameter: Parameter, names: Sequence[str], checkpoint: Checkpoint, mesh: Mesh, keep: KeepFormat | None
) -> list[str | None]:
    """The format in which each piece stays; None for those that become plain numbers."""
    found: list[str | None] = []
    for name in names:
        stored = checkpoint.stored_format(name) if parameter.quantizable and keep is not None else None
        if stored is None or keep is None or not keep(stored):
            found.append(None)
            continue
        columns = parameter.local_shape(mesh)[1]
        is_whole = not _splits_columns(parameter, mesh) or columns % checkpoint.read_stored(name).block_elements == 0
        found.append(stored if is_whole else None)
    return found


def runs_of(parameter: Parameter, names: Sequence[str], formats: Sequence[str | None], mesh: Mesh) -> list[Run]:
    """Successive pieces of one format together."""
    share = mesh.size if isinstance(parameter.placement, Shard) and parameter.placement.dim == 0 else 1
    pieces = zip(formats, names, parameter.pieces, strict=True)
    runs = []
    for one, members in itertools.groupby(pieces, key=lambda piece: piece[0]):
        listed = list(members)
        runs.append(Run(one, tuple(name for _, name, _ in listed), sum(rows // share for _, _, rows in listed)))
    return runs


def _splits_columns(parameter: Parameter, mesh: Mesh) -> bool:
    placement = parameter.placement
    return mesh.size > 1 and isinstance(placement, Shard) and placement.dim % len(parameter.shape) == 1
