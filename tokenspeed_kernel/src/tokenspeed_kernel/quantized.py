"""A tensor stored in a scaled format: the packed values with everything that is needed to read them.

The layouts are those of the checkpoints that engines load; `docs/contracts/quantization.md` gives each bit by bit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from tokenspeed_kernel.errors import ShapeError
from tokenspeed_kernel.signature import GGUF_BLOCKS, Format

__all__ = ["QuantizedTensor", "data_shape", "scale_shape"]

_NAME = "QuantizedTensor"
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_E8M0 = (torch.uint8, torch.float8_e8m0fnu)
_TWO_A_BYTE = ("nvfp4", "mxfp4", "mxint4", "int4", "uint4")
_SCALE_DTYPES: dict[str, tuple[torch.dtype, ...]] = {
    "nvfp4": (torch.float8_e4m3fn,),
    "mxfp4": _E8M0,
    "mxfp8_e4m3": _E8M0,
    "mxfp8_e5m2": _E8M0,
}


def data_shape(fmt: Format, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of the packed values.

    Args:
        fmt: a scaled format.
        shape: logical shape [..., rows, columns].
    Raises:
        ShapeError: the format cannot hold that shape.
    """
    columns = shape[-1] if shape else 0
    step = fmt.block[1] if fmt.scale != "block_128x128" and fmt.scale != "block_1x128" else 1
    step = max(step, 2 if fmt.logical in _TWO_A_BYTE else 1)
    if len(shape) < 2 or min(shape) < 0 or columns % step:
        raise ShapeError(
            _NAME,
            expected=f"for {fmt} a shape [..., rows, columns] with columns a multiple of {step}",
            got=f"{list(shape)}",
            fix="pad the columns, or choose a format with smaller blocks",
        )
    if fmt.logical in GGUF_BLOCKS:
        elements, num_bytes = GGUF_BLOCKS[fmt.logical]
        return *shape[:-1], columns // elements * num_bytes
    return (*shape[:-1], columns // 2) if fmt.logical in _TWO_A_BYTE else tuple(shape)


def scale_shape(fmt: Format, shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return the shape of the scales: [..., rows, columns] in blocks; [...] for one a matrix; None without any.

    Args:
        fmt: a scaled format.
        shape: logical shape [..., rows, columns].
    """
    if fmt.scale in ("none", "inline"):
        return None
    if fmt.scale == "tensor":
        return tuple(shape[:-2])
    rows, columns = fmt.block
    return *shape[:-2], math.ceil(shape[-2] / rows), math.ceil(shape[-1] / columns) if columns else 1


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedTensor:
    """A matrix, or a stack of them, in a scaled format. What it holds is checked when it is made, never later.

    Args:
        data: packed values: [..., rows, columns] for fp8 and mxfp8; [..., rows, columns / 2] uint8 for the formats of four
            bits, the lower half of a byte first; [..., rows, bytes of a row] uint8 for GGUF. The last stride is 1.
        format: scaled format (a `Format`, or its text form).
        shape: logical shape: (rows, columns), (out_features, in_features) for a weight; a stack of experts has one more in front.
        scale: what the stored value is multiplied by (for e8m0, whose exponent is stored, 2 ** (byte - 127)): shape and strides
            as `scale_shape` says; fp32, bf16 or fp16; fp8_e4m3 for nvfp4; uint8 or float8_e8m0fnu for mxfp8 and mxfp4, kept as
            uint8. A channel's or token's scales may come as [..., rows], a tensor's as [1]: they are kept as `scale_shape` says.
        global_scale: nvfp4: fp32, one a matrix, multiplies too (so a checkpoint's divisor is inverted first).
        zero_point: uint4: uint8 [..., rows, groups], subtracted from the stored value.
    Raises:
        ShapeError: a shape, dtype, stride or device does not fit the format.
        FormatError: the format is unknown.
    """

    data: torch.Tensor
    format: Format
    shape: tuple[int, ...]
    scale: torch.Tensor | None = None
    global_scale: torch.Tensor | None = None
    zero_point: torch.Tensor | None = None

    def __post_init__(self) -> None:
        fmt = Format.parse(self.format) if isinstance(self.format, str) else self.format
        shape = tuple(int(size) for size in self.shape)
        if fmt not in _SCALED:
            raise ShapeError(_NAME, expected="a scaled format", got=f"{fmt}", fix="use the tensor itself")
        fields = {"format": fmt, "shape": shape}
        _check(fmt, "data", self.data, (fmt.storage,), data_shape(fmt, shape))
        if self.data.shape[-1] > 1 and self.data.stride(-1) != 1:
            stride = f"strides {self.data.stride()}"
            raise ShapeError(_NAME, expected=f"{fmt}: data whose last stride is 1", got=stride, fix="call .contiguous()")
        wanted = scale_shape(fmt, shape)
        scale = self._fitting("scale", self.scale, wanted, _SCALE_DTYPES.get(fmt.logical, _FLOATS))
        if scale is not None and scale.dtype is torch.float8_e8m0fnu:
            scale = scale.view(torch.uint8)
        once = shape[:-2] if fmt.logical == "nvfp4" else None
        total = self._fitting("global_scale", self.global_scale, once, (torch.float32,))
        zero = self._fitting("zero_point", self.zero_point, wanted if fmt.logical == "uint4" else None, (torch.uint8,))
        for name, value in {**fields, "scale": scale, "global_scale": total, "zero_point": zero}.items():
            object.__setattr__(self, name, value)

    def _fitting(
        self, name: str, tensor: torch.Tensor | None, wanted: tuple[int, ...] | None, dtypes: tuple[torch.dtype, ...]
    ) -> torch.Tensor | None:
        fmt = self.format if isinstance(self.format, Format) else Format.parse(self.format)
        if wanted is None or tensor is None:
            if wanted is not None or tensor is not None:
                expected = f"no {name}" if wanted is None else f"{name} {list(wanted)}"
                raise ShapeError(_NAME, expected=f"{fmt}: {expected}", got="none" if tensor is None else "one")
            return None
        if tensor.device != self.data.device:
            expected, got = f"{name} on {self.data.device}", f"{tensor.device}"
            raise ShapeError(_NAME, expected=expected, got=got, fix="move all parts to one device")
        # [rows] for [rows, 1] and [1] for [] are how checkpoints write them.
        short = wanted[:-1] if fmt.scale in ("channel", "token") else (*wanted, 1)
        if tuple(tensor.shape) == short:
            tensor = tensor.reshape(wanted) if len(short) > len(wanted) else tensor.unsqueeze(-1)
        _check(fmt, name, tensor, dtypes, wanted)
        return tensor.detach() if tensor.requires_grad else tensor

    @property
    def device(self) -> torch.device:
        """Where it lies."""
        return self.data.device

    @property
    def ndim(self) -> int:
        """Dimensions of the logical shape."""
        return len(self.shape)

    @property
    def parts(self) -> tuple[torch.Tensor, ...]:
        """The tensors that it consists of."""
        return tuple(one for one in (self.data, self.scale, self.global_scale, self.zero_point) if one is not None)

    @property
    def size_bytes(self) -> int:
        """Bytes of all parts together."""
        return sum(one.numel() * one.element_size() for one in self.parts)

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> QuantizedTensor:
        """Return it on `device`; itself where it is there already.

        Args:
            device: where to.
            non_blocking: as `torch.Tensor.to` takes it.
        """
        if self.device == torch.device(device):
            return self

        def move(part: torch.Tensor | None) -> torch.Tensor | None:
            return None if part is None else part.to(device, non_blocking=non_blocking)

        data = self.data.to(device, non_blocking=non_blocking)
        others = (move(self.scale), move(self.global_scale), move(self.zero_point))
        return QuantizedTensor(data, self.format, self.shape, *others)

    def rows(self, start: int, stop: int) -> QuantizedTensor:
        """Return rows start..stop-1 as views: a tile, or a shard of the output features.

        Args:
            start: first row; for block_128x128 a multiple of 128.
            stop: row after the last; for block_128x128 a multiple of 128, or the number of rows.
        Raises:
            ShapeError: outside the matrix, or through a block.
        """
        total, block = self.shape[-2], max(self.format.block[0], 1)
        if not 0 <= start <= stop <= total or start % block or (stop % block and stop != total):
            expected = f"0 <= start <= stop <= {total}" + (f", multiples of {block}" if block > 1 else "")
            raise ShapeError(_NAME, expected=f"rows with {expected}", got=f"{start}..{stop}")
        scale = self.scale
        if scale is not None and self.format.scale != "tensor":
            scale = scale[..., start // block : math.ceil(stop / block), :]
        zero = None if self.zero_point is None else self.zero_point[..., start:stop, :]
        shape = (*self.shape[:-2], stop - start, self.shape[-1])
        return QuantizedTensor(self.data[..., start:stop, :], self.format, shape, scale, self.global_scale, zero)

    def __getitem__(self, index: int) -> QuantizedTensor:
        """Return one matrix of a stack, as views.

        Raises:
            ShapeError: it is a single matrix.
        """
        if self.ndim < 3:
            raise ShapeError(_NAME, expected="a stack [..., rows, columns] to take one of", got=f"{list(self.shape)}")
        others = (None if part is None else part[index] for part in (self.scale, self.global_scale, self.zero_point))
        return QuantizedTensor(self.data[index], self.format, self.shape[1:], *others)

    def __repr__(self) -> str:
        return f"QuantizedTensor({self.format}, {list(self.shape)}, device={str(self.device)!r})"


def _check(fmt: Format, name: str, tensor: torch.Tensor, dtypes: tuple[torch.dtype, ...], shape: tuple[int, ...]) -> None:
    if not isinstance(tensor, torch.Tensor) or tensor.dtype not in dtypes or tuple(tensor.shape) != shape:
        kinds = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        facts = (
            f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
            if isinstance(tensor, torch.Tensor)
            else type(tensor).__name__
        )
        raise ShapeError(_NAME, expected=f"{fmt}: {name} {list(shape)} {kinds}", got=facts)


_SCALED = frozenset(Format.scaled())
