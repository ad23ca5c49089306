"""Pages of the pool, their number, and the page table on the device."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from tokenspeed_engine.config import CacheConfig
from tokenspeed_engine.kvcache import DevicePageTable, KVLayout, KVPool, available_bytes, num_pages_for, tensor_view

CPU = torch.device("cpu")
LAYOUT = KVLayout(num_layers=3, num_kv_heads=2, head_dim=8, page_size=16, dtype=torch.float32)


def test_layers_are_apart_and_have_the_kernels_shape() -> None:
    pool = KVPool(LAYOUT, 5, CPU)
    assert pool.size_bytes == 5 * LAYOUT.page_bytes == 5 * 3 * 2 * 16 * 2 * 8 * 4
    for index in range(3):
        for half, cache in enumerate(pool.layer(index)):
            assert cache.shape == (5, 16, 2, 8)
            assert cache.is_contiguous()
            assert int(cache.count_nonzero()) == 0
            cache.fill_(1 + 2 * index + half)
    values = [float(cache[4, 15, 1, 7]) for index in range(3) for cache in pool.layer(index)]
    assert values == [1, 2, 3, 4, 5, 6]
    with pytest.raises(ValueError, match="at least 1 page"):
        KVPool(LAYOUT, 0, CPU)


def test_an_explicit_number_of_pages_wins() -> None:
    assert num_pages_for(CacheConfig(num_pages=7), LAYOUT, CPU, max_useful_pages=3) == 7


def test_bytes_become_whole_pages_and_never_more_than_useful() -> None:
    size = 2**20
    config = CacheConfig(kv_cache_memory_bytes=size)
    assert num_pages_for(config, LAYOUT, CPU, max_useful_pages=10**6) == size // LAYOUT.page_bytes
    assert num_pages_for(config, LAYOUT, CPU, max_useful_pages=9) == 9


def test_the_default_is_a_share_of_what_is_available() -> None:
    pages = num_pages_for(CacheConfig(), LAYOUT, CPU, max_useful_pages=10**9)
    assert 0 < pages * LAYOUT.page_bytes <= min(4 * 2**30, available_bytes())


def test_a_page_that_does_not_fit_says_what_to_do() -> None:
    huge = KVLayout(num_layers=80, num_kv_heads=64, head_dim=256, page_size=4096, dtype=torch.float32)
    message = r"1,048,576 bytes are available, one page of 4096 tokens takes [\d,]+\. Fix: .*--block-size"
    with pytest.raises(MemoryError, match=message):
        num_pages_for(CacheConfig(kv_cache_memory_bytes=2**20), huge, CPU, max_useful_pages=1)


def test_on_a_cpu_the_table_is_the_schedulers_own() -> None:
    host = np.arange(24, dtype=np.int32).reshape(4, 6)
    table = DevicePageTable(host, CPU)
    host[2, 1] = 99
    rows = table.rows(torch.tensor([2, 0]), 3)
    assert rows.tolist() == [[12, 99, 14], [0, 1, 2]]
    assert rows.dtype == torch.int32
    assert rows.is_contiguous()


def test_views_share_memory_and_read_only_arrays_give_no_warning(recwarn: pytest.WarningsRecorder) -> None:
    array = np.arange(4, dtype=np.int32)
    view = tensor_view(array)
    array[1] = 7
    assert view.tolist() == [0, 7, 2, 3]
    array.flags.writeable = False
    assert tensor_view(array).tolist() == [0, 7, 2, 3]
    assert not recwarn.list


@pytest.mark.gpu
def test_on_a_gpu_the_copy_gets_the_updates() -> None:
    host = np.full((3, 4), -1, dtype=np.int32)
    table = DevicePageTable(host, torch.device("cuda"))
    table.update(np.array([[1, 0, 5], [1, 1, 6], [2, 3, 7]], dtype=np.int32))
    assert table.rows(torch.tensor([1, 2], device="cuda"), 4).tolist() == [[5, 6, -1, -1], [-1, -1, -1, 7]]


def test_a_pool_on_the_cpu_takes_memory_where_it_is_written() -> None:
    def resident_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    before = resident_bytes()
    pool = KVPool(KVLayout(2, 2, 64, 16, torch.bfloat16), 32768, torch.device("cpu"))
    assert pool.size_bytes == 2**29
    assert resident_bytes() - before < 2**25
    k_cache, v_cache = pool.layer(1)
    assert k_cache.data_ptr() % 64 == v_cache.data_ptr() % 64 == 0
    assert k_cache.dtype == torch.bfloat16
    assert k_cache.shape == (32768, 16, 2, 64)
    assert not v_cache[::1000].any()
