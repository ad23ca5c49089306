"""float32 products with weights in oneDNN's blocked order.

Baseline: torch 2.13 on 2 cores of an AVX-512 EPYC, [M, 576] x [3072, 576], weights from memory: `linear` 0.62 ms at M=1, 0.83 at
M=16, 2.18 at M=64; here 0.26, 0.37 and 1.12. [M, 576] x [49152, 576]: 9.8, 17.4 and 32 ms against 2.8, 5.5 and 17.5.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from tokenspeed_kernel.ops.gemm.packed import PackedWeight

__all__ = ["pack_weight"]

_mkldnn: Any = torch.backends.mkldnn
_MATMUL = _mkldnn.matmul  # holds the process's setting for float32 products
_reorder = torch.ops.mkldnn._reorder_linear_weight
_linear = torch.ops.mkldnn._linear_pointwise
# The order that oneDNN wants for so many rows serves fewer and more rows as well; the one for a single row serves only that.
_TYPICAL_ROWS = 16


def pack_weight(weight: torch.Tensor) -> PackedWeight:
    """See `tokenspeed_kernel.ops.gemm.pack_weight`."""
    out_features, in_features = weight.shape
    if out_features == 0 or in_features == 0:
        return PackedWeight(weight, out_features, in_features, _multiply_empty, "onednn")
    data: torch.Tensor = _reorder(weight.contiguous(), _TYPICAL_ROWS)
    return PackedWeight(data, out_features, in_features, _multiply, "onednn")


def _multiply(
    x: torch.Tensor, data: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor | None
) -> torch.Tensor:
    precision = _MATMUL.fp32_precision
    if precision in ("ieee", "none"):
        product = _product(x, data, bias)
    else:
        # Someone allowed bf16 or tf32 for their own products; ours stay exact, and the setting is put back.
        _MATMUL.fp32_precision = "ieee"
        try:
            product = _product(x, data, bias)
        finally:
            _MATMUL.fp32_precision = precision
    return product if out is None else out.copy_(product)


def _product(x: torch.Tensor, data: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    if x.numel() == 0:
        return x.new_empty((*x.shape[:-1], data.shape[0]))
    if bias is not None:
        bias = bias.contiguous()  # oneDNN reads it as contiguous, whatever its stride
    if x.dim() == 2 and x.is_contiguous():
        product: torch.Tensor = _linear(x, data, bias, "none", [], "")
        return product
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1]).contiguous()
    flat: torch.Tensor = _linear(rows, data, bias, "none", [], "")
    return flat.view(*x.shape[:-1], data.shape[0])


def _multiply_empty(
    x: torch.Tensor, data: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor | None
) -> torch.Tensor:
    product = x.new_zeros((*x.shape[:-1], data.shape[0]))
    product = product if bias is None else product + bias
    return product if out is None else out.copy_(product)
