"""Copies of pages: pairs that overlap, pools of the host, far pages, refusals, the library's form."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tokenspeed_kernel import ShapeError
from tokenspeed_kernel.ops import kvcache
from tokenspeed_kernel.ops.kvcache import copy_pages, transfer_pages


@pytest.fixture(params=["cpu", "reference", "triton"])
def solution(request: pytest.FixtureRequest) -> str:
    """Every solution that runs on this machine without a GPU."""
    if request.param == "triton":
        pytest.importorskip("triton", reason="needs triton")
        if torch.cuda.is_available():
            pytest.skip("the interpreter is for machines without a GPU")
    return str(request.param)


def _ids(*pages: int) -> torch.Tensor:
    return torch.tensor(pages)


def test_all_pairs_at_once(solution: str) -> None:
    before = torch.randn(6, 4, 3)
    for sources, destinations in (((0, 1), (1, 0)), ((0, 1, 2), (1, 2, 3)), ((3, 2, 1), (2, 1, 0)), ((5, 5), (0, 1))):
        pool = before.clone()
        copy_pages(pool, _ids(*sources), _ids(*destinations), solution=solution)
        want = before.clone()
        want[list(destinations)] = before[list(sources)]
        assert torch.equal(pool, want)


def test_given_scratch_memory_is_used_and_need_not_be_larger() -> None:
    pytest.importorskip("triton", reason="needs triton")
    if torch.cuda.is_available():
        pytest.skip("the interpreter is for machines without a GPU")
    pool, scratch = torch.randn(4, 5), torch.full((2, 5), float("nan"))
    first = pool[:2].clone()
    copy_pages(pool, _ids(0, 1), _ids(1, 0), scratch=scratch, solution="triton")
    assert torch.equal(pool[:2], first.flip(0))
    assert torch.equal(scratch, first)


def test_pages_beyond_2_31_elements(tmp_path: Path, solution: str) -> None:
    """Report K3: page 8 starts where an offset of 32 bits has wrapped."""
    path = tmp_path / "pool"
    with path.open("wb") as file:
        file.truncate(2**31 + 64)
    if path.stat().st_blocks * 512 > 2**20:
        pytest.skip("needs a file system with sparse files")
    pool = torch.from_file(str(path), shared=True, size=2**31 + 64, dtype=torch.uint8).as_strided((9, 24), (2**28, 1))
    pool[8] = torch.arange(24)
    copy_pages(pool, _ids(8), _ids(0), solution=solution)
    assert torch.equal(pool[0], pool[8])
    near = torch.zeros(2, 24, dtype=torch.uint8)
    transfer_pages(pool, near, _ids(8, -1), _ids(1, 0), solution=solution)
    assert torch.equal(near[1], pool[8])
    pool[8] = 0
    transfer_pages(near, pool, _ids(1), _ids(8), solution=solution)
    assert pool[8].tolist() == list(range(24))


def test_layers_of_one_pool(solution: str) -> None:
    """Layer by layer: a slice of a larger pool is a pool."""
    device_pool, host_pool = torch.randn(3, 8, 4, 2, 5), torch.zeros(3, 6, 4, 2, 5)
    for layer in range(3):
        transfer_pages(device_pool[layer], host_pool[layer], _ids(7, 2), _ids(0, 5), solution=solution)
    assert torch.equal(host_pool[:, [0, 5]], device_pool[:, [7, 2]])
    assert not bool(host_pool[:, 1:5].any())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_host_pools_on_a_stream_of_their_own(dtype: torch.dtype) -> None:
    """Out to pinned memory and back, layer by layer, while the current stream goes on."""
    layers, pages, page = 4, 64, (16, 8, 128)
    values = torch.randint(0, 120, (layers, pages, *page), dtype=torch.uint8).to(torch.float32)
    device_pool = values.to("cuda").to(dtype)
    host_pool = torch.zeros((layers, pages, *page), dtype=torch.float32).to(dtype).pin_memory()
    sources, destinations = torch.randperm(pages).cuda(), torch.randperm(pages).cuda()
    side, ready = torch.cuda.Stream(), torch.cuda.Event()
    ready.record()
    side.wait_event(ready)
    done = []
    for layer in range(layers):
        transfer_pages(device_pool[layer], host_pool[layer], sources, destinations, stream=side)
        done.append(torch.cuda.Event())
        done[-1].record(side)
    for layer in range(layers):
        done[layer].synchronize()
        got, want = host_pool[layer][destinations.cpu()].float(), device_pool[layer][sources].float().cpu()
        assert torch.equal(got, want)
    back = torch.zeros_like(device_pool)
    for layer in range(layers):
        transfer_pages(host_pool[layer], back[layer], destinations, sources, stream=side)
    torch.cuda.current_stream().wait_stream(side)
    assert torch.equal(back.float(), device_pool.float())


@pytest.mark.gpu
def test_captured_copies_and_transfers_are_replayed() -> None:
    pool = torch.randn(64, 16, 8, 128, device="cuda", dtype=torch.bfloat16)
    other, scratch = torch.zeros_like(pool), torch.empty_like(pool[:8])
    sources, destinations = torch.arange(8).cuda(), torch.arange(8, 16).cuda()

    def work() -> None:
        copy_pages(pool, sources, destinations, scratch=scratch)
        transfer_pages(pool, other, destinations, sources)

    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    pool[:8] = torch.randn(8, 16, 8, 128).to(pool)
    graph.replay()
    assert torch.equal(pool[8:16], pool[:8])
    assert torch.equal(other[:8], pool[:8])


@pytest.mark.gpu
def test_pageable_memory_and_wrong_places_are_refused() -> None:
    pool, host, pages = torch.zeros(4, 8, device="cuda"), torch.zeros(4, 8), _ids(0)
    with pytest.raises(ShapeError, match="src_pool in pinned memory"):
        transfer_pages(host, pool, pages.cuda(), pages.cuda())
    with pytest.raises(ShapeError, match="src_pages on cuda:0, got cpu"):
        transfer_pages(host.pin_memory(), pool, pages, pages.cuda())
    with pytest.raises(ShapeError, match="src_pages on cuda:0, as the pool, got cpu"):
        copy_pages(pool, pages, pages.cuda())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda p: copy_pages(p, _ids(0).float(), _ids(1)), r"kvcache\.copy_pages: .* src_pages \[num_pairs\] int32 or"),
        (lambda p: copy_pages(p, _ids(0, 1), _ids(1)), "as many src_pages as dst_pages, got 2 and 1"),
        (lambda p: copy_pages(p.transpose(1, 2), _ids(0), _ids(1)), "pool .num_pages, .... whose pages are contiguous"),
        (lambda p: copy_pages(p, _ids(0), _ids(1), scratch=p[:0]), r"scratch \[at least 1, 4, 3\]"),
        (lambda p: copy_pages(p, _ids(0), _ids(1), scratch=p[:1].half()), r"scratch \[at least 1, 4, 3\] torch\.float32"),
        (lambda p: transfer_pages(p, p[:, :2], _ids(0), _ids(1)), r"dst_pool \[num_pages, 4, 3\] torch\.float32, as src_pool"),
        (lambda p: transfer_pages(p, p.half(), _ids(0), _ids(1)), r"dst_pool \[num_pages, 4, 3\] torch\.float32, as src_pool"),
        (lambda p: transfer_pages(p, p, _ids(0)[None], _ids(1)), r"src_pages \[num_pairs\]"),
    ],
)
def test_bad_operands_are_refused(call: Callable[[torch.Tensor], None], message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        call(torch.zeros(4, 4, 3))


def test_opcheck() -> None:
    pool, other = torch.randn(4, 3), torch.randn(5, 3)
    torch.library.opcheck(torch.ops.tokenspeed.copy_pages.default, (pool, _ids(0, 1), _ids(1, 0), None))
    torch.library.opcheck(torch.ops.tokenspeed.transfer_pages.default, (pool, other, _ids(0, -1), _ids(4, 0), None))


def test_compiled_without_a_graph_break_equals_eager() -> None:
    def model(pool: torch.Tensor, other: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
        copy_pages(pool, pages, pages.flip(0))
        transfer_pages(pool, other, pages, pages)
        return other * 2

    made = torch.randn(4, 3)
    eager, traced = ((made.clone(), torch.zeros(4, 3), _ids(0, 3)) for _ in range(2))
    want, got = model(*eager), torch.compile(model, fullgraph=True, backend="aot_eager")(*traced)
    assert torch.equal(want, got)
    assert torch.equal(eager[0], traced[0])


def test_eager_call_does_not_enter_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("the dispatcher was entered")

    for name in ("_COPY_LIBRARY", "_TRANSFER_LIBRARY"):
        monkeypatch.setattr(kvcache.pages, name, refuse)
    pool = torch.zeros(4, 3)
    copy_pages(pool, _ids(0), _ids(1))
    transfer_pages(pool, torch.zeros(4, 3), _ids(0), _ids(1))


@pytest.mark.parametrize("programs", [1, 3, 100])
def test_few_programs_copy_what_many_do(tmp_path: Path, programs: int) -> None:
    """How a pool of the host is reached: several blocks a page, pairs out of range, a page whose offset passes 32 bits."""
    pytest.importorskip("triton", reason="needs triton")
    if torch.cuda.is_available():
        pytest.skip("the interpreter is for machines without a GPU")
    from tokenspeed_kernel.ops.kvcache.triton.pages import _launch

    path = tmp_path / "pool"
    with path.open("wb") as file:
        file.truncate(2**31 + 40_002)
    if path.stat().st_blocks * 512 > 2**20:
        pytest.skip("needs a file system with sparse files")
    flat = torch.from_file(str(path), shared=True, size=2**31 + 40_002, dtype=torch.uint8)
    source = flat.as_strided((9, 40_001), (2**28, 1))
    for page in (1, 8):
        source[page] = torch.randint(0, 256, (40_001,), dtype=torch.uint8)
    target = torch.zeros(4, 40_001, dtype=torch.uint8)
    sources, destinations = _ids(8, 9, 1, -1, 1), _ids(2, 0, 3, 1, 4)
    _launch(source, target, sources, destinations, 9, 4, programs=programs)
    assert torch.equal(target, torch.stack((source[0], source[0], source[8], source[1])))
