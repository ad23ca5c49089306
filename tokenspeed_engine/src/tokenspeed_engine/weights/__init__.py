"""From a checkpoint's tensors to a model's parameters."""

from tokenspeed_engine.weights.errors import MissingTensorsError, WeightsError
from tokenspeed_engine.weights.head import HEAD, head_source, is_tied
from tokenspeed_engine.weights.loader import LoadProgress, LoadReport, WeightMap, load_weights

__all__ = [
    "HEAD",
    "LoadProgress",
    "LoadReport",
    "MissingTensorsError",
    "WeightMap",
    "WeightsError",
    "head_source",
    "is_tied",
    "load_weights",
]
