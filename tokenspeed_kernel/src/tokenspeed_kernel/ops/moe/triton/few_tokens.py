"""Experts for few tokens: each (token, expert) pair streams its expert's weights, without matrix units.

The work is to read the weights once. Programs are many and small, each with all of its loads in flight; the sum over a token's
experts is a third launch, so that no two programs write one place and results are the same each time.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from tokenspeed_kernel.ops.moe.gate import GatedActivation
from tokenspeed_kernel.ops.moe.triton.gate import gated
from tokenspeed_kernel.ops.moe.triton.rows import Rows, row_values
from tokenspeed_kernel.ops.moe.triton.tuning import few_tiles
from tokenspeed_kernel.ops.moe.triton.weights import Stack, load_tile, row_scales

__all__ = ["first_product", "second_product"]


@triton.jit
def _first_few_kernel(
    x_ptr, x_scale_ptr, ids_ptr, bias_ptr, gated_ptr, data_ptr, scale_ptr, zero_ptr, total_ptr,
    data_expert, data_row, data_col, scale_expert, scale_row, scale_col, zero_expert, zero_row, zero_col, total_expert,
    top_k, num_experts, first_expert, hidden, inner, x_row, x_col, x_scale_row, x_scale_col, ids_row, ids_col,
    bias_expert, bias_col, limit, alpha, up_offset, X_KIND: tl.constexpr, X_COLS: tl.constexpr,
    KIND: tl.constexpr, SCALES: tl.constexpr, SCALE_ROWS: tl.constexpr, SCALE_COLS: tl.constexpr, ZEROS: tl.constexpr,
    TOTAL: tl.constexpr, BIASED: tl.constexpr, ACTIVATION: tl.constexpr, CLAMPED: tl.constexpr,
    ROWS: tl.constexpr, DEPTH: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(1)
    token = (pair // top_k).to(tl.int64)
    expert = tl.load(ids_ptr + token * ids_row + (pair % top_k) * ids_col) - first_expert
    expert = expert.to(tl.int64)  # experts times their size pass 2**31 elements
    if (expert >= 0) & (expert < num_experts):
        x_ptr += token * x_row
        data_ptr += expert * data_expert
        scale_ptr += expert * scale_expert
        zero_ptr += expert * zero_expert
        rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS).to(tl.int64)
        mask = rows < inner
        gates = tl.zeros([ROWS, DEPTH], dtype=tl.float32)
        ups = tl.zeros([ROWS, DEPTH], dtype=tl.float32)
        for start in range(0, hidden, DEPTH):
            depth = start + tl.arange(0, DEPTH).to(tl.int64)
            x = row_values(tl.load(x_ptr + depth * x_col, mask=depth < hidden, other=0.0), X_KIND, tl.float32)
            if X_COLS > 0:  # a step is no deeper than a block
                x *= tl.load(x_scale_ptr + token * x_scale_row + (start // X_COLS) * x_scale_col)
            gate = load_tile(
                data_ptr, scale_ptr, zero_ptr, rows, mask, start, hidden,
                data_row, data_col, scale_row, scale_col, zero_row, zero_col,
                KIND, SCALES, SCALE_ROWS, SCALE_COLS, ZEROS, ROWS, DEPTH, EVEN, tl.float32,
            )  # fmt: skip
            up = load_tile(
                data_ptr, scale_ptr, zero_ptr, rows + inner, mask, start, hidden,
                data_row, data_col, scale_row, scale_col, zero_row, zero_col,
                KIND, SCALES, SCALE_ROWS, SCALE_COLS, ZEROS, ROWS, DEPTH, EVEN, tl.float32,
            )  # fmt: skip
            if SCALE_COLS >= DEPTH:
                gate *= row_scales(
                    scale_ptr, rows, mask, start, scale_row, scale_col, SCALES, SCALE_ROWS, SCALE_COLS
                )[:, None]  # fmt: skip
                up *= row_scales(
                    scale_ptr, rows + inner, mask, start, scale_row, scale_col, SCALES, SCALE_ROWS, SCALE_COLS
                )[:, None]  # fmt: skip
            gates += gate * x[None, :]
            ups += up * x[None, :]
        gate = tl.sum(gates, 1)
        up = tl.sum(ups, 1)
        if SCALES != "none" and SCALE_COLS == 0:
            gate *= row_scales(scale_ptr, rows, mask, 0, scale_row, scale_col, SCALES, SCALE_ROWS, SCALE_COLS)
            up *= row_scales(scale_ptr, rows + inner, mask, 0, scale_row, scale_col, SCALES, SCALE_ROWS, SCALE_COLS)
        if TOTAL:
            total = tl.load(total_ptr + expert * total_expert)
            gate *= total
            up *= total
        if X_KIND != "plain" and X_COLS == 0:
            x_scale = tl.load(x_scale_ptr + token * x_scale_row)
            gate *= x_scale
            up *= x_scale
        if BIASED:
            gate += tl.load(bias_ptr + expert * bias_expert + rows * bias_col, mask=mask, other=0.0).to(tl.float32)
            up += tl.load(bias_ptr + expert * bias_expert + (rows + inner) * bias_col, mask=mask, other=0.0).to(tl.float32)
        result = gated(gate, up, limit, alpha, up_offset, ACTIVATION, CLAMPED)
        tl.store(gated_ptr + pair * inner + rows, result.to(gated_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _second_few_kernel(
    gated_ptr, gated_scale_ptr, ids_ptr, bias_ptr, out_ptr, data_ptr, scale_ptr, zero_ptr, total_ptr,
    data_expert, data_row, data_col, scale_expert, scale_row, scale_col, zero_expert, zero_row, zero_col, total_expert,
    top_k, num_experts, first_expert, hidden, inner, gated_scale_row, gated_scale_col, ids_row, ids_col, bias_expert, bias_col,
    X_KIND: tl.constexpr, X_COLS: tl.constexpr,
    KIND: tl.constexpr, SCALES: tl.constexpr, SCALE_ROWS: tl.constexpr, SCALE_COLS: tl.constexpr, ZEROS: tl.constexpr,
    TOTAL: tl.constexpr, BIASED: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(1)
    token = (pair // top_k).to(tl.int64)
    expert = tl.load(ids_ptr + token * ids_row + (pair % top_k) * ids_col) - first_expert
    expert = expert.to(tl.int64)
    if (expert >= 0) & (expert < num_experts):
        data_ptr += expert * data_expert
        scale_ptr += expert * scale_expert
        zero_ptr += expert * zero_expert
        rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS).to(tl.int64)
        mask = rows < hidden
        sums = tl.zeros([ROWS, DEPTH], dtype=tl.float32)
        for start in range(0, inner, DEPTH):
            depth = start + tl.arange(0, DEPTH)
            x = row_values(tl.load(gated_ptr + pair * inner + depth, mask=depth < inner, other=0.0), X_KIND, tl.float32)
            if X_COLS > 0:
                x *= tl.load(gated_scale_ptr + pair * gated_scale_row + (start // X_COLS) * gated_scale_col)
            tile = load_tile(
                data_ptr, scale_ptr, zero_ptr, rows, mask, start, inner,
                data_row, data_col, scale_row, scale_col, zero_row, zero_col,
                KIND, SCALES, SCALE_ROWS, SCALE_COLS, ZEROS, ROWS, DEPTH, EVEN, tl.float32,
            )  # fmt: skip
            if SCALE_COLS >= DEPTH:
                tile *= row_scales(scale_ptr, rows, mask, start, scale_row, scale_col, SCALES, SCALE_ROWS, SCALE_COLS)[:, None]
            sums += tile * x[None, :]
        result = tl.sum(sums, 1)
        if SCALES != "none" and SCALE_COLS == 0:
            result *= row_scales(scale_ptr, rows, mask, 0, scale_row, scale_col, SCALES, SCALE_ROWS, SCALE_COLS)
        if TOTAL:
            result *= tl.load(total_ptr + expert * total_expert)
        if X_KIND != "plain" and X_COLS == 0:
            result *= tl.load(gated_scale_ptr + pair * gated_scale_row)
        if BIASED:
            result += tl.load(bias_ptr + expert * bias_expert + rows * bias_col, mask=mask, other=0.0).to(tl.float32)
        tl.store(out_ptr + pair * hidden + rows, result, mask=mask)


def first_product(
    x: Rows,
    dtype: torch.dtype,
    w13: Stack,
    topk_ids: torch.Tensor,
    shape: tuple[int, int, int],
    bias: torch.Tensor | None,
    activation: GatedActivation,
    first_expert: int,
) -> torch.Tensor:
    """Return the gated values of each pair, [num_pairs, inner] in dtype; rows of pairs that lie elsewhere are not written."""
    num_experts, hidden, inner = shape
    num_pairs = topk_ids.numel()
    out = torch.empty((num_pairs, inner), dtype=dtype, device=x.data.device)
    tiles = few_tiles(hidden, w13.constants["SCALE_COLS"], matrices=2)
    _first_few_kernel[(triton.cdiv(inner, tiles.rows), num_pairs)](
        x.data, x.scale, topk_ids, out if bias is None else bias, out, *w13.arguments,
        topk_ids.shape[1], num_experts, first_expert, hidden, inner, *x.strides, *topk_ids.stride(), *_strides(bias),
        activation.limit, activation.alpha, activation.up_offset, **_kinds(x), **w13.constants, BIASED=bias is not None,
        ACTIVATION=activation.kind, CLAMPED=activation.clamped, **_shape(tiles, hidden),
    )  # fmt: skip
    return out


def second_product(
    gated_rows: Rows,
    w2: Stack,
    topk_ids: torch.Tensor,
    shape: tuple[int, int, int],
    bias: torch.Tensor | None,
    first_expert: int,
) -> torch.Tensor:
    """Return each pair's result, [num_pairs, hidden] float32; rows of pairs that lie elsewhere are not written."""
    num_experts, hidden, inner = shape
    num_pairs = topk_ids.numel()
    out = torch.empty((num_pairs, hidden), dtype=torch.float32, device=gated_rows.data.device)
    tiles = few_tiles(inner, w2.constants["SCALE_COLS"], matrices=1)
    _second_few_kernel[(triton.cdiv(hidden, tiles.rows), num_pairs)](
        gated_rows.data, gated_rows.scale, topk_ids, out if bias is None else bias, out, *w2.arguments,
        topk_ids.shape[1], num_experts, first_expert, hidden, inner, *gated_rows.strides[2:], *topk_ids.stride(), *_strides(bias),
        **_kinds(gated_rows), **w2.constants, BIASED=bias is not None, **_shape(tiles, inner),
    )  # fmt: skip
    return out


def _kinds(rows: Rows) -> dict[str, Any]:
    """Without the dtype of matrix units, which are not used."""
    return {name: rows.constants[name] for name in ("X_KIND", "X_COLS")}


def _strides(bias: torch.Tensor | None) -> tuple[int, int]:
    return (0, 0) if bias is None else (bias.stride(0), bias.stride(1))


def _shape(tiles: Any, columns: int) -> dict[str, Any]:
    return {"ROWS": tiles.rows, "DEPTH": tiles.depth, "EVEN": columns % tiles.depth == 0, "num_warps": tiles.num_warps}
