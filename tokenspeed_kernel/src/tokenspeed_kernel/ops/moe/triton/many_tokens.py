"""Experts for many tokens: pairs sorted by expert, tiles of rows of one expert on the matrix units.

A tile of rows belongs to one expert; how many tiles there are is known to the device alone, so the grid has as many as there can
be, and a program finds its expert by counting tiles. The first product gathers rows of x and gates its result; the second reads
these as they lie. Both write each place once.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from tokenspeed_kernel.ops.moe.gate import GatedActivation
from tokenspeed_kernel.ops.moe.triton.gate import gated
from tokenspeed_kernel.ops.moe.triton.rows import Rows, row_values
from tokenspeed_kernel.ops.moe.triton.sort import SortedPairs
from tokenspeed_kernel.ops.moe.triton.tuning import Tiles
from tokenspeed_kernel.ops.moe.triton.weights import Stack, load_tile, row_scales

__all__ = ["first_product", "second_product"]


@triton.jit
def _find_rows(offsets_ptr, tile, num_experts, TOKENS: tl.constexpr, EXPERTS: tl.constexpr):
    """The expert of a tile, its first row, and the row after the expert's last; past the last tile the expert is num_experts."""
    experts = tl.arange(0, EXPERTS)
    inside = experts < num_experts
    first = tl.load(offsets_ptr + experts, mask=inside, other=0)
    last = tl.load(offsets_ptr + experts + 1, mask=inside, other=0)
    tiles = tl.where(inside, (last - first + TOKENS - 1) // TOKENS, 0)
    before = tl.cumsum(tiles, 0)
    expert = tl.sum((inside & (before <= tile)).to(tl.int32), 0)
    own = experts == expert
    row = tl.sum(tl.where(own, first + (tile - (before - tiles)) * TOKENS, 0), 0)
    return expert, row, tl.sum(tl.where(own, last, 0), 0)


@triton.jit
def _first_many_kernel(
    x_ptr, x_scale_ptr, pair_of_row_ptr, offsets_ptr, bias_ptr, gated_ptr, data_ptr, scale_ptr, zero_ptr, total_ptr,
    data_expert, data_row, data_col, scale_expert, scale_row, scale_col, zero_expert, zero_row, zero_col, total_expert,
    top_k, num_experts, hidden, inner, x_row, x_col, x_scale_row, x_scale_col, bias_expert, bias_col, limit, alpha, up_offset,
    X_KIND: tl.constexpr, X_COLS: tl.constexpr, DOT: tl.constexpr,
    KIND: tl.constexpr, SCALES: tl.constexpr, SCALE_ROWS: tl.constexpr, SCALE_COLS: tl.constexpr, ZEROS: tl.constexpr,
    TOTAL: tl.constexpr, BIASED: tl.constexpr, ACTIVATION: tl.constexpr, CLAMPED: tl.constexpr,
    EXPERTS: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    expert, row, end = _find_rows(offsets_ptr, tl.program_id(1), num_experts, TOKENS, EXPERTS)
    expert = expert.to(tl.int64)  # experts times their size pass 2**31 elements
    if expert < num_experts:
        data_ptr += expert * data_expert
        scale_ptr += expert * scale_expert
        zero_ptr += expert * zero_expert
        places = row + tl.arange(0, TOKENS)
        used = places < end
        tokens = tl.load(pair_of_row_ptr + places, mask=used, other=0).to(tl.int64) // top_k
        rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS).to(tl.int64)
        mask = rows < inner
        gate = tl.zeros([TOKENS, ROWS], dtype=tl.float32)
        up = tl.zeros([TOKENS, ROWS], dtype=tl.float32)
        x_rows = x_ptr + tokens[:, None] * x_row
        for start in range(0, hidden, DEPTH):
            depth = start + tl.arange(0, DEPTH).to(tl.int64)
            x_mask = used[:, None] if EVEN else used[:, None] & (depth < hidden)[None, :]
            x = row_values(tl.load(x_rows + depth[None, :] * x_col, mask=x_mask, other=0.0), X_KIND, DOT)
            tile = load_tile(
                data_ptr, scale_ptr, zero_ptr, rows, mask, start, hidden,
                data_row, data_col, scale_row, scale_col, zero_row, zero_col,
                KIND, SCALES, SCALE_ROWS, SCALE_COLS, ZEROS, ROWS, DEPTH, EVEN, DOT,
            )  # fmt: skip
            other = load_tile(
                data_ptr, scale_ptr, zero_ptr, rows + inner, mask, start, hidden,
                data_row, data_col, scale_row, scale_col, zero_row, zero_col,
                KIND, SCALES, SCALE_ROWS, SCALE_COLS, ZEROS, ROWS, DEPTH, EVEN, DOT,
            )  # fmt: skip
            if SCALE_COLS >= DEPTH or X_KIND != "plain":
                # Products of fp8 have few bits in the matrix unit's own sum: each step is added outside of it.
                part = tl.dot(x, tl.trans(tile), input_precision="ieee")
                other_part = tl.dot(x, tl.trans(other), input_precision="ieee")
                if SCALE_COLS >= DEPTH:
                    part *= row_scales(
                        scale_ptr, rows, mask, start, scale_row, scale_col, SCALES, SCALE_ROWS, SCALE_COLS
                    )[None, :]  # fmt: skip
                    other_part *= row_scales(
                        scale_ptr, rows + inner, mask, start, scale_row, scale_col, SCALES, SCALE_ROWS, SCALE_COLS
                    )[None, :]  # fmt: skip
                if X_COLS > 0:
                    x_scales = tl.load(x_scale_ptr + tokens * x_scale_row + (start // X_COLS) * x_scale_col, mask=used, other=0.0)
                    part *= x_scales[:, None]
                    other_part *= x_scales[:, None]
                gate += part
                up += other_part
            else:
                gate = tl.dot(x, tl.trans(tile), gate, input_precision="ieee")
                up = tl.dot(x, tl.trans(other), up, input_precision="ieee")
        if SCALES != "none" and SCALE_COLS == 0:
            gate *= row_scales(scale_ptr, rows, mask, 0, scale_row, scale_col, SCALES, SCALE_ROWS, SCALE_COLS)[None, :]
            up *= row_scales(scale_ptr, rows + inner, mask, 0, scale_row, scale_col, SCALES, SCALE_ROWS, SCALE_COLS)[None, :]
        if TOTAL:
            total = tl.load(total_ptr + expert * total_expert)
            gate *= total
            up *= total
        if X_KIND != "plain" and X_COLS == 0:
            x_scales = tl.load(x_scale_ptr + tokens * x_scale_row, mask=used, other=0.0)
            gate *= x_scales[:, None]
            up *= x_scales[:, None]
        if BIASED:
            bias_ptr += expert * bias_expert
            gate += tl.load(bias_ptr + rows * bias_col, mask=mask, other=0.0).to(tl.float32)[None, :]
            up += tl.load(bias_ptr + (rows + inner) * bias_col, mask=mask, other=0.0).to(tl.float32)[None, :]
        result = gated(gate, up, limit, alpha, up_offset, ACTIVATION, CLAMPED)
        out = gated_ptr + places.to(tl.int64)[:, None] * inner + rows[None, :]
        tl.store(out, result.to(gated_ptr.dtype.element_ty), mask=used[:, None] & mask[None, :])


@triton.jit
def _second_many_kernel(
    gated_ptr, gated_scale_ptr, offsets_ptr, bias_ptr, out_ptr, data_ptr, scale_ptr, zero_ptr, total_ptr,
    data_expert, data_row, data_col, scale_expert, scale_row, scale_col, zero_expert, zero_row, zero_col, total_expert,
    num_experts, hidden, inner, gated_scale_row, gated_scale_col, bias_expert, bias_col,
    X_KIND: tl.constexpr, X_COLS: tl.constexpr, DOT: tl.constexpr,
    KIND: tl.constexpr, SCALES: tl.constexpr, SCALE_ROWS: tl.constexpr, SCALE_COLS: tl.constexpr, ZEROS: tl.constexpr,
    TOTAL: tl.constexpr, BIASED: tl.constexpr,
    EXPERTS: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    expert, row, end = _find_rows(offsets_ptr, tl.program_id(1), num_experts, TOKENS, EXPERTS)
    expert = expert.to(tl.int64)
    if expert < num_experts:
        data_ptr += expert * data_expert
        scale_ptr += expert * scale_expert
        zero_ptr += expert * zero_expert
        places = (row + tl.arange(0, TOKENS)).to(tl.int64)
        used = places < end
        rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS).to(tl.int64)
        mask = rows < hidden
        result = tl.zeros([TOKENS, ROWS], dtype=tl.float32)
        for start in range(0, inner, DEPTH):
            depth = start + tl.arange(0, DEPTH)
            x_mask = used[:, None] if EVEN else used[:, None] & (depth < inner)[None, :]
            x = tl.load(gated_ptr + places[:, None] * inner + depth[None, :], mask=x_mask, other=0.0)
            x = row_values(x, X_KIND, DOT)
            tile = load_tile(
                data_ptr, scale_ptr, zero_ptr, rows, mask, start, inner,
                data_row, data_col, scale_row, scale_col, zero_row, zero_col,
                KIND, SCALES, SCALE_ROWS, SCALE_COLS, ZEROS, ROWS, DEPTH, EVEN, DOT,
            )  # fmt: skip
            if SCALE_COLS >= DEPTH or X_KIND != "plain":
                part = tl.dot(x, tl.trans(tile), input_precision="ieee")
                if SCALE_COLS >= DEPTH:
                    part *= row_scales(
                        scale_ptr, rows, mask, start, scale_row, scale_col, SCALES, SCALE_ROWS, SCALE_COLS
                    )[None, :]  # fmt: skip
                if X_COLS > 0:
                    place = gated_scale_ptr + places * gated_scale_row + (start // X_COLS) * gated_scale_col
                    part *= tl.load(place, mask=used, other=0.0)[:, None]
                result += part
            else:
                result = tl.dot(x, tl.trans(tile), result, input_precision="ieee")
        if SCALES != "none" and SCALE_COLS == 0:
            result *= row_scales(scale_ptr, rows, mask, 0, scale_row, scale_col, SCALES, SCALE_ROWS, SCALE_COLS)[None, :]
        if TOTAL:
            result *= tl.load(total_ptr + expert * total_expert)
        if X_KIND != "plain" and X_COLS == 0:
            result *= tl.load(gated_scale_ptr + places * gated_scale_row, mask=used, other=0.0)[:, None]
        if BIASED:
            bias = tl.load(bias_ptr + expert * bias_expert + rows * bias_col, mask=mask, other=0.0)
            result += bias.to(tl.float32)[None, :]
        out = out_ptr + places[:, None] * hidden + rows[None, :]
        tl.store(out, result.to(out_ptr.dtype.element_ty), mask=used[:, None] & mask[None, :])


def first_product(
    x: Rows,
    dtype: torch.dtype,
    w13: Stack,
    order: SortedPairs,
    shape: tuple[int, int, int],
    bias: torch.Tensor | None,
    activation: GatedActivation,
    tiles: Tiles,
) -> torch.Tensor:
    """Return the gated values of each sorted row, [num_pairs, inner] in dtype; rows that no pair fills are not written."""
    num_experts, hidden, inner = shape
    out = torch.empty((order.pair_of_row.shape[0], inner), dtype=dtype, device=x.data.device)
    _first_many_kernel[_grid(inner, order, num_experts, tiles)](
        x.data, x.scale, order.pair_of_row, order.offsets, out if bias is None else bias, out, *w13.arguments,
        order.row_of_pair.shape[1], num_experts, hidden, inner, *x.strides, *_strides(bias),
        activation.limit, activation.alpha, activation.up_offset, **x.constants, **w13.constants, BIASED=bias is not None,
        ACTIVATION=activation.kind, CLAMPED=activation.clamped, **_shape(tiles, num_experts, hidden),
    )  # fmt: skip
    return out


def second_product(
    gated_rows: Rows,
    dtype: torch.dtype,
    w2: Stack,
    order: SortedPairs,
    shape: tuple[int, int, int],
    bias: torch.Tensor | None,
    tiles: Tiles,
) -> torch.Tensor:
    """Return each sorted row's result, [num_pairs, hidden] in dtype; rows that no pair fills are not written."""
    num_experts, hidden, inner = shape
    out = torch.empty((gated_rows.data.shape[0], hidden), dtype=dtype, device=gated_rows.data.device)
    _second_many_kernel[_grid(hidden, order, num_experts, tiles)](
        gated_rows.data, gated_rows.scale, order.offsets, out if bias is None else bias, out, *w2.arguments,
        num_experts, hidden, inner, *gated_rows.strides[2:], *_strides(bias), **gated_rows.constants, **w2.constants,
        BIASED=bias is not None, **_shape(tiles, num_experts, inner),
    )  # fmt: skip
    return out


def _grid(features: int, order: SortedPairs, num_experts: int, tiles: Tiles) -> tuple[int, int]:
    """Tiles of features, which follow each other to share rows of x in the cache, by the most tiles of rows there can be."""
    pairs = order.pair_of_row.shape[0]
    most = (pairs + min(num_experts, pairs) * (tiles.tokens - 1)) // tiles.tokens
    return triton.cdiv(features, tiles.rows), most


def _strides(bias: torch.Tensor | None) -> tuple[int, int]:
    return (0, 0) if bias is None else (bias.stride(0), bias.stride(1))


def _shape(tiles: Tiles, num_experts: int, columns: int) -> dict[str, Any]:
    return {
        "EXPERTS": triton.next_power_of_2(num_experts),
        "TOKENS": tiles.tokens,
        "ROWS": tiles.rows,
        "DEPTH": tiles.depth,
        "EVEN": columns % tiles.depth == 0,
        "num_warps": tiles.num_warps,
        "num_stages": tiles.num_stages,
    }
