"""The third tier: pages kept outside of the engine."""

from tokenspeed_engine.kvcache.external.base import ExternalStore, ExternalStoreError, PageIdentity
from tokenspeed_engine.kvcache.external.file_store import FileStore
from tokenspeed_engine.kvcache.external.mooncake_store import MooncakeConfig, MooncakeStore
from tokenspeed_engine.kvcache.external.worker import StoreResult, StoreWorker

__all__ = [
    "ExternalStore",
    "ExternalStoreError",
    "FileStore",
    "MooncakeConfig",
    "MooncakeStore",
    "PageIdentity",
    "StoreResult",
    "StoreWorker",
]
