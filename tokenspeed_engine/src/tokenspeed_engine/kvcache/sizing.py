"""How many pages fit."""

from __future__ import annotations

import os

import torch

from tokenspeed_engine.config import CacheConfig
from tokenspeed_engine.kvcache.pool import KVLayout

_CPU_SHARE = 4
_CPU_MOST_BYTES = 4 * 2**30


def num_pages_for(config: CacheConfig, layout: KVLayout, device: torch.device, *, max_useful_pages: int) -> int:
    """Decide the size of the pool.

    Args:
        config: an explicit number of pages or bytes wins over a share of the memory.
        layout: shape of a page.
        device: whose memory is shared out; the weights must be loaded already.
        max_useful_pages: more are never needed (all sequences at full length).
    Returns:
        Number of pages, at least 1.
    Raises:
        MemoryError: not one page fits; the message gives the sizes and the remedy.
    """
    if config.num_pages is not None:
        return config.num_pages
    budget = config.kv_cache_memory_bytes
    if budget is None:
        budget = _free_gpu_bytes(config, device) if device.type == "cuda" else min(available_bytes() // _CPU_SHARE, _CPU_MOST_BYTES)
    pages = budget // layout.page_bytes
    if pages < 1:
        raise MemoryError(
            f"kv cache on {device}: {budget:,} bytes are available, one page of {layout.page_size} tokens takes "
            f"{layout.page_bytes:,}. Fix: give more memory (--kv-cache-memory-bytes) or use a smaller --block-size."
        )
    return min(pages, max_useful_pages)


def available_bytes() -> int:
    """Memory that this process may still take on the host: the kernel's estimate, bounded by the control group's limit."""
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            facts = dict(line.split(":", 1) for line in file if ":" in line)
        available = int(facts["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        pass  # not Linux: free pages are the estimate that is left
    try:
        with (
            open("/sys/fs/cgroup/memory.max", encoding="ascii") as limit,
            open("/sys/fs/cgroup/memory.current", encoding="ascii") as current,
        ):
            text = limit.read().strip()
            if text != "max":
                available = min(available, int(text) - int(current.read()))
    except (OSError, ValueError):
        pass  # no control group of version 2
    return max(available, 0)


def _free_gpu_bytes(config: CacheConfig, device: torch.device) -> int:
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    taken = total - free
    return max(0, int(total * config.gpu_memory_utilization) - taken)
