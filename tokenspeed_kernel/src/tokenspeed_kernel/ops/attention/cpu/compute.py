"""Runs a `Schedule` with batched products: grouped query heads share one read of their key head."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

from tokenspeed_kernel.errors import ShapeError
from tokenspeed_kernel.ops.attention.cpu.masks import tile_mask
from tokenspeed_kernel.ops.attention.cpu.schedule import WIDE_QUERIES, Chunk, Keys, RowGroup, Schedule
from tokenspeed_kernel.ops.attention.cpu.workspace import WORKSPACE

# Up to here (1 row over 300 keys of 3 x 64) a second thread gains nothing, and each of its parallel regions can cost a time slice
# of 8 ms when another process holds the core that it waits for: 0.1 ms became 76 ms. Switching costs 0.2 us.
_SERIAL_ELEMENTS = 64 * 1024


@dataclass(frozen=True, slots=True)
class Options:
    """Scalars of one call."""

    scale: float
    logit_cap: float | None
    sinks: torch.Tensor | None


def attend(
    schedule: Schedule,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    softmax_scale: float | None,
    logit_cap: float | None,
    sinks: torch.Tensor | None,
    return_lse: bool,
    out: torch.Tensor | None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Fill the output (and LSE) of every query row.

    ``k`` and ``v`` are [num_tokens, Hkv, D], or paged [num_pages, page_size, Hkv, D], as the schedule was made for.
    Half-precision operands are computed in float32, float64 ones in float64.
    """
    num_rows, num_heads, head_dim = q.shape
    if num_rows != schedule.num_rows:
        got = f"q with {num_rows} rows"
        raise ShapeError("attention", expected=f"q with the plan's {schedule.num_rows} rows", got=got)
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    options = Options(scale, logit_cap, None if sinks is None else sinks.to(dtype))
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype)
    direct = out.dtype == dtype and out.is_contiguous()
    result = out if direct else torch.empty(q.shape, dtype=dtype)
    lse = torch.empty((num_rows, num_heads), dtype=dtype) if return_lse else None
    num_threads = torch.get_num_threads() if schedule.num_gathered * head_dim <= _SERIAL_ELEMENTS else 1
    if num_threads > 1:
        torch.set_num_threads(1)
    try:
        for group in schedule.groups:
            _attend_rows(group, q, k, v, options, result, lse)
    finally:
        if num_threads > 1:
            torch.set_num_threads(num_threads)
    plain = lse is None and options.sinks is None and options.logit_cap is None and dtype == torch.float32
    for chunk in schedule.chunks:
        if not (plain and _attend_chunk_fused(chunk, q, k, v, options.scale, schedule, result)):
            _attend_chunk(chunk, q, k, v, options, result, lse)
    if schedule.dead is not None:
        result.index_fill_(0, schedule.dead, 0)
        if lse is not None:
            lse[schedule.dead] = -math.inf if options.sinks is None else options.sinks
    if not direct:
        out.copy_(result)
    return out if lse is None else (out, lse.to(torch.float32))


