"""The third tier: pages kept outside of the engine."""

from tokenspeed_engine.kvcache.external.base import ExternalStore, ExternalStoreError, PageIdentity
from tokenspeed_engine.kvcache.external.file_store import FileStore
from tokenspeed_engine.kvcache.external.identity import weights_digest
from tokenspeed_engine.kvcache.external.keys import page_hashes, root_hash
from tokenspeed_engine.kvcache.external.mooncake_store import MooncakeConfig, MooncakeStore
from tokenspeed_engine.kvcache.external.tier import ExternalTier, Fetched
from tokenspeed_engine.kvcache.external.worker import StoreResult, StoreWorker

__all__ = [
    "ExternalStore",
    "ExternalStoreError",
    "ExternalTier",
    "Fetched",
    "FileStore",
    "MooncakeConfig",
    "MooncakeStore",
    "PageIdentity",
    "StoreResult",
    "StoreWorker",
    "page_hashes",
    "root_hash",
    "weights_digest",
]
