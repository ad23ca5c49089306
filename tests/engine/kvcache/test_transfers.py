"""The host pool, and copies between it and the device pool: every byte, every order, every failure."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tokenspeed_engine.kvcache import HostPool, HostPoolError, KVLayout, KVPool, TransferEngine, available_bytes, num_host_pages_for
from tokenspeed_kernel.ops.kvcache import transfer_pages

LAYOUT = KVLayout(num_layers=3, num_kv_heads=2, head_dim=8, page_size=4, dtype=torch.float32)


def pairs(*rows: tuple[int, int]) -> NDArray[np.int32]:
    """[n, 2] int32."""
    return np.array(rows, dtype=np.int32).reshape(-1, 2)


@dataclass
class Copies:
    """The part of a plan that the transfer engine reads."""

    write_backs: NDArray[np.int32] = field(default_factory=pairs)
    write_back_ids: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    load_backs: NDArray[np.int32] = field(default_factory=pairs)
    load_back_ids: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, dtype=np.int64))


def written(ids: list[int], *rows: tuple[int, int]) -> Copies:
    """(device page, host page) each."""
    return Copies(write_backs=pairs(*rows), write_back_ids=np.array(ids, dtype=np.int64))


def loaded(ids: list[int], *rows: tuple[int, int]) -> Copies:
    """(host page, device page) each."""
    return Copies(load_backs=pairs(*rows), load_back_ids=np.array(ids, dtype=np.int64))


def fill(pool: KVPool, seed: int = 0) -> None:
    """Random bytes everywhere, NaN patterns included: a copy must not care what they mean."""
    generator = torch.Generator().manual_seed(seed)
    rows = pool.rows
    size = rows.numel() * rows.element_size()
    random = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)
    pool.rows.view(torch.uint8).view(-1).copy_(random)


def device_page(pool: KVPool, page: int) -> bytes:
    """The page's bytes in the order of the host's pool."""
    caches = [cache[page] for layer in range(pool.layout.num_layers) for cache in pool.layer(layer)]
    return torch.stack(caches).cpu().contiguous().view(torch.uint8).numpy().tobytes()


def host_page(pool: HostPool, page: int) -> bytes:
    """The page's bytes."""
    return pool.page(page).tobytes()


CPU = torch.device("cpu")


@pytest.fixture
def parts() -> tuple[KVPool, HostPool, TransferEngine]:
    device, host = KVPool(LAYOUT, 6, CPU), HostPool(LAYOUT, 5, CPU)
    fill(device)
    return device, host, TransferEngine(device, host)


def test_a_host_page_is_one_piece_with_all_layers() -> None:
    pool = HostPool(LAYOUT, 5, CPU)
    assert pool.size_bytes == 5 * LAYOUT.page_bytes
    pool.page(3)[:] = 7
    assert pool.page(3).nbytes == LAYOUT.page_bytes
    counts = [int((pool.page(page) == 7).sum()) for page in range(5)]
    assert counts == [0, 0, 0, LAYOUT.page_bytes, 0]
    rows = pool.rows.view(torch.uint8)
    assert [bool((row == 7).all()) for row in rows] == [page == 3 for page in range(5) for _ in range(6)]
    with pytest.raises(IndexError, match=r"expected a page in 0\.\.4, got 5"):
        pool.page(5)


def test_a_size_becomes_whole_pages() -> None:
    assert num_host_pages_for(0, LAYOUT) == 0
    assert num_host_pages_for(1, LAYOUT) == 2**30 // LAYOUT.page_bytes
    with pytest.raises(HostPoolError, match=r"--host-cache-gib 1e-06 is 1,073 bytes, one page of 4 tokens takes 1,536\. Fix: "):
        num_host_pages_for(1e-6, LAYOUT)


def test_a_pool_beyond_the_memory_is_refused_before_it_is_taken() -> None:
    pages = available_bytes() // LAYOUT.page_bytes + 1
    with pytest.raises(HostPoolError, match=r"are available on the host\. Fix: lower --host-cache-gib"):
        HostPool(LAYOUT, pages, CPU)


def test_pages_come_back_byte_for_byte_to_other_places(parts: tuple[KVPool, HostPool, TransferEngine]) -> None:
    device, host, engine = parts
    before = [device_page(device, page) for page in range(6)]
    engine.start(written([0, 0, 1], (0, 4), (5, 0), (2, 2)))
    done = engine.poll()
    assert (done.ids.tolist(), done.ok.tolist()) == ([0, 1], [True, True])
    assert [host_page(host, page) for page in (4, 0, 2)] == [before[page] for page in (0, 5, 2)]
    assert not any(host.page(page).any() for page in (1, 3)), "a page that nobody named was written"
    device.rows.zero_()
    engine.start(loaded([2, 2], (0, 1), (2, 3)))
    assert engine.poll().ids.tolist() == [2]
    zero = bytes(LAYOUT.page_bytes)
    assert [device_page(device, page) for page in range(6)] == [zero, before[5], zero, before[2], zero, zero]
    assert (engine.num_written_pages, engine.num_loaded_pages, engine.num_failed) == (3, 2, 0)


