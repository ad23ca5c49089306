"""Dequantizers, bit for bit against the `gguf` package."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from tokenspeed_engine.checkpoint.gguf_quants import FORMATS, dequantize

QUANTIZED = [number for number, tensor_format in FORMATS.items() if tensor_format.decode is not None]
SCALE_OFFSETS = {"Q4_0": (0,), "Q4_1": (0, 2), "Q8_0": (0,), "Q4_K": (0, 2), "Q6_K": (208,)}


@pytest.mark.parametrize("number", QUANTIZED, ids=lambda n: FORMATS[n].name)
@pytest.mark.parametrize("num_blocks", [1, 3, 5000])
def test_equals_the_gguf_package(number: int, num_blocks: int) -> None:
    tensor_format = FORMATS[number]
    rng = np.random.default_rng(num_blocks)
    blocks = rng.integers(0, 256, (num_blocks, tensor_format.block_bytes), dtype=np.uint8)
    for offset in SCALE_OFFSETS[tensor_format.name]:
        # Random bits would be NaN or infinite scales now and then.
        scales = (rng.standard_normal((num_blocks, 1)) * 0.05).astype(np.float16)
        blocks[:, offset : offset + 2] = scales.view(np.uint8)
    expected = gguf.dequantize(blocks, gguf.GGMLQuantizationType(number))
    got = dequantize(torch.from_numpy(blocks.copy()).view(-1), tensor_format)
    assert got.dtype == torch.float32
    assert torch.equal(got, torch.from_numpy(np.ascontiguousarray(expected)).view(-1))


def test_every_format_has_the_block_size_of_the_gguf_package() -> None:
    for number, tensor_format in FORMATS.items():
        kind = gguf.GGMLQuantizationType(number)
        assert kind.name == tensor_format.name
        assert gguf.GGML_QUANT_SIZES[kind] == (tensor_format.block_elements, tensor_format.block_bytes)


def test_the_required_formats_are_there() -> None:
    names = {tensor_format.name for tensor_format in FORMATS.values()}
    assert {"Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q6_K", "F16", "F32", "BF16"} <= names


def test_half_a_block_is_refused() -> None:
    with pytest.raises(ValueError, match="whole Q4_0 blocks of 18 bytes, got 17"):
        dequantize(torch.zeros(17, dtype=torch.uint8), FORMATS[2])
