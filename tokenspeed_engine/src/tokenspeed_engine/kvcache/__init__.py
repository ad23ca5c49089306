"""Paged memory for keys and values."""

from tokenspeed_engine.kvcache.event_publisher import EventEndpointError, KvEventPublisher, translate_events
from tokenspeed_engine.kvcache.host_pool import HostPool, HostPoolError, num_host_pages_for
from tokenspeed_engine.kvcache.page_table import DevicePageTable
from tokenspeed_engine.kvcache.pool import KVLayout, KVPool
from tokenspeed_engine.kvcache.sizing import available_bytes, num_pages_for
from tokenspeed_engine.kvcache.transfers import Completed, TransferEngine, TransferPlan
from tokenspeed_engine.kvcache.trial import KVCacheTypeError, check_cache_dtype
from tokenspeed_engine.kvcache.views import tensor_view

__all__ = [
    "Completed",
    "DevicePageTable",
    "EventEndpointError",
    "HostPool",
    "HostPoolError",
    "KVCacheTypeError",
    "KvEventPublisher",
    "KVLayout",
    "KVPool",
    "TransferEngine",
    "TransferPlan",
    "available_bytes",
    "check_cache_dtype",
    "num_host_pages_for",
    "num_pages_for",
    "tensor_view",
    "translate_events",
]
