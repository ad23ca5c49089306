"""Matrix products on the CPU: in float32, with the operand order that the BLAS library is fast at, or in bf16 hardware."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.nn.functional import linear

__all__ = ["exact_product", "mm", "mm_bf16"]

_mkldnn: Any = torch.backends.mkldnn
_MATMUL = _mkldnn.matmul  # holds the process's setting for float32 products
# Rows of a half-precision weight that are widened at a time: the float32 copy of a piece stays in the cache, where that of
# the whole weight would be written to memory and read back (4.8 ms against 40 ms for [1, 576] x [49152, 576]).
_WIDEN_BYTES = 2 << 20


def mm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """See `tokenspeed_kernel.ops.gemm.mm`.

    Half-precision operands are widened: without hardware for them their product is 40 to 60 times slower than a float32 one.
    """
    out_features, in_features = weight.shape
    shape = (*x.shape[:-1], out_features)
    rows = x.reshape(math.prod(shape[:-1]), in_features)
    product = exact_product(rows, weight)
    if bias is not None:
        product = torch.add(product, bias)
    if out is not None:
        return out.copy_(product.view(shape) if product.is_contiguous() else product.reshape(shape))
    return product.to(out_dtype or x.dtype).contiguous().view(shape)


def mm_bf16(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """See `tokenspeed_kernel.ops.gemm.mm`; bf16 throughout, accumulated in float32 by the hardware's dot product.

    Baseline: float32 by `linear` on 2 cores with AVX512_BF16, [M, 576] x [49152, 576]: 9.6 ms against 3.5 ms here at M=1, 17.6
    against 5.4 at M=16.
    """
    product = linear(x, weight, bias)
    return product.contiguous() if out is None else out.copy_(product)


def exact_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return x @ weight.T in IEEE float32, in any memory order.

    Args:
        x: [rows, in_features].
        weight: [out_features, in_features]; a half-precision one is widened.
    """
    precision = _MATMUL.fp32_precision
    if precision in ("ieee", "none"):
        return _product(x, weight)
    # Someone allowed bf16 or tf32 for their own products; ours stay exact, and the setting is put back.
    _MATMUL.fp32_precision = "ieee"
    try:
        return _product(x, weight)
    finally:
        _MATMUL.fp32_precision = precision


def _product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x @ weight.T in float32, in any memory order."""
    if weight.dtype is torch.float32:
        return _float32_product(x, weight)
    x = x.float()
    out_features, in_features = weight.shape
    step = max(1, _WIDEN_BYTES // (4 * max(in_features, 1)))
    product = torch.empty((x.shape[0], out_features), dtype=torch.float32, device=x.device)
    piece = torch.empty((min(step, out_features), in_features), dtype=torch.float32, device=x.device)
    for start in range(0, out_features, step):
        part = weight[start : start + step]
        product[:, start : start + step] = _float32_product(x, piece[: part.shape[0]].copy_(part))
    return product


def _float32_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x @ weight.T for float32, in the operand order that is fast.

    BLAS sees `weight @ x.T` as another problem than `x @ weight.T`, and MKL reads the weight at 20 to 38 GB/s in the first
    form against 4 to 12 in the second when x has few rows. Its matrix-vector product uses one thread, so that one row is
    doubled. Baseline: `linear` of torch 2.13 on 2 cores with a weight from memory: [1, 576] x [49152, 576] 9.9 ms
    against 3.3 ms here; 4 rows 16.1 against 4.9; 16 rows 20.6 against 14.7.
    """
    num_rows, in_features = x.shape
    out_features = weight.shape[0]
    few = num_rows <= 4 or (num_rows <= 8 and in_features < 1024) or (num_rows <= 32 and out_features >= 16384)
    if not few or num_rows == 0 or weight.stride(1) != 1:
        return torch.mm(x, weight.t())
    if num_rows == 1:
        return torch.mm(weight, torch.cat((x, x)).t())[:, :1].t()
    return torch.mm(weight, x.t()).t()

