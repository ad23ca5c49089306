"""Quantized tensors: what is taken, what is refused, and views of them."""

from __future__ import annotations

import pytest
import torch

from tokenspeed_kernel import Format, FormatError, QuantizedTensor, ShapeError
from tokenspeed_kernel.quantized import data_shape, scale_shape

SCALE_DTYPES = {"nvfp4": torch.float8_e4m3fn, "mxfp4": torch.uint8, "mxfp8_e4m3": torch.uint8, "mxfp8_e5m2": torch.uint8}


def make(text: str, *shape: int) -> QuantizedTensor:
    """All zeros in that format."""
    fmt = Format.parse(text)
    scales = scale_shape(fmt, shape)
    dtype = SCALE_DTYPES.get(fmt.logical, torch.float32)
    return QuantizedTensor(
        torch.zeros(data_shape(fmt, shape), dtype=fmt.storage),
        fmt,
        shape,
        None if scales is None else torch.zeros(scales, dtype=dtype),
        torch.ones(shape[:-2]) if fmt.logical == "nvfp4" else None,
        torch.zeros(scales, dtype=torch.uint8) if fmt.logical == "uint4" and scales is not None else None,
    )


@pytest.mark.parametrize("fmt", Format.scaled(), ids=str)
@pytest.mark.parametrize("shape", [(256, 512), (3, 256, 512), (0, 256), (5, 0)])
def test_every_scaled_format_can_be_held(fmt: Format, shape: tuple[int, ...]) -> None:
    tensor = make(str(fmt), *shape)
    assert tensor.shape == shape and tensor.format == fmt and tensor.ndim == len(shape)
    assert tensor.size_bytes == sum(part.numel() * part.element_size() for part in tensor.parts)
    assert tensor.to("cpu") is tensor and tensor.to("meta").device.type == "meta"
    if len(shape) == 3:
        assert tensor[1].shape == shape[1:]
        assert tensor[1].data.data_ptr() == tensor.data[1].data_ptr()
    stop = shape[-2] // 2 // max(fmt.block[0], 1) * max(fmt.block[0], 1)
    assert tensor.rows(0, stop).shape == (*shape[:-2], stop, shape[-1])


@pytest.mark.parametrize(
    ("text", "shape", "data", "scale"),
    [
        ("fp8_e4m3@tensor", (4, 6), (4, 6), ()),
        ("fp8_e4m3@tensor", (2, 4, 6), (2, 4, 6), (2,)),
        ("fp8_e4m3@channel", (4, 6), (4, 6), (4, 1)),
        ("fp8_e4m3@block_1x128", (4, 200), (4, 200), (4, 2)),
        ("fp8_e4m3@block_128x128", (130, 200), (130, 200), (2, 2)),
        ("mxfp8_e4m3@block_32", (4, 64), (4, 64), (4, 2)),
        ("nvfp4@block_16", (4, 64), (4, 32), (4, 4)),
        ("mxfp4@block_32", (2, 4, 64), (2, 4, 32), (2, 4, 2)),
        ("int4@group_64", (4, 128), (4, 64), (4, 2)),
        ("int4@channel", (4, 6), (4, 3), (4, 1)),
        ("gguf_q4_1@inline", (4, 64), (4, 40), None),
        ("gguf_q6_k@inline", (4, 256), (4, 210), None),
    ],
)
def test_shapes_of_the_parts(text: str, shape, data, scale) -> None:  # type: ignore[no-untyped-def]
    fmt = Format.parse(text)
    assert data_shape(fmt, shape) == data
    assert scale_shape(fmt, shape) == scale


