"""Turns a batch's lengths and pages into lists of work for the CPU kernels: made once per step, used by every layer.

Two kinds of work. A `RowGroup` holds requests with one query each and similar numbers of keys: their keys are gathered into one
batched product. A `Chunk` holds one request with several queries, cut into tiles so that a tile's logits stay in the L2 cache.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from tokenspeed_kernel.errors import ShapeError

Int64s = npt.NDArray[np.int64]

# A group costs about 35 us in calls, whatever its size; padding one key costs about 0.07 us (9 heads, 3 key heads of 64, fp32).
_PADDING_PER_GROUP = 512
# Gathered key rows in a group: 8 MB of keys with 64 fp32 elements a row, which with the values still fits in a shared L3 cache.
_KEY_ROWS_PER_GROUP = 32768
_TILE_LOGITS = 320 * 1024
_TILE_QUERIES = (16, 128)
WIDE_QUERIES = 128
"""Queries in a tile of the fused attention: enough to share a key tile, few enough to skip most of what causality hides."""


@dataclass(frozen=True, slots=True)
class Keys:
    """Where one request's keys lie: a run of consecutive tokens, whole pages, or single slots.

    Attributes:
        count: number of keys.
        start: first token of the run in the flattened cache, when ``index`` is None.
        index: pages (``by_page``) or slots, int64.
        by_page: what ``index`` holds.
        skip: keys to leave out at the front of the first page.
    """

    count: int
    start: int = 0
    index: torch.Tensor | None = None
    by_page: bool = False
    skip: int = 0


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Requests with one query each.

    Attributes:
        rows: query rows, int64; None when they are ``first``, ``first + 1``, ...
        first: the first query row.
        num_rows: number of rows.
        num_keys: keys gathered for each row, padding included.
        index: [num_rows * num_kv_heads * num_keys] rows of the cache seen as [slots * num_kv_heads, head_dim].
        bias: [num_rows * num_kv_heads, 1, num_keys] fp32, -inf at padding; None without padding.
    """

    rows: torch.Tensor | None
    first: int
    num_rows: int
    num_keys: int
    index: torch.Tensor
    bias: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class Tile:
    """Consecutive queries of a request and the range of its keys that they see.

    Attributes:
        first, last: query rows [first, last).
        key_first, key_last: keys [key_first, key_last) of the request's `Keys`.
        biases: (column, columns, [queries, columns] fp32 with -inf where a query does not see the key) within the range.
    """

    first: int
    last: int
    key_first: int
    key_last: int
    biases: tuple[tuple[int, int, torch.Tensor], ...]


@dataclass(frozen=True, slots=True)
class Chunk:
    """One request with several queries.

    Attributes:
        keys: where its keys lie.
        tiles: for products that materialise a tile's logits.
        wide_tiles: for PyTorch's fused attention, which does not; empty where a mask of the usual form does not fit.
    """

    keys: Keys
    tiles: tuple[Tile, ...]
    wide_tiles: tuple[Tile, ...] = ()


@dataclass(frozen=True, slots=True)
class Schedule:
    """All work of one call over ``num_rows`` query rows.

    ``dead`` are the rows, int64, that see no key at all; ``num_gathered`` the rows of the cache that all groups gather.
    """

    num_rows: int
    causal: bool
    window: int | None
    groups: tuple[RowGroup, ...]
    chunks: tuple[Chunk, ...]
    dead: torch.Tensor | None
    num_gathered: int = 0


@dataclass(frozen=True, slots=True)
class Shape:
    """What a schedule depends on besides the batch."""

    num_pages: int
    num_heads: int
    num_kv_heads: int
    causal: bool = True
    window: int | None = None


def check_lengths(op: str, starts: list[int], num_rows: int, name: str) -> None:
    """Refuse offsets that do not split ``num_rows`` rows into requests."""
    if starts[0] != 0 or starts[-1] != num_rows or any(b < a for a, b in itertools.pairwise(starts)):
        shown = starts if len(starts) <= 8 else [*starts[:4], "...", *starts[-3:]]
        raise ShapeError(op, expected=f"{name} rising from 0 to {num_rows}", got=str(shown))


def paged_schedule(
    op: str, table: npt.NDArray[np.int32], starts: list[int], lengths: list[int], page_size: int, shape: Shape
) -> Schedule:
    """Schedule queries over a paged cache. ``starts`` are the offsets of the requests' queries, ``lengths`` their keys."""
    if lengths and max(lengths) > table.shape[1] * page_size:
        raise ShapeError(
            op,
            expected=f"seq_lens <= max_pages * page_size = {table.shape[1] * page_size}",
            got=f"{max(lengths)}",
            fix="give the page table a column for every page of the longest request",
        )
    dead: list[int] = []
    single: list[int] = []
    chunks: list[Chunk] = []
    for request, length in enumerate(lengths):
        first, last = starts[request], starts[request + 1]
        if length <= 0:
            dead.extend(range(first, last))
        elif last - first == 1:
            single.append(request)
        elif last > first:
            chunk = _paged_chunk(table[request], first, last, length, page_size, shape, dead)
            if chunk is not None:
                chunks.append(chunk)
    groups = _row_groups(table, starts, lengths, page_size, shape, single, dead)
    gathered = sum(group.index.shape[0] for group in groups)
    lost = _int64(dead) if dead else None
    return Schedule(starts[-1], shape.causal, shape.window, tuple(groups), tuple(chunks), lost, gathered)


