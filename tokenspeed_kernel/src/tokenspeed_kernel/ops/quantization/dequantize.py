"""The public op `dequantize`."""

from __future__ import annotations

import torch
from torch.compiler import is_compiling

from tokenspeed_kernel.dispatch import BoundOp, check_devices, register_library_op
from tokenspeed_kernel.errors import ShapeError
from tokenspeed_kernel.ops.operands import OPERAND_ERRORS, check_operands, refuse_kinds
from tokenspeed_kernel.ops.quantization.contract import DEQUANTIZE
from tokenspeed_kernel.quantized import QuantizedTensor
from tokenspeed_kernel.signature import Format

__all__ = ["dequantize"]

_dequantize = BoundOp(DEQUANTIZE)
_table = _dequantize.table


def dequantize(
    tensor: QuantizedTensor,
    *,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    solution: str | None = None,
) -> torch.Tensor:
    """Return the numbers that a quantized tensor stands for, rounded to float32 and from there to `out_dtype`.

    Args:
        tensor: [..., rows, columns] in any scaled format.
        out: optional tensor of that shape, any strides, written in place.
        out_dtype: fp32, bf16 or fp16; that of out, else fp32, where left out.
        solution: solution or kernel to insist on; chosen by the registry where left out.
    Returns:
        out, or a new contiguous tensor.
    Raises:
        ShapeError: not a quantized tensor, or out does not fit.  NoKernelError: nothing qualifies.
    Source: Rouhani et al., Microscaling Data Formats for Deep Learning, arXiv:2310.10537; ggml's block formats;
        `docs/contracts/quantization.md`.
    """
    if not isinstance(tensor, QuantizedTensor):
        got = type(tensor).__name__
        raise ShapeError(DEQUANTIZE.name, expected="a QuantizedTensor", got=got, fix="use .to(dtype) for a plain tensor")
    if is_compiling():
        dtype = out_dtype or (torch.float32 if out is None else out.dtype)
        result: torch.Tensor = _library_dequantize(
            tensor.data, tensor.scale, tensor.global_scale, tensor.zero_point, str(tensor.format), tensor.shape, dtype, solution
        )
        return result if out is None else out.copy_(result)
    try:
        return _run(tensor, out, out_dtype, solution)
    except OPERAND_ERRORS as error:
        refuse_kinds(dequantize, locals(), error)
        raise


def _run(tensor: QuantizedTensor, out: torch.Tensor | None, out_dtype: torch.dtype | None, solution: str | None) -> torch.Tensor:
    if out is not None:
        out_dtype = out_dtype or out.dtype
        if out.shape != tensor.shape or out.dtype is not out_dtype:
            expected = f"out {list(tensor.shape)} {out_dtype}"
            got = f"{list(out.shape)} {out.dtype}"
            raise ShapeError(DEQUANTIZE.name, expected=expected, got=got, fix="give out the logical shape")
    elif out_dtype is None:
        out_dtype = torch.float32
    device, fmt = tensor.device, tensor.format
    key = (device, fmt, out_dtype, None if out is None else out.device, solution)
    kernel = _table.get(key)
    if kernel is None:
        check_operands(DEQUANTIZE.name, tensor=tensor, out=out)
        check_devices(DEQUANTIZE.name, device, out=out)
        kernel = _dequantize.bind(key, device, (fmt, out_dtype), (), solution)
    result: torch.Tensor = kernel(tensor, out=out, out_dtype=out_dtype)
    return result


def _run_library(
    data: torch.Tensor,
    scale: torch.Tensor | None,
    global_scale: torch.Tensor | None,
    zero_point: torch.Tensor | None,
    fmt: str,
    shape: list[int],
    out_dtype: torch.dtype,
    solution: str | None = None,
) -> torch.Tensor:
    tensor = QuantizedTensor(data, Format.parse(fmt), tuple(shape), scale, global_scale, zero_point)
    return _run(tensor, None, out_dtype, solution)


def _fake(
    data: torch.Tensor,
    scale: torch.Tensor | None,
    global_scale: torch.Tensor | None,
    zero_point: torch.Tensor | None,
    fmt: str,
    shape: list[int],
    out_dtype: torch.dtype,
    solution: str | None = None,
) -> torch.Tensor:
    return data.new_empty(shape, dtype=out_dtype)


_library_dequantize = register_library_op(
    "dequantize(Tensor data, Tensor? scale, Tensor? global_scale, Tensor? zero_point, str format, SymInt[] shape, "
    "ScalarType out_dtype, str? solution=None) -> Tensor",
    _run_library,
    _fake,
)
