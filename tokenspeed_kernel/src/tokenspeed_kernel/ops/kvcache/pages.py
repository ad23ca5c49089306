"""Public ops that move whole pages: within a pool, and between pools of the device and of the host."""

from __future__ import annotations

from typing import Final

import torch
from torch.compiler import is_compiling

from tokenspeed_kernel.dispatch import NEW_CALL, BoundOp, register_library_op
from tokenspeed_kernel.errors import ShapeError
from tokenspeed_kernel.ops.kvcache.contract import COPY_PAGES, TRANSFER_PAGES
from tokenspeed_kernel.ops.operands import OPERAND_ERRORS, refuse_kinds

__all__ = ["copy_pages", "transfer_pages"]

_COPY: Final = BoundOp(COPY_PAGES)
_TRANSFER: Final = BoundOp(TRANSFER_PAGES)
_INTS: Final = (torch.int32, torch.int64)


def copy_pages(
    pool: torch.Tensor,
    src_pages: torch.Tensor,
    dst_pages: torch.Tensor,
    *,
    scratch: torch.Tensor | None = None,
    solution: str | None = None,
) -> None:
    """Copy pages of a pool to other pages of it, in place: `pool[dst_pages[i]] = pool[src_pages[i]]` for all pairs at once.

    Every source is read before any destination is written, so that a page may be both: pairs (a, b), (b, a) exchange two pages, and
    (a, b), (b, c) shift them. A pair with a page outside of the pool (-1, say) is ignored. No two pairs may have the same
    destination.

    Args:
        pool: [num_pages, ...] of any dtype; each page contiguous, the pages at any distance.
        src_pages: [num_pairs] int32 or int64.
        dst_pages: as src_pages.
        scratch: optional, at least num_pairs pages of the pool's shape and dtype, contiguous, for pages on their way; made where
            absent. The compiled form of the op makes its own.
        solution: solution or kernel to use instead of the best that qualifies.
    Returns:
        None; the pool is written.
    Raises:
        ShapeError: shapes, dtypes, strides or devices disagree.  NoKernelError: nothing qualifies.
    Source: copy on write of pages, arXiv:2309.06180, section 4.4.
    """
    if is_compiling():
        _COPY_LIBRARY(pool, src_pages, dst_pages, solution)
        return
    try:
        operands: tuple[torch.Tensor, ...] = (pool, src_pages, dst_pages)
        if scratch is not None:
            operands += (scratch,)
        key = (src_pages.shape, scratch is None, solution)
        looks_same, kernel = _COPY.seen.get(key, NEW_CALL)
        if not looks_same(*operands):
            op = COPY_PAGES.name
            _check_pages(op, src_pages, dst_pages)
            _check_pool(op, "pool", pool)
            for name, pages in (("src_pages", src_pages), ("dst_pages", dst_pages)):
                if pages.device != pool.device:
                    raise ShapeError(
                        op, expected=f"{name} on {pool.device}, as the pool", got=str(pages.device), fix=f"move {name} there"
                    )
            if scratch is not None:
                fits = (
                    scratch.dim() == pool.dim() and scratch.shape[0] >= src_pages.shape[0] and scratch.shape[1:] == pool.shape[1:]
                )
                if not fits or scratch.dtype is not pool.dtype or scratch.device != pool.device or not scratch.is_contiguous():
                    page = ", ".join(map(str, pool.shape[1:]))
                    expected = f"scratch [at least {src_pages.shape[0]}, {page}] {pool.dtype} on {pool.device}"
                    raise ShapeError(
                        op, expected=f"{expected}, contiguous", got=_shown(scratch), fix="leave it out to have it made"
                    )
            device = pool.device
            kernel = _COPY.kernel(device, (pool.dtype,), (), solution)
            _COPY.remember(key, kernel, *operands)
        kernel(pool, src_pages, dst_pages, scratch)
    except OPERAND_ERRORS as error:
        refuse_kinds(copy_pages, locals(), error)
        raise


