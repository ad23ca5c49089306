"""Fill a model's parameters from a checkpoint, straight into place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from tokenspeed_engine.checkpoint import Checkpoint
from tokenspeed_engine.parallel import Mesh, Parameter, Part
from tokenspeed_engine.weights.errors import MissingTensorsError, WeightsError
from tokenspeed_engine.weights.stored import KeepFormat, Run, kept_formats, runs_of
from tokenspeed_kernel import QuantizedTensor

WeightMap = Mapping[str, tuple[str, ...]]
"""Name of a parameter to the checkpoint tensors that it consists of, stacked along dimension 0."""

# Buffers that some checkpoints carry and every engine computes itself.
_DERIVED = ("rotary_emb.inv_freq", "masked_bias", "attn.bias")


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """How far loading is.

    Attributes:
        done_bytes: bytes of the checkpoint that were read.
        total_bytes: bytes that will be read.
        tensor: the last tensor.
    """

    done_bytes: int
    total_bytes: int
    tensor: str


@dataclass(slots=True)
class LoadReport:
    """What was remarkable about loading.

    Attributes:
        unexpected: tensors of the checkpoint that the model does not use.
        warnings: sentences for the log.
        kept_bytes: block format to bytes of the weights that stay in it.
        dequantized_formats: block formats that were dequantized.
    """

    unexpected: tuple[str, ...] = ()
    warnings: list[str] = field(default_factory=list)
    kept_bytes: dict[str, int] = field(default_factory=dict)
    dequantized_formats: tuple[str, ...] = ()


def load_weights(
    parameters: Mapping[str, Parameter],
    weight_map: WeightMap,
    checkpoint: Checkpoint,
    *,
    device: torch.device,
    dtype: torch.dtype,
    mesh: Mesh | None = None,
    keep: KeepFormat | None = None,
    progress: Callable[[LoadProgress], None] | None = None,
) -> LoadReport:
    """Read every parameter's tensors, take this rank's share, and stack them in place.

    A stacked parameter whose pieces differ in format becomes several parts, one for each run of pieces in one format.

    Args:
        parameters: name to parameter; `data` is set on each.
        weight_map: name to checkpoint tensors, in stacking order.
        checkpoint: the model on disk.
        device: where the parameters live.
        dtype: their type.
        mesh: the ranks; None is one rank.
        keep: says of a block format whether weights stay in it; None dequantizes all. A weight that is split inside of a block is
            dequantized.
        progress: called after each tensor.
    Returns:
        The report.
    Raises:
        MissingTensorsError: all missing tensors are named.  WeightsError: a tensor has another shape than the model.
        CheckpointError: a tensor cannot be read.
    """
    mesh = mesh or Mesh()
    if parameters.keys() != weight_map.keys():
        different = sorted(parameters.keys() ^ weight_map.keys())
        raise RuntimeError(f"the model's weight map and its parameters differ in {different}")
    wanted = [name for names in weight_map.values() for name in names]
    _check_present(wanted, checkpoint)
    total = sum(checkpoint.size_bytes(name) for name in wanted)
    done = 0
    kept: dict[str, int] = {}
    dequantized: set[str] = set()
    for key, parameter in parameters.items():
        _check_shapes(key, parameter, weight_map[key], checkpoint)
        formats = kept_formats(parameter, weight_map[key], checkpoint, mesh, keep)
        stored = {checkpoint.stored_format(name) for name in weight_map[key]}
        dequantized |= {one for one in stored - set(formats) if one is not None}
        parts: list[Part] = []
        for run in runs_of(parameter, weight_map[key], formats, mesh):
            local = _room(run, parameter.local_shape(mesh), checkpoint, dtype, device)
            row = 0
            for name in run.names:
                whole = checkpoint.read(name) if run.format is None else checkpoint.read_stored(name).data
                part = parameter.local_part(whole, mesh)
                local.narrow(0, row, part.shape[0]).copy_(part)
                row += part.shape[0]
                done += checkpoint.size_bytes(name)
                if progress is not None:
                    progress(LoadProgress(done, total, name))
            if run.format is None:
                parts.append(local)
            else:
                matrix = QuantizedTensor(local, run.kernel_format, (run.num_rows, parameter.local_shape(mesh)[1]))
                parts.append(matrix)
                kept[run.format] = kept.get(run.format, 0) + matrix.size_bytes
        parameter.data = parts[0] if len(parts) == 1 else tuple(parts)
        parameter.dtype = dtype
    used = set(wanted)
    unexpected = tuple(n for n in checkpoint.names() if n not in used and not n.endswith(_DERIVED))
    return LoadReport(unexpected, kept_bytes=kept, dequantized_formats=tuple(sorted(dequantized)))


def _room(run: Run, shape: tuple[int, ...], checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Memory for a run of pieces."""
    if run.format is None:
        return torch.empty((run.num_rows, *shape[1:]), dtype=dtype, device=device)
    facts = checkpoint.read_stored(run.names[0])
    row_bytes = shape[1] // facts.block_elements * facts.block_bytes
    return torch.empty((run.num_rows, row_bytes), dtype=torch.uint8, device=device)


def _check_present(wanted: list[str], checkpoint: Checkpoint) -> None:
    present = set(checkpoint.names())
    missing = tuple(dict.fromkeys(name for name in wanted if name not in present))
    if missing:
        shown = ", ".join(missing[:8]) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
        raise MissingTensorsError(
            f"weights: {checkpoint.path} lacks {len(missing)} tensor(s) that the model needs: {shown}. "
            "Fix: fetch the complete checkpoint; its config.json must belong to it.",
            missing,
        )


def _check_shapes(key: str, parameter: Parameter, names: tuple[str, ...], checkpoint: Checkpoint) -> None:
    if len(names) != len(parameter.pieces):
        raise RuntimeError(f"parameter {key}: {len(parameter.pieces)} pieces, {len(names)} tensors in the weight map")
    for name, rows in zip(names, parameter.pieces, strict=True):
        expected = (rows, *parameter.shape[1:])
        if checkpoint.shape(name) != expected:
            raise WeightsError(
                f"weights: {checkpoint.path}: tensor {name!r}: expected shape {expected} from the configuration, "
                f"got {checkpoint.shape(name)}. Fix: the weights and config.json must belong together."
            )