def _attend_rows(
    group: RowGroup,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    options: Options,
    result: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    _, num_heads, head_dim = q.shape
    num_rows, num_keys, dtype = group.num_rows, group.num_keys, result.dtype
    num_kv_heads = k.shape[-2]
    batch, per_head = num_rows * num_kv_heads, num_heads // num_kv_heads
    last = group.first + num_rows
    queries = q[group.first : last] if group.rows is None else q.index_select(0, group.rows)
    queries = queries.reshape(batch, per_head, head_dim)
    if queries.dtype != dtype:
        queries = queries.to(dtype)
    keys = _gather(k, group.index, (batch, num_keys, head_dim), dtype)
    logits = WORKSPACE.take("logits", (batch, per_head, num_keys), dtype)
    if options.logit_cap is None and group.bias is not None:
        bias = group.bias.to(dtype).expand(batch, per_head, num_keys)
        torch.baddbmm(bias, queries, keys.transpose(1, 2), alpha=options.scale, out=logits)
    else:
        torch.baddbmm(logits, queries, keys.transpose(1, 2), beta=0, alpha=options.scale, out=logits)
        if options.logit_cap is not None:
            logits.div_(options.logit_cap).tanh_().mul_(options.logit_cap)
        if group.bias is not None:
            logits.add_(group.bias)
    weights = WORKSPACE.take("weights", (batch, per_head, num_keys), dtype)
    torch.softmax(logits, -1, out=weights)
    # The keys are no longer needed: the values take their place, which is still in the cache.
    values = _gather(v, group.index, (batch, num_keys, head_dim), dtype)
    if group.rows is None:
        target = result[group.first : last].view(batch, per_head, head_dim)
    else:
        target = WORKSPACE.take("rows", (batch, per_head, head_dim), dtype)
    torch.bmm(weights, values, out=target)
    if lse is not None or options.sinks is not None:
        total = logits.logsumexp(-1).view(num_rows, num_heads)
        if options.sinks is not None:
            total = _add_sinks(total, options.sinks, target.view(num_rows, num_heads, head_dim))
        if lse is not None:
            if group.rows is None:
                lse[group.first : last] = total
            else:
                lse.index_copy_(0, group.rows, total)
    if group.rows is not None:
        result.index_copy_(0, group.rows, target.view(num_rows, num_heads, head_dim))


def _attend_chunk_fused(
    chunk: Chunk,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    schedule: Schedule,
    result: torch.Tensor,
) -> bool:
    """Use PyTorch's fused attention: one parallel region for a tile instead of five, no logits in memory.

    Returns:
        Whether it could; nothing is written otherwise.
    """
    num_heads, head_dim = q.shape[1:]
    num_kv_heads = k.shape[-2]
    split = (num_kv_heads, num_heads // num_kv_heads, head_dim)
    masks = []
    for tile in chunk.wide_tiles:
        rows, columns = tile.last - tile.first, tile.key_last - tile.key_first
        mask = tile_mask(WIDE_QUERIES, rows, columns, schedule.window) if schedule.causal else None
        if schedule.causal and mask is None:
            return False
        masks.append(mask)
    if not masks:
        return False
    # [Hkv, group, tokens, D], the group's heads all on one key head: the "batch" of the fused op is the key heads.
    keys, values = (
        _fetch(cache, chunk.keys, name, torch.float32).transpose(0, 1)[:, None].expand(-1, split[1], -1, -1)
        for cache, name in ((k, "keys"), (v, "values"))
    )
    for tile, mask in zip(chunk.wide_tiles, masks, strict=True):
        rows = tile.last - tile.first
        queries = q[tile.first : tile.last].view(rows, *split).permute(1, 2, 0, 3).to(torch.float32)
        seen = slice(tile.key_first, tile.key_last)
        attended = scaled_dot_product_attention(queries, keys[:, :, seen], values[:, :, seen], attn_mask=mask, scale=scale)
        result[tile.first : tile.last].view(rows, *split).copy_(attended.permute(2, 0, 1, 3))
    return True


def _attend_chunk(
    chunk: Chunk,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    options: Options,
    result: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    num_heads, head_dim = q.shape[1:]
    num_kv_heads = k.shape[-2]
    per_head, dtype = num_heads // num_kv_heads, result.dtype
    keys = _fetch(k, chunk.keys, "keys", dtype).transpose(0, 1)
    values = _fetch(v, chunk.keys, "values", dtype).transpose(0, 1)
    for tile in chunk.tiles:
        rows, columns = tile.last - tile.first, tile.key_last - tile.key_first
        queries = WORKSPACE.take("queries", (num_kv_heads, per_head, rows, head_dim), dtype)
        heads = q[tile.first : tile.last].view(rows, num_kv_heads, per_head, head_dim)
        queries.copy_(heads.permute(1, 2, 0, 3))
        logits = WORKSPACE.take("logits", (num_kv_heads, per_head * rows, columns), dtype)
        seen = keys[:, tile.key_first : tile.key_last]
        flat = queries.view(num_kv_heads, per_head * rows, head_dim)
        torch.baddbmm(logits, flat, seen.transpose(1, 2), beta=0, alpha=options.scale, out=logits)
        if options.logit_cap is not None:
            logits.div_(options.logit_cap).tanh_().mul_(options.logit_cap)
        by_head = logits.view(num_kv_heads, per_head, rows, columns)
        for column, width, bias in tile.biases:
            by_head[..., column : column + width].add_(bias)
        weights = WORKSPACE.take("weights", (num_kv_heads, per_head * rows, columns), dtype)
        torch.softmax(logits, -1, out=weights)
        # Queries have been read: their buffer takes the outputs.
        torch.bmm(weights, values[:, tile.key_first : tile.key_last], out=flat)
        target = result[tile.first : tile.last]
        target.view(rows, num_kv_heads, per_head, head_dim).copy_(queries.permute(2, 0, 1, 3))
        if lse is not None or options.sinks is not None:
            total = logits.logsumexp(-1).view(num_heads, rows).transpose(0, 1)
            if options.sinks is not None:
                total = _add_sinks(total, options.sinks, target)
            if lse is not None:
                lse[tile.first : tile.last] = total


def _add_sinks(total: torch.Tensor, sinks: torch.Tensor, outputs: torch.Tensor) -> torch.Tensor:
    """Add each head's sink to the denominator: scales the outputs in place, returns the new LSE."""
    with_sinks = torch.logaddexp(total, sinks)
    outputs.mul_((total - with_sinks).exp_().unsqueeze(-1))
    return with_sinks


def _gather(cache: torch.Tensor, index: torch.Tensor, shape: tuple[int, int, int], dtype: torch.dtype) -> torch.Tensor:
    """Rows ``index`` of the cache seen as [slots * Hkv, D], in the compute dtype and in that shape."""
    head_dim = shape[2]
    if cache.is_contiguous():
        if cache.dtype == dtype:
            flat = WORKSPACE.take("keys", (shape[0] * shape[1], head_dim), dtype)
            torch.index_select(cache.view(-1, head_dim), 0, index, out=flat)
            return flat.view(shape)
        return cache.view(-1, head_dim).index_select(0, index).to(dtype).view(shape)
    num_kv_heads, page_size = cache.shape[-2], cache.shape[1]
    slots = torch.div(index, num_kv_heads, rounding_mode="floor").to(torch.int64)
    pages = torch.div(slots, page_size, rounding_mode="floor")
    found = cache[pages, slots - pages * page_size, index.to(torch.int64) - slots * num_kv_heads]
    return found.to(dtype).view(shape)


def _fetch(cache: torch.Tensor, keys: Keys, name: str, dtype: torch.dtype) -> torch.Tensor:
    """A request's keys or values, [count, Hkv, D] in the compute dtype; without a copy where they lie in one piece."""
    heads = tuple(cache.shape[-2:])
    flat = cache if cache.dim() == 3 else None
    if flat is None and cache.stride(0) == cache.shape[1] * cache.stride(1):
        flat = cache.view(-1, *heads)
    if keys.index is None:
        if flat is not None:
            return flat[keys.start : keys.start + keys.count].to(dtype)
        return _pages(cache, keys.start, keys.count).to(dtype)
    if keys.by_page:
        if cache.dtype == dtype and cache.is_contiguous():
            found = WORKSPACE.take(name, (keys.index.shape[0], *cache.shape[1:]), dtype)
            torch.index_select(cache, 0, keys.index, out=found)
        else:
            found = cache.index_select(0, keys.index)
        return found.view(-1, *heads)[keys.skip : keys.skip + keys.count].to(dtype)
    pages = torch.div(keys.index, cache.shape[1], rounding_mode="floor")
    return cache[pages, keys.index - pages * cache.shape[1]].to(dtype)


def _pages(cache: torch.Tensor, start: int, count: int) -> torch.Tensor:
    """A run of tokens in a cache whose pages are not evenly spaced in memory."""
    page_size = cache.shape[1]
    first, last = start // page_size, -(-(start + count) // page_size)
    return cache[first:last].reshape(-1, *cache.shape[-2:])[start - first * page_size :][:count]