def transfer_pages(
    src_pool: torch.Tensor,
    dst_pool: torch.Tensor,
    src_pages: torch.Tensor,
    dst_pages: torch.Tensor,
    *,
    stream: torch.cuda.Stream | None = None,
    solution: str | None = None,
) -> None:
    """Copy pages from one pool to another: `dst_pool[dst_pages[i]] = src_pool[src_pages[i]]`.

    Either pool may be on the host while the other is on a GPU: its memory must be pinned, and a kernel on the GPU reads or writes
    it over the bus, without a copy in between and without making the host wait. One call moves the pages of one layer's cache;
    whoever moves layer after layer can record an event behind each, and let that layer's work wait for it alone.
    A pair with a page outside of its pool (-1, say) is ignored. No two pairs may have the same destination.

    Args:
        src_pool: [num_src_pages, ...] of any dtype; each page contiguous, the pages at any distance.
        dst_pool: [num_dst_pages, ...], pages of the same shape and dtype; it must not overlap src_pool.
        src_pages: [num_pairs] int32 or int64, on the GPU if one of the pools is.
        dst_pages: as src_pages.
        stream: where the copy is queued; the current stream where left out. The caller orders it by events after what wrote the
            source, and before what reads the destination. The compiled form of the op knows the current stream alone.
        solution: solution or kernel to use instead of the best that qualifies.
    Returns:
        None; dst_pool is written, once the stream has come so far.
    Raises:
        ShapeError: shapes, dtypes, strides or devices disagree, or the host's pool is not pinned.
        NoKernelError: nothing qualifies.
    Source: swapping of pages to the host, arXiv:2309.06180, section 4.5.
    """
    op = TRANSFER_PAGES.name
    if is_compiling():
        if stream is not None:
            raise ShapeError(op, expected="no stream while compiling", got="one", fix="call it outside of the compiled function")
        _TRANSFER_LIBRARY(src_pool, dst_pool, src_pages, dst_pages, solution)
        return
    try:
        operands = (src_pool, dst_pool, src_pages, dst_pages)
        key = (src_pages.shape, solution)
        looks_same, kernel = _TRANSFER.seen.get(key, NEW_CALL)
        # Whether memory of the host is pinned does not show in a tensor's looks: such a pair is looked at each time.
        if not looks_same(*operands) or src_pool.is_cpu is not dst_pool.is_cpu:
            _check_pages(op, src_pages, dst_pages)
            _check_pool(op, "src_pool", src_pool)
            _check_pool(op, "dst_pool", dst_pool)
            if src_pool.shape[1:] != dst_pool.shape[1:] or src_pool.dtype is not dst_pool.dtype:
                expected = f"dst_pool [num_pages, {', '.join(map(str, src_pool.shape[1:]))}] {src_pool.dtype}, as src_pool"
                raise ShapeError(op, expected=expected, got=_shown(dst_pool), fix="give both pools pages of one shape and dtype")
            device = _check_places(op, src_pool, dst_pool, src_pages, dst_pages)
            kernel = _TRANSFER.kernel(device, (src_pool.dtype, dst_pool.dtype), (), solution)
            _TRANSFER.remember(key, kernel, *operands)
        if stream is None:
            kernel(src_pool, dst_pool, src_pages, dst_pages)
            return
        device = src_pages.device
        if device.type != "cuda" or stream.device != device:
            expected = "no stream" if device.type != "cuda" else f"a stream of {device}"
            raise ShapeError(op, expected=expected, got=f"one of {stream.device}", fix="make it on the GPU of the pool")
        for pages in (src_pages, dst_pages):
            pages.record_stream(stream)  # the caller may let go of them before the copy has run
        with torch.cuda.stream(stream):
            kernel(src_pool, dst_pool, src_pages, dst_pages)
    except OPERAND_ERRORS as error:
        refuse_kinds(transfer_pages, locals(), error)
        raise


def _shown(tensor: torch.Tensor) -> str:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{list(tensor.shape)} {dtype} on {tensor.device} with strides {list(tensor.stride())}"


def _check_pages(op: str, src_pages: torch.Tensor, dst_pages: torch.Tensor) -> None:
    for name, pages in (("src_pages", src_pages), ("dst_pages", dst_pages)):
        if pages.dim() != 1 or pages.dtype not in _INTS:
            raise ShapeError(op, expected=f"{name} [num_pairs] int32 or int64", got=_shown(pages), fix="pass page numbers")
    if src_pages.shape != dst_pages.shape:
        expected, got = "as many src_pages as dst_pages", f"{src_pages.shape[0]} and {dst_pages.shape[0]}"
        raise ShapeError(op, expected=expected, got=got, fix="give each source its destination")


def _check_pool(op: str, name: str, pool: torch.Tensor) -> None:
    inner = pool.dim() < 2 or pool.numel() == 0 or pool[0].is_contiguous()
    if pool.dim() == 0 or not inner:
        expected, fix = f"{name} [num_pages, ...] whose pages are contiguous", "make the page the outermost dimension in memory"
        raise ShapeError(op, expected=expected, got=_shown(pool), fix=fix)


def _check_places(
    op: str, src_pool: torch.Tensor, dst_pool: torch.Tensor, src_pages: torch.Tensor, dst_pages: torch.Tensor
) -> torch.device:
    """The device on which the copy runs."""
    device = dst_pool.device if dst_pool.is_cuda else src_pool.device
    for name, pool in (("src_pool", src_pool), ("dst_pool", dst_pool)):
        if pool.device == device:
            continue
        if pool.device.type != "cpu":
            raise ShapeError(op, expected=f"{name} on {device} or on the host", got=str(pool.device), fix="go by the host's memory")
        if not pool.is_pinned():
            fix = "allocate it with pin_memory=True"
            raise ShapeError(op, expected=f"{name} in pinned memory, for {device} to reach it", got="pageable memory", fix=fix)
    for name, pages in (("src_pages", src_pages), ("dst_pages", dst_pages)):
        if pages.device != device:
            fix = f"move {name} with .to({str(device)!r})"
            raise ShapeError(op, expected=f"{name} on {device}", got=str(pages.device), fix=fix)
    return device


def _run_copy(pool: torch.Tensor, src_pages: torch.Tensor, dst_pages: torch.Tensor, solution: str | None) -> None:
    copy_pages(pool, src_pages, dst_pages, solution=solution)


def _run_transfer(
    src_pool: torch.Tensor, dst_pool: torch.Tensor, src_pages: torch.Tensor, dst_pages: torch.Tensor, solution: str | None
) -> None:
    transfer_pages(src_pool, dst_pool, src_pages, dst_pages, solution=solution)


def _fake(*_: object) -> None:
    return None


_COPY_LIBRARY: Final = register_library_op(
    "copy_pages(Tensor(a!) pool, Tensor src_pages, Tensor dst_pages, str? solution) -> ()", _run_copy, _fake
)
_TRANSFER_LIBRARY: Final = register_library_op(
    "transfer_pages(Tensor src_pool, Tensor(a!) dst_pool, Tensor src_pages, Tensor dst_pages, str? solution) -> ()",
    _run_transfer,
    _fake,
)
