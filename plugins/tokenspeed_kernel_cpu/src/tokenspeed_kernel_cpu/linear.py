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

__all__ = ["mm", "pack_weight", "pack_weight_exact"]

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
    return _pack(weight, is_exact=False)


def pack_weight_exact(weight: QuantizedTensor) -> PackedWeight:
    """Pack a GGUF or group-wise 4-bit weight for products with activations as they are."""
    return _pack(weight, is_exact=True)


def mm(
    x: torch.Tensor,
    weight: QuantizedTensor,
    bias: torch.Tensor | None = None,
    *,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Multiply by a GGUF weight where it lies, with activations as they are; see `tokenspeed_kernel.ops.gemm.mm`."""
    return _product(x, _in_place(weight, is_exact=True), bias, out, out_dtype or x.dtype)


def _pack(weight: QuantizedTensor, *, is_exact: bool) -> PackedWeight:
    name = weight.format.logical
    if name in INT4:
        panels = _of_groups(weight, is_exact)
    else:
        panels = _in_place(weight, is_exact) if name in _IN_PLACE else _of_blocks(weight, is_exact)
    return PackedWeight(panels, panels.rows, panels.columns, _multiply, "cpu_native", _DTYPES)


def _in_place(weight: QuantizedTensor, is_exact: bool) -> _Panels:
    rows, columns = weight.shape
    data = weight.data
    row_bytes = data.stride(0)
    if row_bytes < data.shape[1]:  # an expanded row
        data = data.contiguous()
        row_bytes = data.shape[1]
    stored = STORED[weight.format.logical]
    kernel = _kernels.Weight(stored, True, is_exact, data.data_ptr(), rows, columns, row_bytes, 0, 0)
    return _Panels(kernel, weight.shape, data)


def _of_blocks(weight: QuantizedTensor, is_exact: bool) -> _Panels:
    rows, columns = weight.shape
    stored, data = STORED[weight.format.logical], weight.data
    panels = _empty(-(-rows // _PANEL_ROWS) * _kernels.panel_bytes(stored, columns))
    _kernels.pack_stored(stored, data.data_ptr(), data.stride(0), rows, columns, panels.data_ptr(), get_num_threads())
    return _Panels(_kernels.Weight(stored, False, is_exact, panels.data_ptr(), rows, columns, 0, 0, 0), weight.shape, panels)


def _of_groups(weight: QuantizedTensor, is_exact: bool) -> _Panels:
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
    kernel = _kernels.Weight(INT4[weight.format.logical], False, is_exact, panels.data_ptr(), rows, columns, 0, group, scale)
    return _Panels(kernel, weight.shape, panels)


def _empty(size_bytes: int) -> torch.Tensor:
    return torch.empty(size_bytes, dtype=torch.uint8, device="cpu")


def _multiply(
    x: torch.Tensor, panels: _Panels, bias: torch.Tensor | None, out: torch.Tensor | None
) -> torch.Tensor:
    dtype = x.dtype
    if dtype is torch.float16:
        # Converted before and after: x is exact in float32, and the result is rounded once.
        bias = None if bias is None else bias.to(torch.float32)
        product = _product(x.to(torch.float32), panels, bias, None, torch.float32)
        return product.to(dtype) if out is None else out.copy_(product)
    return _product(x, panels, bias, out, dtype)


def _product(
    x: torch.Tensor, panels: _Panels, bias: torch.Tensor | None, out: torch.Tensor | None, out_dtype: torch.dtype
) -> torch.Tensor:
    shape = x.shape
    rows = panels.rows
    target = out
    if len(shape) == 2:
        tokens = shape[0]
        if not x.is_contiguous() and x.stride(1) != 1:
            x = x.contiguous()
        x_stride = x.stride(0)
        if target is None or not target.is_contiguous():
            # With sizes one by one: half the time of a tuple, and a third of torch.empty's with dtype and device.
            target = x.new_empty(tokens, rows) if out_dtype is x.dtype else x.new_empty((tokens, rows), dtype=out_dtype)
    else:
        x = x.contiguous()
        tokens = x.numel() // panels.columns if panels.columns else shape[:-1].numel()
        x_stride = panels.columns
        if target is None or not target.is_contiguous():
            target = torch.empty((*shape[:-1], rows), dtype=out_dtype, device="cpu")
    if bias is None:
        bias_at, bias_bf16 = 0, False
    else:
        bias = bias.contiguous()
        bias_at, bias_bf16 = bias.data_ptr(), bias.dtype is torch.bfloat16
    panels.kernel.multiply(
        x.data_ptr(), x_stride, x.dtype is torch.bfloat16, tokens, bias_at, bias_bf16,
        target.data_ptr(), rows, out_dtype is torch.bfloat16, get_num_threads(),
    )  # fmt: skip
    return target if out is None or out is target else out.copy_(target)
