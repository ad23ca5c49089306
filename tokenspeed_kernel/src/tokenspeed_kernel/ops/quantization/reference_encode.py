"""How numbers become codes and scales: float64 arithmetic rounded to float32 after each operation, written for reading."""

from __future__ import annotations

import math

import torch

from tokenspeed_kernel.ops.quantization.codes import E2M1_VALUES
from tokenspeed_kernel.quantized import QuantizedTensor
from tokenspeed_kernel.signature import Format

__all__ = ["encode"]

_LARGEST = {"e4m3": 448.0, "e5m2": 57344.0, "e2m1": 6.0}
_LARGEST_EXPONENT = {"e4m3": 8, "e5m2": 15, "e2m1": 2}


def encode(
    x: torch.Tensor, fmt: Format, scale: torch.Tensor | None, global_scale: torch.Tensor | None
) -> QuantizedTensor:
    """Return x in that format; scales that are not given are computed.

    Args:
        x: [..., rows, columns].
        fmt: not a GGUF format.
        scale: of an fp8 format.
        global_scale: of nvfp4.
    """
    logical, shape, exact = fmt.logical, tuple(x.shape), x.double()
    if logical.startswith("fp8"):
        kind = "e4m3" if "e4m3" in logical else "e5m2"
        if scale is None:
            scale = _or_one(_rounded(_largest(exact.abs(), fmt) / _LARGEST[kind]))
        return QuantizedTensor(_float_codes(_quotient(exact, scale, fmt), kind).view(fmt.storage), fmt, shape, scale)
    if logical in ("mxfp8_e4m3", "mxfp8_e5m2", "mxfp4"):
        kind = {"mxfp8_e4m3": "e4m3", "mxfp8_e5m2": "e5m2", "mxfp4": "e2m1"}[logical]
        largest = _largest(exact.abs(), fmt)
        # Not log2: a GPU's logarithm of an exact power of two can lie just under the whole number. frexp's mantissa starts at 1/2.
        exponent = torch.frexp(largest.clamp(min=2.0**-149)).exponent - 1 - _LARGEST_EXPONENT[kind]
        stored = (exponent.clamp(-127, 127) + 127).masked_fill(largest == 0, 127).to(torch.uint8)
        if kind == "e2m1":
            stored = stored.masked_fill(_any_nan(exact, fmt), 255)
        power = torch.exp2(stored.double() - 127).masked_fill(stored == 255, float("nan"))
        codes = _float_codes(_quotient(exact, power, fmt), kind)
        data = _pairs(codes) if kind == "e2m1" else codes.view(fmt.storage)
        return QuantizedTensor(data, fmt, shape, stored)
    if logical == "nvfp4":
        if global_scale is None:
            global_scale = _or_one(_rounded(_largest(exact.abs(), Format.parse("fp8_e4m3@tensor")) / (6.0 * 448.0)))
        total = global_scale.double()[..., None, None]
        largest = _largest(exact.abs(), fmt)
        wanted = _rounded(_rounded(largest / 6.0).double() / total)
        stored = _float_codes(wanted.double(), "e4m3").view(torch.float8_e4m3fn)
        stored = torch.where(largest == 0, torch.ones_like(wanted), stored.float())
        stored = stored.masked_fill(_any_nan(exact, fmt), float("nan"))
        together = _rounded(stored.double() * total)
        quotient = _quotient(exact, together, fmt).masked_fill(_spread(together, fmt, shape) == 0, 0.0)
        scale = stored.to(torch.float8_e4m3fn)
        return QuantizedTensor(_pairs(_float_codes(quotient, "e2m1")), fmt, shape, scale, global_scale)
    return _integers(exact, fmt, x.dtype)


def _integers(exact: torch.Tensor, fmt: Format, dtype: torch.dtype) -> QuantizedTensor:
    """mxint4, int4 and uint4: the scale is rounded to the dtype in which it is kept, and what is kept divides."""
    finite = torch.where(exact.isfinite(), exact, torch.zeros_like(exact))
    top, bottom = _largest(finite.clamp(min=0), fmt), _largest((-finite).clamp(min=0), fmt)
    if fmt.logical == "mxint4":
        wanted, dtype = torch.maximum(_rounded(top / 7.0), _rounded(bottom / 8.0)), torch.bfloat16
    elif fmt.logical == "int4":
        wanted = _rounded(torch.maximum(top, bottom) / 7.5)
    else:
        wanted = _rounded(_rounded(top + bottom).double() / 15.0)
    scale = _or_one(wanted.to(dtype)).masked_fill(_any_nan(exact, fmt), float("nan"))
    rounded = torch.round(_quotient(exact, scale, fmt))
    if fmt.logical == "uint4":
        zero = torch.round(_rounded(bottom / scale.double())).nan_to_num(0.0).clamp(0, 15)
        codes = (rounded + _spread(zero, fmt, tuple(exact.shape))).clamp(0, 15)
        return QuantizedTensor(_pairs(codes.nan_to_num(0.0)), fmt, tuple(exact.shape), scale, None, zero.to(torch.uint8))
    codes = rounded.clamp(-8, 7).nan_to_num(0.0)
    codes = codes + 8 if fmt.logical == "int4" else codes % 16
    return QuantizedTensor(_pairs(codes), fmt, tuple(exact.shape), scale)


