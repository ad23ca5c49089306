"""Numbers to scaled formats on the CPU: a few passes over the rows in float32, piece by piece."""

from __future__ import annotations

import math

import torch

from tokenspeed_kernel.ops.quantization.quantize import empty_quantized
from tokenspeed_kernel.quantized import QuantizedTensor
from tokenspeed_kernel.signature import Format

__all__ = ["quantize"]

# Float32 bytes of the rows that are encoded at a time: the intermediates stay in the cache.
_PIECE_BYTES = 1 << 20
_LARGEST = {"e4m3": 448.0, "e5m2": 57344.0}
_LARGEST_EXPONENT = {"e4m3": 8, "e5m2": 15, "e2m1": 2}
_KINDS = {
    "fp8_e4m3": "e4m3",
    "fp8_e5m2": "e5m2",
    "mxfp8_e4m3": "e4m3",
    "mxfp8_e5m2": "e5m2",
    "mxfp4": "e2m1",
    "nvfp4": "e2m1",
}
# Between the numbers of neighbouring e2m1 codes. A number just between goes to the even code: up at every second one.
_E2M1_MIDDLES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


def quantize(
    x: torch.Tensor,
    format: Format,
    scale: torch.Tensor | None = None,
    global_scale: torch.Tensor | None = None,
    out: QuantizedTensor | None = None,
) -> QuantizedTensor:
    """See `tokenspeed_kernel.ops.quantization.quantize`."""
    shape = tuple(x.shape)
    if out is None:
        kept = torch.float32 if format.logical.startswith("fp8") else x.dtype
        out = empty_quantized(format, shape, x.device, kept)
        if scale is not None:
            out = QuantizedTensor(out.data, format, shape, scale)
        if global_scale is not None:
            out = QuantizedTensor(out.data, format, shape, out.scale, global_scale)
    else:
        for mine, given in ((out.scale, scale), (out.global_scale, global_scale)):
            if given is not None and mine is not None:
                mine.copy_(given)
    _fill(x, out, scale is not None, global_scale is not None)
    return out


