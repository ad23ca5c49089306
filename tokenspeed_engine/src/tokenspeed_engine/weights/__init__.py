"""From a checkpoint's tensors to a model's parameters."""

from tokenspeed_engine.weights.errors import MissingTensorsError, WeightsError
from tokenspeed_engine.weights.head import HEAD, head_source, is_tied
from tokenspeed_engine.weights.loader import LoadProgress, LoadReport, WeightMap, load_weights
from tokenspeed_engine.weights.stored import KeepFormat, fast_kernel, keeper, kernel_format

__all__ = [
    "HEAD",
    "KeepFormat",
    "LoadProgress",
    "LoadReport",
    "MissingTensorsError",
    "WeightMap",
    "WeightsError",
    "fast_kernel",
    "head_source",
    "is_tied",
    "keeper",
    "kernel_format",
    "load_weights",
]