def ragged_schedule(starts_q: list[int], starts_k: list[int], shape: Shape) -> Schedule:
    """Schedule queries over keys that lie one request after the other."""
    dead: list[int] = []
    chunks: list[Chunk] = []
    for request in range(len(starts_q) - 1):
        first, last = starts_q[request], starts_q[request + 1]
        length = starts_k[request + 1] - starts_k[request]
        if length <= 0:
            dead.extend(range(first, last))
            continue
        alive, position = _first_alive(first, last, length, shape.causal, dead)
        if alive < last:
            keys = Keys(length, start=starts_k[request])
            chunks.append(_chunk(keys, alive, last, position, 0, length, shape))
    return Schedule(starts_q[-1], shape.causal, shape.window, (), tuple(chunks), _int64(dead) if dead else None)


def _first_alive(first: int, last: int, length: int, causal: bool, dead: list[int]) -> tuple[int, int]:
    """First query row that sees a key, and its position; the rows before it are dead."""
    position = length - (last - first)
    if causal and position < 0:
        dead.extend(range(first, first - position))
        return first - position, 0
    return first, position


def _paged_chunk(
    pages: npt.NDArray[np.int32], first: int, last: int, length: int, page_size: int, shape: Shape, dead: list[int]
) -> Chunk | None:
    alive, position = _first_alive(first, last, length, shape.causal, dead)
    lowest = 0 if shape.window is None else max(0, position - shape.window + 1)
    used = pages[lowest // page_size : -(-length // page_size)].astype(np.int64)
    valid = (used >= 0) & (used < shape.num_pages)
    count, skip = length - lowest, lowest % page_size
    if valid.all():
        if (np.diff(used) == 1).all():
            keys = Keys(count, start=int(used[0]) * page_size + skip)
        else:
            keys = Keys(count, index=torch.from_numpy(used), by_page=True, skip=skip)
        return _chunk(keys, alive, last, position, lowest, length, shape)
    slots = (used[:, None] * page_size + np.arange(page_size)).reshape(-1)[skip : skip + count]
    kept = np.flatnonzero(np.repeat(valid, page_size)[skip : skip + count])
    tiles = _tiles_of_positions(alive, last, position, kept + lowest, length, shape, dead)
    return Chunk(Keys(len(kept), index=torch.from_numpy(slots[kept])), tiles) if tiles else None


def _chunk(keys: Keys, first: int, last: int, position: int, lowest: int, length: int, shape: Shape) -> Chunk:
    wide = []
    for start in range(first, last, WIDE_QUERIES):
        stop = min(last, start + WIDE_QUERIES)
        begin, end = position + start - first, position + stop - first
        low = lowest if shape.window is None else max(lowest, begin - shape.window + 1)
        wide.append(Tile(start, stop, low - lowest, (end if shape.causal else length) - lowest, ()))
    return Chunk(keys, _tiles(first, last, position, lowest, length, shape), tuple(wide))


def _tile_queries(num_keys: int, num_heads: int) -> int:
    """Queries in a tile: a power of two for which the logits of all heads fit in the L2 cache."""
    low, high = _TILE_QUERIES
    wanted = max(low, _TILE_LOGITS // max(1, num_keys * num_heads))
    return int(min(high, 2 ** int(math.log2(wanted))))


def _tiles(first: int, last: int, position: int, lowest: int, length: int, shape: Shape) -> tuple[Tile, ...]:
    """Tiles over keys at consecutive positions from ``lowest``; only the edges of what a tile sees need a bias."""
    step = _tile_queries(length - lowest, shape.num_heads)
    triangle = torch.full((min(step, last - first),) * 2, -math.inf).triu_(1) if shape.causal else None
    tiles = []
    for start in range(first, last, step):
        stop = min(last, start + step)
        begin, end = position + start - first, position + stop - first  # positions of the tile's queries
        high = end if shape.causal else length
        low = lowest if shape.window is None else max(lowest, begin - shape.window + 1)
        biases = []
        if triangle is not None and stop - start > 1:
            biases.append((begin - low, stop - start, triangle[: stop - start, : stop - start]))
        left = 0 if shape.window is None else end - shape.window - low
        if left > 0:  # keys that have left the window of the tile's last query, but not of its first
            keys = torch.arange(low, low + left)
            seen = keys > torch.arange(begin, end)[:, None] - (shape.window or 0)
            biases.append((0, left, torch.zeros(seen.shape).masked_fill_(~seen, -math.inf)))
        tiles.append(Tile(start, stop, low - lowest, high - lowest, tuple(biases)))
    return tuple(tiles)


def _tiles_of_positions(
    first: int, last: int, position: int, keys: Int64s, length: int, shape: Shape, dead: list[int]
) -> tuple[Tile, ...]:
    """Tiles over keys at arbitrary rising positions (pages are missing): every tile has a full bias."""
    step = _tile_queries(length, shape.num_heads)
    tiles = []
    for start in range(first, last, step):
        stop = min(last, start + step)
        queries = np.arange(position + start - first, position + stop - first)
        seen = np.ones((len(queries), len(keys)), dtype=bool)
        if shape.causal:
            seen &= keys <= queries[:, None]
        if shape.window is not None:
            seen &= keys > queries[:, None] - shape.window
        alive = seen.any(axis=1)
        dead.extend((np.flatnonzero(~alive) + start).tolist())
        if alive.any():
            bias = torch.zeros(seen.shape).masked_fill_(torch.from_numpy(~seen), -math.inf)
            tiles.append(Tile(start, stop, 0, len(keys), ((0, len(keys), bias),)))
    return tuple(tiles)


def _row_groups(
    table: npt.NDArray[np.int32],
    starts: list[int],
    lengths: list[int],
    page_size: int,
    shape: Shape,
    requests: list[int],
    dead: list[int],
) -> list[RowGroup]:
    if not requests:
        return []
    ends = np.array([lengths[request] for request in requests], dtype=np.int64)
    begins = np.zeros_like(ends) if shape.window is None else np.maximum(0, ends - shape.window)
    counts = ends - begins
    which = np.array(requests, dtype=np.int64)
    rows = np.array([starts[request] for request in requests], dtype=np.int64)
    groups = []
    for members in _similar(counts, shape.num_kv_heads):
        group = _row_group(table[which[members]], rows[members], begins[members], ends[members], page_size, shape, dead)
        if group is not None:
            groups.append(group)
    return groups


def _similar(counts: Int64s, num_kv_heads: int) -> list[Int64s]:
    """Split rows so that padding each group to its longest row wastes less than a group's own cost."""
    most = max(1, _KEY_ROWS_PER_GROUP // num_kv_heads)
    order = np.argsort(-counts, kind="stable")
    descending = counts[order].tolist()
    groups, start, waste = [], 0, 0
    for place, count in enumerate(descending):
        waste += descending[start] - count
        if place > start and (waste > _PADDING_PER_GROUP or (place - start + 1) * descending[start] > most):
            groups.append(order[start:place])
            start, waste = place, 0
    groups.append(order[start:])
    return [np.sort(group) for group in groups]  # in the batch's order, rows need no gather where they are neighbours


def _row_group(
    table: npt.NDArray[np.int32],
    rows: Int64s,
    begins: Int64s,
    ends: Int64s,
    page_size: int,
    shape: Shape,
    dead: list[int],
) -> RowGroup | None:
    num_keys = int((ends - begins).max())
    first_pages = begins // page_size
    num_columns = int((-(-ends // page_size) - first_pages).max())
    columns = np.minimum(first_pages[:, None] + np.arange(num_columns), table.shape[1] - 1)
    pages = np.take_along_axis(table, columns, axis=1).astype(np.int64)
    slots = (pages[:, :, None] * page_size + np.arange(page_size)).reshape(len(rows), -1)
    valid = np.repeat((pages >= 0) & (pages < shape.num_pages), page_size, axis=1)
    skips = begins - first_pages * page_size
    if skips.any():
        slots = np.pad(slots, ((0, 0), (0, page_size)))
        valid = np.pad(valid, ((0, 0), (0, page_size)))
        places = skips[:, None] + np.arange(num_keys)
        slots, valid = np.take_along_axis(slots, places, axis=1), np.take_along_axis(valid, places, axis=1)
    slots, valid = slots[:, :num_keys], valid[:, :num_keys]
    valid = valid & (np.arange(num_keys) < (ends - begins)[:, None])
    bias = None
    if not valid.all():
        alive = valid.any(axis=1)
        dead.extend(rows[~alive].tolist())
        if not alive.any():
            return None
        slots, valid, rows = slots[alive], valid[alive], rows[alive]
        # Padding repeats a key that the row really sees: a slot of nobody may hold NaN, and 0 * NaN is NaN.
        own = np.take_along_axis(slots, valid.argmax(axis=1)[:, None], axis=1)
        slots = np.where(valid, slots, own)
        penalty = np.where(valid, np.float32(0), np.float32(-np.inf))
        bias = torch.from_numpy(np.repeat(penalty, shape.num_kv_heads, axis=0)[:, None, :])
    index = (slots[:, None, :] * shape.num_kv_heads + np.arange(shape.num_kv_heads)[:, None]).reshape(-1)
    if index.size and int(index.max()) < 2**31:
        index = index.astype(np.int32)  # half the memory to read in every layer
    neighbours = int(rows[-1]) - int(rows[0]) == len(rows) - 1
    return RowGroup(
        rows=None if neighbours else torch.from_numpy(rows),
        first=int(rows[0]),
        num_rows=len(rows),
        num_keys=num_keys,
        index=torch.from_numpy(index),
        bias=bias,
    )


def _int64(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)