def _fill(x: torch.Tensor, out: QuantizedTensor, scale_given: bool, global_given: bool) -> None:
    if out.ndim > 2:
        for index in range(out.shape[0]):
            _fill(x[index], out[index], scale_given, global_given)
        return
    fmt, (num_rows, columns) = out.format, out.shape
    if fmt.scale == "tensor" and not scale_given and out.scale is not None:
        out.scale.copy_(_or_one(_largest(x) / _LARGEST[_KINDS[fmt.logical]]))
    if fmt.logical == "nvfp4" and not global_given and out.global_scale is not None:
        out.global_scale.copy_(_or_one(_largest(x) / (6.0 * 448.0)))
    block = max(fmt.block[0], 1)
    step = math.ceil(max(1, _PIECE_BYTES // (4 * max(columns, 1))) / block) * block
    for start in range(0, num_rows, step):
        stop = min(start + step, num_rows)
        _fill_piece(x[start:stop].float(), out.rows(start, stop), scale_given or fmt.scale == "tensor")


def _fill_piece(x: torch.Tensor, out: QuantizedTensor, scale_given: bool) -> None:
    logical = out.format.logical
    assert out.scale is not None
    if logical.startswith("fp8"):
        _fp8(x, out, scale_given)
    elif logical.startswith("mxfp"):
        _mx(x, out)
    elif logical == "nvfp4":
        _nvfp4(x, out)
    else:
        _integers(x, out)


def _fp8(x: torch.Tensor, out: QuantizedTensor, scale_given: bool) -> None:
    kind = _KINDS[out.format.logical]
    assert out.scale is not None
    rows, columns = out.format.block
    if out.format.scale in ("tensor", "channel", "token"):
        if not scale_given:
            largest = _finite(x).amax(1, keepdim=True) if x.shape[1] else torch.zeros_like(out.scale)
            out.scale.copy_(_or_one(largest / _LARGEST[kind]))
        out.data.copy_(_clamped(x / out.scale.float(), kind))
        return
    # Blocks of 128, of which the last may be smaller: filled up with zeros.
    tall, wide = (math.ceil(size / block) for size, block in zip(x.shape, (rows, columns), strict=True))
    padded = x
    if x.shape != (tall * rows, wide * columns):
        padded = x.new_zeros((tall * rows, wide * columns))
        padded[: x.shape[0], : x.shape[1]] = x
    blocks = padded.view(tall, rows, wide, columns)
    if not scale_given:
        out.scale.copy_(_or_one(_finite(blocks).amax((1, 3)) / _LARGEST[kind]))
    codes = _clamped(blocks / out.scale.float()[:, None, :, None], kind).view(padded.shape)
    out.data.copy_(codes[: x.shape[0], : x.shape[1]])


def _mx(x: torch.Tensor, out: QuantizedTensor) -> None:
    kind = _KINDS[out.format.logical]
    assert out.scale is not None
    blocks = _blocks(x, out)
    largest = _finite(blocks).amax(2)
    # The exponent of a float32 is its floor(log2); that of a subnormal one is below every scale.
    exponent = (largest.view(torch.int32) >> 23) - 127 - _LARGEST_EXPONENT[kind]
    stored = (exponent.clamp_(-127, 127) + 127).masked_fill_(largest == 0, 127)
    if kind == "e2m1":
        stored.masked_fill_(blocks.isnan().any(2), 255)
    out.scale.copy_(stored)
    scale = torch.ldexp(torch.ones_like(largest), stored - 127)
    quotient = blocks / scale.unsqueeze(2)
    if kind == "e2m1":
        quotient.masked_fill_((stored == 255).unsqueeze(2), float("nan"))
        out.data.copy_(_e2m1_pairs(quotient.view(x.shape)))
    else:
        out.data.copy_(_clamped(quotient, kind).view(x.shape))


def _nvfp4(x: torch.Tensor, out: QuantizedTensor) -> None:
    assert out.scale is not None and out.global_scale is not None
    blocks = _blocks(x, out)
    largest = _finite(blocks).amax(2)
    wanted = ((largest / 6.0) / out.global_scale).clamp_(max=448.0).masked_fill_(largest == 0, 1.0)
    out.scale.copy_(wanted.masked_fill_(blocks.isnan().any(2), float("nan")))
    together = (out.scale.float() * out.global_scale).unsqueeze(2)
    quotient = (blocks / together).masked_fill_(together == 0, 0.0)
    out.data.copy_(_e2m1_pairs(quotient.view(x.shape)))


def _integers(x: torch.Tensor, out: QuantizedTensor) -> None:
    assert out.scale is not None
    logical = out.format.logical
    blocks = _blocks(x, out)
    finite = blocks.masked_fill(~blocks.isfinite(), 0.0)
    empty = blocks.shape[2] == 0
    top = finite.new_zeros(blocks.shape[:2]) if empty else finite.amax(2).clamp_(min=0)
    bottom = finite.new_zeros(blocks.shape[:2]) if empty else finite.amin(2).neg_().clamp_(min=0)
    if logical == "mxint4":
        wanted = torch.maximum(top / 7.0, bottom / 8.0)
    else:
        wanted = torch.maximum(top, bottom) / 7.5 if logical == "int4" else (top + bottom) / 15.0
    scale = _or_one(wanted.to(out.scale.dtype)).masked_fill_(blocks.isnan().any(2), float("nan"))
    out.scale.copy_(scale)
    scale = scale.float()
    codes = (blocks / scale.unsqueeze(2)).round_()
    if logical == "uint4":
        assert out.zero_point is not None
        zero = (bottom / scale).round_().nan_to_num_(0.0).clamp_(0, 15)
        out.zero_point.copy_(zero)
        codes = codes.add_(zero.unsqueeze(2)).clamp_(0, 15).nan_to_num_(0.0)
    else:
        codes = codes.clamp_(-8, 7).nan_to_num_(0.0)
        codes = codes.add_(8) if logical == "int4" else codes.add_(16).remainder_(16)
    out.data.copy_(_packed(codes.view(x.shape).to(torch.uint8)))


def _blocks(x: torch.Tensor, out: QuantizedTensor) -> torch.Tensor:
    size = out.format.block[1] or x.shape[1]
    return x.reshape(x.shape[0], x.shape[1] // size if size else 1, size)


def _finite(x: torch.Tensor) -> torch.Tensor:
    """Sizes of the numbers; 0 for those that are not finite."""
    size = x.abs()
    return size.masked_fill_(~size.isfinite(), 0.0)


def _largest(x: torch.Tensor) -> torch.Tensor:
    return _finite(x.float()).amax() if x.numel() else torch.zeros((), device=x.device)


def _or_one(scale: torch.Tensor) -> torch.Tensor:
    return scale.masked_fill(scale == 0, 1.0)


def _clamped(x: torch.Tensor, kind: str) -> torch.Tensor:
    """In range: PyTorch's conversion to float8 rounds as wanted, but would make NaN of what is too large."""
    dtype = torch.float8_e4m3fn if kind == "e4m3" else torch.float8_e5m2
    return x.clamp_(-_LARGEST[kind], _LARGEST[kind]).to(dtype)


def _e2m1_pairs(x: torch.Tensor) -> torch.Tensor:
    size = x.abs()
    codes = torch.zeros(x.shape, dtype=torch.uint8, device=x.device)
    for place, middle in enumerate(_E2M1_MIDDLES):
        codes += size >= middle if place % 2 else size > middle
    codes += torch.signbit(x).to(torch.uint8) * 8
    return _packed(codes.masked_fill_(x.isnan(), 0))


def _packed(codes: torch.Tensor) -> torch.Tensor:
    return codes[..., ::2] | codes[..., 1::2] << 4
