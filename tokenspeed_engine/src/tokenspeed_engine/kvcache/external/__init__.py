"""The third tier: pages kept outside of the engine."""

from tokenspeed_engine.kvcache.external.base import ExternalStore, ExternalStoreError, PageIdentity
from tokenspeed_engine.kvcache.external.file_store import FileStore

__all__ = ["ExternalStore", "ExternalStoreError", "FileStore", "PageIdentity"]
