"""Puts together what stands behind the device's cache: the host's pool, an external store, and the events about them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from tokenspeed_engine.config import CacheConfig
from tokenspeed_engine.core_process import LoadError
from tokenspeed_engine.executor import ModelExecutor
from tokenspeed_engine.kvcache import EventEndpointError, KvEventPublisher, translate_events
from tokenspeed_engine.kvcache.external import (
    ExternalStore,
    ExternalStoreError,
    ExternalTier,
    FileStore,
    MooncakeConfig,
    MooncakeStore,
    PageIdentity,
    StoreWorker,
    root_hash,
    weights_digest,
)
from tokenspeed_engine.loop import CacheTiers
from tokenspeed_engine.scheduler import Scheduler

logger = logging.getLogger(__name__)


def build_tiers(config: CacheConfig, executor: ModelExecutor, scheduler: Scheduler) -> CacheTiers:
    """Open the tiers that are configured.

    Args:
        config: sizes, store and endpoints.
        executor: has the pools.
        scheduler: decides what is moved.
    Returns:
        The tiers; what is not configured is None.
    Raises:
        LoadError: a store cannot be opened or an endpoint not be bound.
    """
    try:
        external = _external(config, executor, scheduler)
        publish = _publisher(config, scheduler)
    except (ExternalStoreError, EventEndpointError, OSError) as error:
        raise LoadError(str(error)) from error
    return CacheTiers(executor if executor.num_host_pages else None, external, publish)


def _external(config: CacheConfig, executor: ModelExecutor, scheduler: Scheduler) -> ExternalTier | None:
    if config.external_cache == "none" or executor.host_pool is None:
        return None
    identity = PageIdentity.of(
        weights_digest(executor.path),
        executor.layout,
        computed_as=f"{executor.weights} in {executor.dtype} on {executor.device.type}",
    )
    store = _store(config, identity, executor.layout.page_bytes)
    return ExternalTier(
        scheduler,
        StoreWorker(store, executor.host_pool),
        page_size=executor.page_size,
        timeout_s=config.external_cache_timeout_s,
        fence=executor.transfer_fence,
    )


def _store(config: CacheConfig, identity: PageIdentity, page_bytes: int) -> ExternalStore:
    if config.external_cache == "mooncake":
        return MooncakeStore(MooncakeConfig.read(config.mooncake_config), identity, page_bytes)
    store = FileStore(config.external_cache_path, identity, page_bytes, int(config.external_cache_gib * 2**30))
    logger.info("external cache: %d pages found in %s", len(store), store.folder)
    return store


def _publisher(config: CacheConfig, scheduler: Scheduler) -> Callable[[Sequence[tuple[Any, ...]]], None] | None:
    if not config.kv_events_endpoint:
        return None
    publisher = KvEventPublisher(
        config.kv_events_endpoint,
        config.kv_events_replay_endpoint,
        buffer_batches=config.kv_events_buffer,
        topic=config.kv_events_topic,
    )
    page_size = scheduler.config.page_size

    def publish(events: Sequence[tuple[Any, ...]]) -> None:
        if events:
            publisher.publish(translate_events(events, page_size, root_hash))

    return publish
