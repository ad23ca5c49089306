"""From a checkpoint to a model that is ready to run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from tokenspeed_engine.checkpoint import Checkpoint
from tokenspeed_engine.executor.memory import memory_guard
from tokenspeed_engine.models import EMBEDDING_TENSOR, CausalLM, build_model
from tokenspeed_engine.parallel import Mesh
from tokenspeed_engine.weights import LoadProgress, LoadReport, head_source, load_weights

HEAD_PARAMETER = "head.weight"


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model with its weights.

    Attributes:
        model: ready to run.
        report: unexpected tensors and warnings.
        size_bytes: memory that the weights take.
    """

    model: CausalLM
    report: LoadReport
    size_bytes: int


def load_model(
    checkpoint: Checkpoint,
    *,
    max_model_len: int,
    device: torch.device,
    dtype: torch.dtype,
    mesh: Mesh | None = None,
    progress: Callable[[LoadProgress], None] | None = None,
) -> LoadedModel:
    """Build the checkpoint's model, load its weights, and prepare them for the kernels.

    Args:
        checkpoint: the model on disk.
        max_model_len: positions that the rotary table covers.
        device: where it runs.
        dtype: compute type.
        mesh: ranks that share the model; None is one.
        progress: called after each tensor.
    Returns:
        The model, and what was remarkable.
    Raises:
        UnsupportedModelError, WeightsError, CheckpointError: see those.  OutOfMemoryError: the weights do not fit.
    """
    mesh = mesh or Mesh()
    model = build_model(checkpoint.config)
    source, warnings = head_source(checkpoint, EMBEDDING_TENSOR)
    weight_map = model.weight_map()
    parameters = dict(model.named_parameters())
    is_tied = source == EMBEDDING_TENSOR
    if is_tied:
        del weight_map[HEAD_PARAMETER], parameters[HEAD_PARAMETER]
    model.parallelize(mesh)
    needed = sum(_elements(parameter.local_shape(mesh)) for parameter in parameters.values()) * dtype.itemsize
    remedy = "use a smaller model, a 16-bit --dtype, or a device with more memory"
    with memory_guard(f"weights ({needed / 2**30:.2f} GiB as {dtype})", device, {}, remedy):
        report = load_weights(parameters, weight_map, checkpoint, device=device, dtype=dtype, mesh=mesh, progress=progress)
        if is_tied:
            model.head.weight.data = model.embed.weight.tensor()
        model.prepare(max_model_len, device)
    report.warnings += warnings
    if report.unexpected:
        shown = ", ".join(report.unexpected[:8]) + (" ..." if len(report.unexpected) > 8 else "")
        report.warnings.append(f"{checkpoint.path}: {len(report.unexpected)} tensor(s) are not used by the model: {shown}")
    return LoadedModel(model, report, needed)


def _elements(shape: tuple[int, ...]) -> int:
    return int(torch.Size(shape).numel())