def test_checkpoint_forms_of_scales_are_taken() -> None:
    data = torch.zeros(4, 6, dtype=torch.float8_e4m3fn)
    for scale in (torch.ones(4), torch.ones(4, 1, dtype=torch.bfloat16)):
        assert QuantizedTensor(data, "fp8_e4m3@channel", (4, 6), scale).scale.shape == (4, 1)  # type: ignore[arg-type, union-attr]
    for scale in (torch.ones(1), torch.ones(())):
        assert QuantizedTensor(data, "fp8_e4m3@tensor", (4, 6), scale).scale.shape == ()  # type: ignore[arg-type, union-attr]
    e8m0 = torch.full((4, 1), 127, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    packed = QuantizedTensor(torch.zeros(4, 16, dtype=torch.uint8), "mxfp4@block_32", (4, 32), e8m0)  # type: ignore[arg-type]
    assert packed.scale is not None and packed.scale.dtype is torch.uint8 and packed.scale.tolist() == [[127]] * 4


def test_no_part_requires_a_gradient() -> None:
    scale = torch.nn.Parameter(torch.ones(4, 1))
    tensor = QuantizedTensor(torch.zeros(4, 16, dtype=torch.uint8), Format.parse("int4@group_32"), (4, 32), scale)
    assert tensor.scale is not None and not tensor.scale.requires_grad
    assert tensor.scale.data_ptr() == scale.data_ptr()


def test_rows_follow_the_blocks_of_the_scales() -> None:
    tensor = make("fp8_e4m3@block_128x128", 300, 256)
    part = tensor.rows(128, 300)
    assert part.shape == (172, 256) and part.scale is not None and part.scale.shape == (2, 2)
    with pytest.raises(ShapeError, match=r"multiples of 128, got 64\.\.128"):
        tensor.rows(64, 128)
    with pytest.raises(ShapeError, match=r"0 <= start <= stop <= 4, got 2\.\.5"):
        make("int4@group_32", 4, 32).rows(2, 5)
    asymmetric = make("uint4@group_32", 4, 64).rows(1, 3)
    assert asymmetric.zero_point is not None and asymmetric.zero_point.shape == (2, 2)


@pytest.mark.parametrize(
    ("text", "changes", "message"),
    [
        ("fp8_e4m3@tensor", {"scale": None}, r"fp8_e4m3@tensor: scale \[\], got none"),
        ("fp8_e4m3@tensor", {"data": torch.zeros(4, 32)}, r"data \[4, 32\] float8_e4m3fn, got \[4, 32\] float32"),
        ("fp8_e4m3@tensor", {"data": [1.0]}, r"got list"),
        ("fp8_e4m3@channel", {"scale": torch.ones(3)}, r"scale \[4, 1\] float32 or bfloat16 or float16, got \[3\] float32"),
        ("nvfp4@block_16", {"global_scale": None}, r"global_scale \[\], got none"),
        ("nvfp4@block_16", {"scale": torch.ones(4, 2)}, r"scale \[4, 2\] float8_e4m3fn, got \[4, 2\] float32"),
        ("mxfp4@block_32", {"data": torch.zeros(4, 32, dtype=torch.uint8)}, r"data \[4, 16\] uint8, got \[4, 32\]"),
        ("mxfp4@block_32", {"global_scale": torch.ones(())}, r"no global_scale, got one"),
        ("mxfp4@block_32", {"shape": (4, 48)}, r"columns a multiple of 32, got \[4, 48\]\nFix: pad"),
        ("int4@group_32", {"zero_point": torch.zeros(4, 1, dtype=torch.uint8)}, r"no zero_point, got one"),
        ("uint4@group_32", {"zero_point": None}, r"zero_point \[4, 1\], got none"),
        ("gguf_q4_1@inline", {"scale": torch.ones(4)}, r"no scale, got one"),
        ("gguf_q4_k@inline", {"shape": (4, 32)}, r"multiple of 256"),
        ("int4@group_32", {"scale": torch.ones(4, 1, device="meta")}, r"scale on cpu, got meta\nFix: move"),
        ("int4@group_32", {"data": torch.zeros(16, 4, dtype=torch.uint8).t()}, r"last stride is 1, got strides \(1, 4\)"),
        ("int4@group_32", {"shape": (32,)}, r"got \[32\]"),
    ],
)
def test_what_does_not_fit_is_refused(text: str, changes: dict[str, object], message: str) -> None:
    whole = make(text, 4, 256 if "_k" in text else 32)
    fields = {name: getattr(whole, name) for name in ("data", "format", "shape", "scale", "global_scale", "zero_point")}
    with pytest.raises(ShapeError, match=message):
        QuantizedTensor(**{**fields, **changes})


def test_formats_that_need_no_scale_or_do_not_exist_are_refused() -> None:
    with pytest.raises(ShapeError, match=r"a scaled format, got bf16\nFix: use the tensor itself"):
        QuantizedTensor(torch.zeros(2, 2, dtype=torch.bfloat16), Format.parse("bf16"), (2, 2))
    with pytest.raises(FormatError, match=r"nvfp4 has no scale layout block_32\nFix: use one of block_16"):
        Format.parse("nvfp4@block_32")
    with pytest.raises(FormatError, match=r"neither an encoding"):
        Format.parse("int4")
    with pytest.raises(ShapeError, match=r"a stack"):
        make("int4@group_32", 4, 32)[0]
