"""Plans in, sampled tokens out."""

from tokenspeed_engine.executor.devices import DeviceError, resolve_device, resolve_dtype
from tokenspeed_engine.executor.executor import ModelExecutor, StepResult
from tokenspeed_engine.executor.limits import scheduler_config
from tokenspeed_engine.executor.loading import LoadedModel, load_model
from tokenspeed_engine.executor.memory import OutOfMemoryError
from tokenspeed_engine.executor.offline import OfflineEngine, OfflineOutput
from tokenspeed_engine.executor.runner import ModelRunner, StepLimits
from tokenspeed_engine.executor.warmup import warm_up

__all__ = [
    "DeviceError",
    "LoadedModel",
    "ModelExecutor",
    "ModelRunner",
    "OfflineEngine",
    "OfflineOutput",
    "OutOfMemoryError",
    "StepLimits",
    "StepResult",
    "load_model",
    "resolve_device",
    "resolve_dtype",
    "scheduler_config",
    "warm_up",
]
