"""Puts the real parts of an engine core together: executor and scheduler of the configured model."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

from tokenspeed_engine.config import CoreConfig
from tokenspeed_engine.core_process import CoreParts, LoadError
from tokenspeed_engine.core_tiers import build_tiers
from tokenspeed_engine.executor import ModelExecutor, scheduler_config, warm_up
from tokenspeed_engine.ipc import LoadProgress
from tokenspeed_engine.models import UnsupportedModelError
from tokenspeed_engine.scheduler import Scheduler
from tokenspeed_engine.types import ModelInfo
from tokenspeed_engine.weights import LoadProgress as WeightProgress
from tokenspeed_engine.weights import WeightsError

logger = logging.getLogger(__name__)

_REPORT_INTERVAL_S = 0.2


def build_core(config: CoreConfig, report: Callable[[LoadProgress], object]) -> CoreParts:
    """Load the model, size cache and steps.

    Args:
        config: the core's configuration.
        report: told how far the loading is.
    Returns:
        the parts, ready to run.
    Raises:
        LoadError: model, device or sizes cannot work as configured.
    """
    try:
        report(LoadProgress("checkpoint"))
        executor = ModelExecutor(config.model, config.cache, config.scheduling, progress=_Throttle(report))
        limits = scheduler_config(executor, config.cache, config.scheduling)
        report(LoadProgress("warm-up"))
        warm_up(executor, scheduler_config(executor, config.cache, config.scheduling, with_tiers=False))
        scheduler = Scheduler(limits)
        tiers = build_tiers(config.cache, executor, scheduler)
    except (ValueError, MemoryError, WeightsError, UnsupportedModelError) as error:
        raise LoadError(str(error)) from error
    for warning in executor.warnings:
        logger.warning("%s", warning)
    info = ModelInfo(
        name=model_name(config.model.model, Path(executor.path)),
        architecture=executor.architecture,
        vocab_size=executor.vocab_size,
        max_model_len=executor.max_model_len,
        num_pages=executor.num_pages,
        page_size=executor.page_size,
        eos_token_ids=tuple(executor.eos_token_ids),
        dtype=str(executor.dtype).removeprefix("torch."),
        device=str(executor.device),
        weights=executor.weights,
        weights_bytes=executor.weights_bytes,
        kv_cache_bytes=executor.kv_cache_bytes,
        keeps_sessions=limits.enable_prefix_cache and limits.session_ttl_us > 0,
    )
    return CoreParts(executor, scheduler, info, scheduler.config.max_num_batched_tokens, tiers)


def model_name(model: str, path: Path) -> str:
    """The name of a model in the API when none is given: its Hugging Face id, or the last part of its path without suffix."""
    if model and not Path(model).expanduser().exists():
        return model
    return path.stem if path.is_file() else path.name


class _Throttle:
    """Passes on the progress of the weights a few times a second, and always the last of it."""

    def __init__(self, report: Callable[[LoadProgress], object]) -> None:
        self._report = report
        self._last_s = 0.0

    def __call__(self, progress: WeightProgress) -> None:
        now_s = time.monotonic()
        if progress.done_bytes < progress.total_bytes and now_s - self._last_s < _REPORT_INTERVAL_S:
            return
        self._last_s = now_s
        self._report(LoadProgress("weights", progress.done_bytes, progress.total_bytes, progress.tensor))
