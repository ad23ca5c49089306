"""From a checkpoint to a model that is ready to run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from tokenspeed_engine.checkpoint import Checkpoint
from tokenspeed_engine.executor.memory import memory_guard
from tokenspeed_engine.models import EMBEDDING_TENSOR, CausalLM, build_model
from tokenspeed_engine.parallel import Mesh
from tokenspeed_engine.weights import LoadProgress, LoadReport, WeightsError, head_source, keeper, load_weights

HEAD_PARAMETER = "head.weight"


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model with its weights.

    Attributes:
        model: ready to run.
        report: unexpected tensors and warnings.
        size_bytes: memory that the weights take.
        weights: how they are held, for the log: `Q4_1 and Q8_0, as in the file`.
    """

    model: CausalLM
    report: LoadReport
    size_bytes: int
    weights: str


def load_model(
    checkpoint: Checkpoint,
    *,
    max_model_len: int,
    device: torch.device,
    dtype: torch.dtype,
    quantization: str = "none",
    mesh: Mesh | None = None,
    progress: Callable[[LoadProgress], None] | None = None,
) -> LoadedModel:
    """Build the checkpoint's model, load its weights, and prepare them for the kernels.

    Args:
        checkpoint: the model on disk.
        max_model_len: positions that the rotary table covers.
        device: where it runs.
        dtype: compute type.
        quantization: `auto`, `gguf` or `none`, as `ModelConfig` has it.
        mesh: ranks that share the model; None is one.
        progress: called after each tensor.
    Returns:
        The model, and what was remarkable.
    Raises:
        UnsupportedModelError, CheckpointError: see those.  WeightsError: see there; `gguf` is asked for and the checkpoint is
            none.  OutOfMemoryError: the weights do not fit.
    """
    mesh = mesh or Mesh()
    if quantization == "gguf" and checkpoint.format != "gguf":
        raise WeightsError(f"--quantization gguf: {checkpoint.path} is no GGUF file. Fix: use --quantization auto.")
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
        report = load_weights(
            parameters,
            weight_map,
            checkpoint,
            device=device,
            dtype=dtype,
            mesh=mesh,
            keep=keeper(quantization, device),
            progress=progress,
        )
        size_bytes = sum(parameter.size_bytes for parameter in parameters.values())
        if is_tied:
            model.head.weight.data, model.head.weight.dtype = model.embed.weight.data, dtype
        model.prepare(max_model_len, device)
    report.warnings += warnings
    if report.unexpected:
        shown = ", ".join(report.unexpected[:8]) + (" ..." if len(report.unexpected) > 8 else "")
        report.warnings.append(f"{checkpoint.path}: {len(report.unexpected)} tensor(s) are not used by the model: {shown}")
    return LoadedModel(model, report, size_bytes, _described(report, dtype))


def _described(report: LoadReport, dtype: torch.dtype) -> str:
    plain = str(dtype).removeprefix("torch.")
    if report.kept_bytes:
        dequantized = f"; {' and '.join(report.dequantized_formats)} as {plain}" if report.dequantized_formats else ""
        return f"{' and '.join(sorted(report.kept_bytes))} as in the file{dequantized}"
    return plain + (f", dequantized from {' and '.join(report.dequantized_formats)}" if report.dequantized_formats else "")


def _elements(shape: tuple[int, ...]) -> int:
    return int(torch.Size(shape).numel())