def test_write_backs_of_a_plan_come_before_its_load_backs(parts: tuple[KVPool, HostPool, TransferEngine]) -> None:
    """A plan may move a page out, and another into its place."""
    device, host, engine = parts
    old, new = device_page(device, 1), device_page(device, 4)
    engine.start(written([0], (4, 3)))
    plan = written([1], (1, 0))
    plan.load_backs, plan.load_back_ids = pairs((3, 1)), np.array([2], dtype=np.int64)
    engine.start(plan)
    assert engine.poll().ids.tolist() == [0, 1, 2]
    assert host_page(host, 0) == old
    assert device_page(device, 1) == new


def test_nothing_is_told_twice_and_an_empty_plan_starts_nothing(parts: tuple[KVPool, HostPool, TransferEngine]) -> None:
    _, _, engine = parts
    engine.start(Copies())
    assert not engine.has_pending
    assert not engine.poll(wait=True)
    engine.start(written([7], (0, 0)))
    assert engine.has_pending
    assert engine.poll()
    assert not engine.poll()
    assert not engine.has_pending


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_copy_that_fails_concerns_its_transfer_alone(failing: int) -> None:
    device, host = KVPool(LAYOUT, 6, CPU), HostPool(LAYOUT, 5, CPU)
    fill(device)
    calls: list[int] = []

    def copy(*operands: torch.Tensor) -> None:
        calls.append(1)
        if len(calls) - 1 == failing:
            raise RuntimeError("the bus is on fire")
        transfer_pages(*operands)

    engine = TransferEngine(device, host, copy_rows=copy)
    pages = [device_page(device, page) for page in range(6)]
    engine.start(written([0, 1, 2], (0, 0), (1, 1), (2, 2)))
    done = engine.poll()
    assert done.ids.tolist() == [0, 1, 2]
    assert done.ok.tolist() == [index != failing for index in range(3)]
    for index in range(3):
        assert (host_page(host, index) == pages[index]) is (index != failing)
    assert engine.num_failed == 1


def test_a_load_that_fails_in_a_later_layer_is_told_as_failed() -> None:
    device, host = KVPool(LAYOUT, 6, CPU), HostPool(LAYOUT, 5, CPU)
    calls: list[int] = []

    def copy(*operands: torch.Tensor) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("the bus is on fire")
        transfer_pages(*operands)

    engine = TransferEngine(device, host, copy_rows=copy)
    engine.start(loaded([4, 5], (0, 0), (1, 1)))
    done = engine.poll()
    assert (done.ids.tolist(), done.ok.tolist()) == ([4, 5], [False, True])


def test_pools_of_two_layouts_are_refused() -> None:
    other = KVLayout(LAYOUT.num_layers, LAYOUT.num_kv_heads, LAYOUT.head_dim, 8, LAYOUT.dtype)
    with pytest.raises(ValueError, match="expected pools of one layout"):
        TransferEngine(KVPool(LAYOUT, 2, CPU), HostPool(other, 2, CPU))


@pytest.mark.gpu
def test_on_a_gpu_bytes_are_equal_and_layers_wait_for_their_own_copies() -> None:
    """Loads are queued behind a long kernel, so that compute that did not wait would read what was there before."""
    cuda = torch.device("cuda", 0)
    layout = KVLayout(num_layers=8, num_kv_heads=4, head_dim=64, page_size=16, dtype=torch.bfloat16)
    device, host = KVPool(layout, 64, cuda), HostPool(layout, 64, cuda)
    assert host.rows.is_pinned()
    engine = TransferEngine(device, host)
    fill(device)
    before = [device_page(device, page) for page in range(64)]
    pages = np.arange(64)
    engine.start(written([0] * 64, *zip(pages.tolist(), pages[::-1].tolist(), strict=True)))
    while not (done := engine.poll(wait=True)):
        pass
    assert (done.ids.tolist(), done.ok.tolist()) == ([0], [True])
    assert [host_page(host, 63 - page) for page in range(64)] == before
    device.rows.zero_()
    torch.cuda.synchronize()
    # The stream of the copies is held up; the layers' readers are queued at once.
    torch.cuda._sleep(20_000_000)
    engine.start(loaded([1] * 64, *zip(pages[::-1].tolist(), pages.tolist(), strict=True)))
    assert engine.poll().ids.tolist() == [1], "a load-back is over for the caller once it is queued"
    copies = [[cache.clone() for cache in device.layer(layer)] for layer in range(layout.num_layers)]
    engine.fence()()
    torch.cuda.synchronize()
    read = [torch.stack([cache[page] for layer in copies for cache in layer]).cpu() for page in range(64)]
    assert [one.contiguous().view(torch.uint8).numpy().tobytes() for one in read] == before
    engine.close()
    host.close()
