"""Cases of the quantization ops, and random quantized tensors for the cases of other families."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tokenspeed_kernel.case import Case, Tolerance
from tokenspeed_kernel.ops.quantization.contract import DEQUANTIZE, QUANTIZE, QUANTIZE_FORMATS
from tokenspeed_kernel.quantized import QuantizedTensor, data_shape, scale_shape
from tokenspeed_kernel.signature import GGUF_BLOCKS, Format

__all__ = ["CASES", "random_quantized"]

_Build = Callable[[torch.Generator, torch.device, torch.dtype], dict[str, Any]]
_FORMATS = tuple(fmt for fmt in Format.scaled() if "fnuz" not in fmt.logical)
# Each number has one value: every bit must be there.
_EXACT = dict.fromkeys((torch.float32, torch.float16, torch.bfloat16), Tolerance(0.0, 0.0))
# Where the float16 numbers of a GGUF block lie, and which size gives values of ordinary size.
_HALVES: dict[str, dict[int, float]] = {
    "gguf_q4_0": {0: 0.22},
    "gguf_q4_1": {0: 0.22, 2: -1.6},
    "gguf_q8_0": {0: 1 / 74},
    "gguf_q4_k": {0: 1 / 140, 2: 1 / 60},
    "gguf_q6_k": {208: 1 / 1300},
}


def random_quantized(
    fmt: Format,
    shape: tuple[int, ...],
    generator: torch.Generator,
    device: torch.device,
    *,
    every_code: bool = False,
    magnitude: float = 1.0,
) -> QuantizedTensor:
    """Return random values with a standard deviation of about 1 in a scaled format, with scales that differ from block to block.

    Args:
        fmt: any scaled format.
        shape: logical shape.
        generator: CPU generator; the same state gives the same values.
        device: where to.
        every_code: all bit patterns of the values, also NaN and infinity of fp8.
        magnitude: standard deviation of a GGUF format's values instead of 1.
    """
    data = torch.randint(0, 256, data_shape(fmt, shape), generator=generator, dtype=torch.uint8)
    if fmt.storage is not torch.uint8 and not every_code:
        data = torch.randn(data.shape, generator=generator).to(fmt.storage)
    if fmt.logical in GGUF_BLOCKS:
        _put_halves(fmt.logical, data, generator, magnitude)
    scales = scale_shape(fmt, shape)
    scale = zero_point = None
    if scales is not None:
        scale = torch.rand(scales, generator=generator) + 0.5
        if fmt.logical.startswith(("mxfp8", "mxfp4")):
            middle = 127 if fmt.logical.startswith("mxfp8") else 125
            scale = torch.randint(middle - 1, middle + 2, scales, generator=generator, dtype=torch.uint8)
        elif fmt.logical == "nvfp4":
            scale = (scale * 64).to(torch.float8_e4m3fn)
        elif fmt.logical in ("mxint4", "int4", "uint4"):
            # Codes are spread evenly over sixteen numbers.
            scale = (scale * 0.2).to(torch.bfloat16 if fmt.logical == "mxint4" else torch.float16)
    if fmt.logical == "uint4" and scales is not None:
        zero_point = torch.randint(0, 16, scales, generator=generator, dtype=torch.uint8).to(device)
    total = (torch.rand(shape[:-2], generator=generator) + 0.5) / (64 * 3) if fmt.logical == "nvfp4" else None
    return QuantizedTensor(
        data.view(fmt.storage).to(device),
        fmt,
        shape,
        None if scale is None else scale.to(device),
        None if total is None else total.to(device),
        zero_point,
    )


def _put_halves(logical: str, data: torch.Tensor, generator: torch.Generator, magnitude: float) -> None:
    num_bytes = GGUF_BLOCKS[logical][1]
    blocks = data.view(*data.shape[:-1], data.shape[-1] // num_bytes, num_bytes)
    for place, size in _HALVES[logical].items():
        halves = (torch.rand((*blocks.shape[:-1], 1), generator=generator) + 0.5) * (size * magnitude)
        blocks[..., place : place + 2] = halves.half().view(torch.uint8)


def _dequantize(fmt: Format, *shape: int, layout: str = "contiguous") -> _Build:
    def build(generator: torch.Generator, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
        tensor = random_quantized(fmt, shape, generator, device, every_code=True)
        if layout == "transposed" and tensor.scale is not None and tensor.scale.dim() > 1:
            # Rows with gaps, and scales stored column by column, as some kernels want them.
            data = torch.repeat_interleave(tensor.data.view(torch.uint8), 2, dim=-2).view(fmt.storage)[..., ::2, :]
            scale = tensor.scale.transpose(-1, -2).contiguous().transpose(-1, -2)
            tensor = QuantizedTensor(data, fmt, tensor.shape, scale, tensor.global_scale, tensor.zero_point)
        return {"tensor": tensor, "out_dtype": dtype}

    return build


def _quantize(
    fmt: Format, *shape: int, values: str = "normal", layout: str = "contiguous", static: bool = False
) -> _Build:
    def build(generator: torch.Generator, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
        x = torch.randn(shape, generator=generator)
        if values == "adversarial":
            # Of all sizes, rows and blocks of zeros, ties, and what is not finite.
            x = x * torch.exp2(torch.randint(-40, 15, shape, generator=generator).float())
            x[..., 1, :] = 0.0
            x[..., :, 32:64] = 0.0
            x[..., 0, :32] = torch.arange(32) / 4.0 - 4.0
            x[..., 2, 64], x[..., 2, 65], x[..., 3, 70] = float("inf"), -float("inf"), float("nan")
        x = x.to(device, dtype)
        if layout == "transposed":
            x = x.transpose(-1, -2).contiguous().transpose(-1, -2)
        if layout == "sliced":
            x = torch.repeat_interleave(x, 2, dim=-1)[..., ::2]
        inputs: dict[str, Any] = {"x": x, "format": fmt}
        if static and fmt.logical == "nvfp4":
            return {**inputs, "global_scale": (torch.rand(shape[:-2], generator=generator) / 100 + 1e-3).to(device)}
        scales = scale_shape(fmt, shape)
        if static and scales is not None:
            return {**inputs, "scale": (torch.rand(scales, generator=generator) / 100 + 1e-3).to(device)}
        return inputs

    return build


_TARGETS = tuple(dict.fromkeys(fmt for fmt in (signature.get("out") for signature in QUANTIZE_FORMATS) if fmt is not None))
_STATIC = tuple(fmt for fmt in _TARGETS if fmt.logical in ("fp8_e4m3", "fp8_e5m2", "nvfp4"))
_ODD = "fp8_e4m3@block_1x128", "fp8_e5m2@block_128x128", "fp8_e4m3@tensor"
_LONG = "fp8_e4m3@token", "int4@channel", "uint4@channel"

CASES = (
    *(Case(DEQUANTIZE.name, f"{fmt} odd 3x512", _dequantize(fmt, 3, 512), tolerance=_EXACT) for fmt in _FORMATS),
    *(
        Case(DEQUANTIZE.name, f"{fmt} transposed {rows}x256", _dequantize(fmt, rows, 256, layout="transposed"), tolerance=_EXACT)
        for fmt in _FORMATS
        for rows in (131 if fmt.scale == "block_128x128" else 7,)
    ),
    *(Case(DEQUANTIZE.name, f"{fmt} stack 2x5x256", _dequantize(fmt, 2, 5, 256), tolerance=_EXACT) for fmt in _FORMATS),
    *(Case(DEQUANTIZE.name, f"{fmt} empty 0x256", _dequantize(fmt, 0, 256), tolerance=_EXACT) for fmt in _FORMATS[:1]),
    *(Case(DEQUANTIZE.name, f"{fmt} 4096x4096", _dequantize(fmt, 4096, 4096), tolerance=_EXACT, bench=True) for fmt in _FORMATS),
    *(Case(QUANTIZE.name, f"{fmt} odd 5x256", _quantize(fmt, 5, 256)) for fmt in _TARGETS),
    *(Case(QUANTIZE.name, f"{fmt} adversarial 6x384", _quantize(fmt, 6, 384, values="adversarial")) for fmt in _TARGETS),
    *(Case(QUANTIZE.name, f"{fmt} transposed 7x256", _quantize(fmt, 7, 256, layout="transposed")) for fmt in _TARGETS),
    *(Case(QUANTIZE.name, f"{fmt} sliced stack 2x3x128", _quantize(fmt, 2, 3, 128, layout="sliced")) for fmt in _TARGETS),
    *(Case(QUANTIZE.name, f"{fmt} given scales 5x256", _quantize(fmt, 5, 256, static=True)) for fmt in _STATIC),
    *(Case(QUANTIZE.name, f"{fmt} given scales 2x3x128", _quantize(fmt, 2, 3, 128, static=True)) for fmt in _STATIC),
    *(Case(QUANTIZE.name, f"{fmt} 130x200", _quantize(Format.parse(fmt), 130, 200)) for fmt in _ODD),
    *(Case(QUANTIZE.name, f"{fmt} long rows 2x2560", _quantize(Format.parse(fmt), 2, 2560)) for fmt in _LONG),
    *(Case(QUANTIZE.name, f"{fmt} empty 0x256", _quantize(fmt, 0, 256)) for fmt in _TARGETS),
    *(Case(QUANTIZE.name, f"{fmt} no columns 3x0", _quantize(fmt, 3, 0)) for fmt in _TARGETS),
    *(Case(QUANTIZE.name, f"{fmt} 4096x4096", _quantize(fmt, 4096, 4096), bench=True) for fmt in _TARGETS),
)
"""Every kernel of the family meets these."""
