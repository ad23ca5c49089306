"""Matrix products on the CPU with operands in scaled formats: the weight is decoded piece by piece."""

from __future__ import annotations

import math

import torch

from tokenspeed_kernel.ops.gemm.cpu.mm import exact_product
from tokenspeed_kernel.ops.quantization.cpu.decode import decode
from tokenspeed_kernel.quantized import QuantizedTensor

__all__ = ["mm", "product_scaled"]

# Float32 bytes of a decoded piece of the weight: it stays in the cache, where the whole would be written to memory and read back.
_PIECE_BYTES = 2 << 20


def mm(
    x: torch.Tensor | QuantizedTensor,
    weight: torch.Tensor | QuantizedTensor,
    bias: torch.Tensor | None = None,
    *,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """See `tokenspeed_kernel.ops.gemm.mm`; products in float32, of values as the format defines them."""
    assert isinstance(weight, QuantizedTensor)
    out_features, in_features = weight.shape
    shape = (*x.shape[:-1], out_features)
    rows = _rows(x, math.prod(shape[:-1]), in_features)
    product = product_scaled(rows, weight)
    if bias is not None:
        product.add_(bias)
    if out is not None:
        return out.copy_(product.view(shape))
    return product.to(out_dtype).view(shape)


def product_scaled(rows: torch.Tensor, weight: QuantizedTensor) -> torch.Tensor:
    """Return rows @ weight.T in float32.

    Args:
        rows: [rows, in_features] float32.
        weight: a single matrix.
    """
    out_features, in_features = weight.shape
    product = torch.empty((rows.shape[0], out_features), dtype=torch.float32, device=rows.device)
    block = max(weight.format.block[0], 1)
    step = max(1, _PIECE_BYTES // (4 * max(in_features, 1)))
    step = math.ceil(step / block) * block
    for start in range(0, out_features, step):
        stop = min(start + step, out_features)
        product[:, start:stop] = exact_product(rows, decode(weight.rows(start, stop)))
    return product


def _rows(x: torch.Tensor | QuantizedTensor, num_rows: int, in_features: int) -> torch.Tensor:
    if isinstance(x, torch.Tensor):
        return x.reshape(num_rows, in_features).float()
    if x.ndim == 2:
        return decode(x)
    return torch.cat([_rows(x[index], num_rows // x.shape[0], in_features) for index in range(x.shape[0])])