def _rounded(value: torch.Tensor) -> torch.Tensor:
    return value.float()


def _or_one(scale: torch.Tensor) -> torch.Tensor:
    """The scale of a block of zeros, or of numbers so small that it would be 0, is 1."""
    return scale.masked_fill(scale == 0, 1.0)


def _quotient(exact: torch.Tensor, scale: torch.Tensor, fmt: Format) -> torch.Tensor:
    return _rounded(exact / _spread(scale.double(), fmt, tuple(exact.shape))).double()


def _spread(per_block: torch.Tensor, fmt: Format, shape: tuple[int, ...]) -> torch.Tensor:
    if fmt.scale == "tensor":
        return per_block[..., None, None].expand(shape)
    rows, columns = fmt.block
    wide = per_block.repeat_interleave(max(rows, 1), dim=-2)[..., : shape[-2], :]
    return wide.repeat_interleave(columns or max(shape[-1], 1), dim=-1)[..., : shape[-1]]


def _blocks(value: torch.Tensor, fmt: Format) -> torch.Tensor:
    """[..., row blocks, column blocks, elements of a block], filled up with 0; [..., elements] for one scale a matrix."""
    if fmt.scale == "tensor":
        return value.flatten(-2)
    rows, columns = fmt.block
    rows, columns = max(rows, 1), columns or max(value.shape[-1], 1)
    tall, wide = math.ceil(value.shape[-2] / rows), math.ceil(value.shape[-1] / columns) if fmt.block[1] else 1
    padded = value.new_zeros((*value.shape[:-2], tall * rows, wide * columns))
    padded[..., : value.shape[-2], : value.shape[-1]] = value
    return padded.view(*value.shape[:-2], tall, rows, wide, columns).transpose(-3, -2).flatten(-2)


def _largest(value: torch.Tensor, fmt: Format) -> torch.Tensor:
    """The largest finite number of each block; 0 without any."""
    blocks = _blocks(torch.where(value.isfinite(), value, torch.zeros_like(value)), fmt)
    return blocks.amax(-1) if blocks.shape[-1] else blocks.new_zeros(blocks.shape[:-1])


def _any_nan(value: torch.Tensor, fmt: Format) -> torch.Tensor:
    return _blocks(value.isnan().double(), fmt).sum(-1) > 0


def _float_codes(value: torch.Tensor, kind: str) -> torch.Tensor:
    """The code whose number is nearest, of two equally near the even one; beyond the largest number that one; NaN is all ones."""
    if kind == "e2m1":
        numbers, sign, nan = torch.tensor(E2M1_VALUES[:8], dtype=torch.float64), 8, 0
    else:
        dtype, last = (torch.float8_e4m3fn, 0x7E) if kind == "e4m3" else (torch.float8_e5m2, 0x7B)
        numbers, sign, nan = torch.arange(last + 1, dtype=torch.uint8).view(dtype).double(), 128, 127
    numbers = numbers.to(value.device)
    size = value.abs().nan_to_num(0.0, posinf=float(numbers[-1])).clamp(max=float(numbers[-1]))
    above = torch.searchsorted(numbers, size.contiguous()).clamp(max=len(numbers) - 1)
    below = (above - 1).clamp(min=0)
    up, down = numbers[above] - size, size - numbers[below]
    codes = torch.where((up < down) | ((up == down) & (above % 2 == 0)), above, below)
    codes = codes + sign * torch.signbit(value)
    return codes.masked_fill(value.isnan(), nan).to(torch.uint8)


def _pairs(codes: torch.Tensor) -> torch.Tensor:
    """Two codes a byte, the first in the lower half."""
    codes = codes.to(torch.uint8).contiguous()
    return codes[..., ::2] | codes[..., 1::2] << 4
