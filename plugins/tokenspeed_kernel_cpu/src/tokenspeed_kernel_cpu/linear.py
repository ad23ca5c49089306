"""Products with weights that stay quantized; see `tokenspeed_kernel.ops.gemm.pack_weight` for the contract.

The 4-bit formats are put into panels of 16 rows, which take as much memory as the file's blocks (Q4_K 2.8% more). Q8_0 and Q6_K,
the usual formats of an embedding table that is the output head too, are read where they lie: the packed weight shares their memory.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import get_num_threads

from tokenspeed_kernel import QuantizedTensor
from tokenspeed_kernel.ops.gemm import PackedWeight
from tokenspeed_kernel_cpu import _kernels
from tokenspeed_kernel_cpu.formats import INT4, SCALES, STORED

__all__ = ["pack_weight"]

_IN_PLACE: Final = ("gguf_q8_0", "gguf_q6_k")
_PANEL_ROWS: Final = 16
_DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)


class _Panels:
    """A weight as the kernels read it, and the tensors that own its memory."""

    __slots__ = ("columns", "kernel", "owners", "rows", "size_bytes")

    def __init__(self, kernel: _kernels.Weight, shape: tuple[int, ...], owner: torch.Tensor) -> None:
        self.kernel = kernel
        self.rows, self.columns = shape
        self.owners = (owner,)
        self.size_bytes = owner.numel() * owner.element_size()


def pack_weight(weight: QuantizedTensor) -> PackedWeight:
    """Pack a GGUF or group-wise 4-bit weight for products that round activations to 8 bits."""
    panels = _of_groups(weight) if weight.format.logical in INT4 else _of_blocks(weight)
    return PackedWeight(panels, panels.rows, panels.columns, _multiply, "cpu_native", _DTYPES)


def _of_blocks(weight: QuantizedTensor) -> _Panels:
    rows, columns = weight.shape
    stored, data = STORED[weight.format.logical], weight.data
    row_bytes = data.stride(0)
    if weight.format.logical in _IN_PLACE:
        if row_bytes < data.shape[1]:  # an expanded row
            data = data.contiguous()
            row_bytes = data.shape[1]
        return _Panels(_kernels.Weight(stored, True, data.data_ptr(), rows, columns, row_bytes, 0, 0), weight.shape, data)
    panels = _empty(-(-rows // _PANEL_ROWS) * _kernels.panel_bytes(stored, columns))
    _kernels.pack_stored(stored, data.data_ptr(), row_bytes, rows, columns, panels.data_ptr(), get_num_threads())
    return _Panels(_kernels.Weight(stored, False, panels.data_ptr(), rows, columns, 0, 0, 0), weight.shape, panels)


def _of_groups(weight: QuantizedTensor) -> _Panels:
    rows, columns = weight.shape
    group = weight.format.block[1]
    assert weight.scale is not None
    values, scales = weight.data.contiguous(), weight.scale.contiguous()
    zeros = None if weight.zero_point is None else weight.zero_point.contiguous()
    scale = SCALES[scales.dtype]
    panels = _empty(-(-rows // _PANEL_ROWS) * (columns // group) * _kernels.group_bytes(scale, group))
    _kernels.pack_int4(
        values.data_ptr(), scales.data_ptr(), 0 if zeros is None else zeros.data_ptr(), rows, columns, group, scale,
        weight.format.logical == "mxint4", panels.data_ptr(),
    )  # fmt: skip
    kernel = _kernels.Weight(INT4[weight.format.logical], False, panels.data_ptr(), rows, columns, 0, group, scale)
    return _Panels(kernel, weight.shape, panels)


def _empty(size_bytes: int) -> torch.Tensor:
    return torch.empty(size_bytes, dtype=torch.uint8, device="cpu")


def _multiply(
    x: torch.Tensor, panels: _Panels, bias: torch.Tensor | None, out: torch.Tensor | None
) -> torch.Tensor:
    shape, dtype = x.shape, x.dtype
    rows = panels.rows
    if dtype is torch.float16:
        # Converted before and after: x is rounded to 8 bits in any case, and the result once.
        bias = None if bias is None else bias.to(torch.float32)
        product = _multiply(x.to(torch.float32), panels, bias, None)
        return product.to(dtype) if out is None else out.copy_(product)
    if len(shape) == 2:
        tokens = shape[0]
        if not x.is_contiguous() and x.stride(1) != 1:
            x = x.contiguous()
        x_stride = x.stride(0)
        target = out
        if target is None or not target.is_contiguous():
            target = torch.empty((tokens, rows), dtype=dtype, device="cpu")
    else:
        x = x.contiguous()
        tokens = x.numel() // panels.columns if panels.columns else shape[:-1].numel()
        x_stride = panels.columns
        target = out
        if target is None or not target.is_contiguous():
            target = torch.empty((*shape[:-1], rows), dtype=dtype, device="cpu")
    is_bf16 = dtype is torch.bfloat16
    if bias is None:
        bias_at, bias_bf16 = 0, False
    else:
        bias = bias.contiguous()
        bias_at, bias_bf16 = bias.data_ptr(), bias.dtype is torch.bfloat16
    panels.kernel.multiply(
        x.data_ptr(), x_stride, is_bf16, tokens, bias_at, bias_bf16, target.data_ptr(), rows, is_bf16, get_num_threads()
    )
    return target if out is None or out is target else out.copy_(target)
