"""Packings of checkpoints: hand-made bytes, every code, and public tools where they are installed."""

from __future__ import annotations

import pytest
import torch

from tokenspeed_kernel import ShapeError
from tokenspeed_kernel.ops.quantization import (
    dequantize,
    int4_from_awq,
    int4_from_gptq,
    int4_from_packed_int32,
    mxfp4_from_blocks,
    nvfp4_from_divisor,
    quantize,
)

GENERATOR = torch.Generator().manual_seed(0)


def word(*codes: int) -> int:
    """Eight numbers of four bits, the first in the lowest, as a signed int32."""
    value = sum(code << 4 * place for place, code in enumerate(codes))
    return value - 2**32 if value >= 2**31 else value


def codes(*shape: int) -> torch.Tensor:
    return torch.randint(0, 16, shape, generator=GENERATOR)


def packed(values: torch.Tensor, order: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    """[rows, columns / 8] int32 from codes [rows, columns]."""
    eights = values.view(values.shape[0], -1, 8)[..., list(order)]
    return torch.tensor([[word(*eight) for eight in row] for row in eights.tolist()], dtype=torch.int32)


def test_one_word_of_each() -> None:
    data = torch.tensor([[word(0, 1, 2, 3, 4, 5, 6, 7), word(8, 9, 10, 11, 12, 13, 14, 15), 0, 0]], dtype=torch.int32)
    got = int4_from_packed_int32(data, torch.tensor([[0.5]]))
    assert str(got.format) == "int4@group_32"
    assert dequantize(got)[0, :16].tolist() == [(one - 8) / 2 for one in range(16)]


@pytest.mark.parametrize("group", [32, 64, 128, 256])
def test_compressed_tensors_form(group: int) -> None:
    values, scales = codes(16, 256), torch.rand(16, 256 // group, generator=GENERATOR).half()
    got = int4_from_packed_int32(packed(values), scales)
    assert str(got.format) == ("int4@channel" if group == 256 else f"int4@group_{group}")
    spread = scales.float().repeat_interleave(group, 1)
    assert torch.equal(dequantize(got), (values - 8) * spread)
    zeros = codes(16, 256 // group)
    got = int4_from_packed_int32(packed(values), scales, packed(zeros.t().contiguous()).t().contiguous())
    assert str(got.format).startswith("uint4@")
    assert torch.equal(dequantize(got), (values - zeros.repeat_interleave(group, 1)) * spread)


@pytest.mark.parametrize("minus_one", [True, False])
def test_gptq_form(minus_one: bool) -> None:
    values, zeros = codes(256, 16), codes(2, 16)  # [in, out], [groups, out]
    scales = torch.rand(2, 16, generator=GENERATOR).half()
    index = torch.arange(256) // 128
    got = int4_from_gptq(
        packed(values.t().contiguous()).t().contiguous(), scales, packed(zeros), index, stored_minus_one=minus_one
    )
    want = (values - (zeros + minus_one)[index]) * scales[index].float()
    assert str(got.format) == "uint4@group_128" and torch.equal(dequantize(got), want.t())
    symmetric = int4_from_gptq(packed(values.t().contiguous()).t().contiguous(), scales, packed(torch.full((2, 16), 7)))
    assert str(symmetric.format) == "int4@group_128" and symmetric.zero_point is None
    assert torch.equal(dequantize(symmetric), ((values - 8) * scales[index].float()).t())
    with pytest.raises(ShapeError, match=r"inputs in the order of their groups, got another g_idx\nFix: use a checkpoint"):
        int4_from_gptq(packed(values.t().contiguous()).t().contiguous(), scales, packed(zeros), index.flip(0))


def test_awq_form() -> None:
    values, zeros = codes(128, 16), codes(2, 16)
    scales = torch.rand(2, 16, generator=GENERATOR).bfloat16()
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    got = int4_from_awq(packed(values, order), scales, packed(zeros, order))
    index = torch.arange(128) // 64
    assert torch.equal(dequantize(got), ((values - zeros[index]) * scales[index].float()).t())


def test_blocks_of_sixteen_bytes() -> None:
    blocks = torch.randint(0, 256, (2, 3, 4, 16), generator=GENERATOR, dtype=torch.uint8)
    scales = torch.randint(120, 130, (2, 3, 4), generator=GENERATOR, dtype=torch.uint8)
    got = mxfp4_from_blocks(blocks, scales)
    assert got.shape == (2, 3, 128) and got.data.data_ptr() == blocks.data_ptr()
    table = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
    pairs = torch.stack((table[(blocks & 15).long()], table[(blocks >> 4).long()]), -1).flatten(-2)
    assert torch.equal(dequantize(got), (pairs * torch.exp2(scales.float() - 127)[..., None]).flatten(-2))


def test_a_global_scale_that_divides() -> None:
    tensor = quantize(torch.randn(4, 64, generator=GENERATOR), "nvfp4@block_16", global_scale=torch.tensor(0.25))
    assert tensor.scale is not None
    again = nvfp4_from_divisor(tensor.data, tensor.scale, torch.tensor([4.0]))
    assert torch.equal(dequantize(again), dequantize(tensor))


def test_errors() -> None:
    data = torch.zeros(4, 12, dtype=torch.int32)
    with pytest.raises(ShapeError, match=r"weight_packed of two dimensions, int32, got \[4, 12\] torch\.int64"):
        int4_from_packed_int32(data.long(), torch.ones(4, 1))
    with pytest.raises(ShapeError, match=r"groups of 32, 64, 128 or all 96 inputs, got scales \[4, 6\]"):
        int4_from_packed_int32(data, torch.ones(4, 6))
    with pytest.raises(ShapeError, match=r"blocks .* got \[4, 8\]"):
        mxfp4_from_blocks(torch.zeros(4, 8, dtype=torch.uint8), torch.zeros(4, 8, dtype=torch.uint8))


def test_public_packing_of_four_bits() -> None:
    module = pytest.importorskip(
        "compressed_tensors.compressors.pack_quantized.helpers", reason="needs compressed-tensors", exc_type=ImportError
    )
    values, scales = codes(16, 256).to(torch.int8) - 8, torch.rand(16, 2, generator=GENERATOR)
    zeros = codes(16, 2).to(torch.int8) - 8
    data = module.pack_to_int32(values, 4)
    packed_zeros = module.pack_to_int32(zeros, 4, packed_dim=0).contiguous()
    spread = scales.repeat_interleave(128, 1)
    assert torch.equal(dequantize(int4_from_packed_int32(data, scales)), values * spread)
    asymmetric = int4_from_packed_int32(data, scales, packed_zeros)
    assert torch.equal(dequantize(asymmetric), (values - zeros.repeat_interleave(128, 1)) * spread)


def test_public_quantization_of_nvfp4() -> None:
    module = pytest.importorskip(
        "compressed_tensors.compressors.nvfp4.helpers", reason="needs compressed-tensors", exc_type=ImportError
    )
    x = torch.tensor([[0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0, 0.0]])
    ours = quantize(x, "nvfp4@block_16", global_scale=torch.ones(()))
    assert torch.equal(module.pack_fp4_to_uint8(x), ours.data)


@pytest.mark.parametrize("name", ["mxfp8_e4m3", "mxfp8_e5m2", "mxfp4"])
def test_public_quantization_to_mx(name: str) -> None:
    module = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor", reason="needs torchao", exc_type=ImportError)
    element = {"mxfp8_e4m3": torch.float8_e4m3fn, "mxfp8_e5m2": torch.float8_e5m2, "mxfp4": torch.float4_e2m1fn_x2}[name]
    x = torch.randn(64, 256, generator=GENERATOR) * torch.exp2(torch.randint(-30, 30, (64, 1), generator=GENERATOR).float())
    scale, data = module.to_mx(x, element, 32)
    ours = quantize(x, f"{name}@block_32")
    assert ours.scale is not None
    assert torch.equal(ours.scale, scale.view(torch.uint8).view(ours.scale.shape))
    assert torch.equal(ours.data.view(torch.uint8), data.view(torch.uint8).view(ours.data.shape))
