"""Dequantizing: the layouts against hand-made bytes and against the public gguf package, and every kernel bit for bit."""

from __future__ import annotations

import pytest
import torch

from tokenspeed_kernel import Format, NoKernelError, QuantizedTensor, ShapeError
from tokenspeed_kernel.ops.quantization import dequantize
from tokenspeed_kernel.ops.quantization.cases import random_quantized

CPU = torch.device("cpu")
FORMATS = [fmt for fmt in Format.scaled() if "fnuz" not in fmt.logical]
GGUF = {"gguf_q4_0": "Q4_0", "gguf_q4_1": "Q4_1", "gguf_q8_0": "Q8_0", "gguf_q4_k": "Q4_K", "gguf_q6_k": "Q6_K"}
# Codes 0 to 7 and their negatives, as OCP MX 1.0 (section 5.3.3) lists them.
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal, with NaN where the other is NaN."""
    return torch.equal(one.isnan(), other.isnan()) and torch.equal(one.nan_to_num(0.0), other.nan_to_num(0.0))


def of(data: list[list[int]], text: str, columns: int, **parts: torch.Tensor) -> QuantizedTensor:
    fmt = Format.parse(text)
    packed = torch.tensor(data, dtype=torch.uint8).view(fmt.storage)
    return QuantizedTensor(packed, fmt, (len(data), columns), **parts)


@pytest.mark.parametrize("name", GGUF)
def test_gguf_agrees_with_the_public_package_bit_for_bit(name: str) -> None:
    gguf = pytest.importorskip("gguf", reason="needs the gguf package")
    tensor = random_quantized(Format.parse(f"{name}@inline"), (7, 1024), torch.Generator().manual_seed(0), CPU)
    want = torch.from_numpy(gguf.dequantize(tensor.data.numpy(), gguf.GGMLQuantizationType[GGUF[name]]))
    for solution in ("reference", "cpu"):
        assert torch.equal(dequantize(tensor, solution=solution), want)


@pytest.mark.parametrize("solution", ["reference", "cpu"])
def test_hand_made_bytes(solution: str) -> None:
    def values(tensor: QuantizedTensor) -> list[list[float]]:
        return dequantize(tensor, solution=solution).tolist()

    all_codes = [low | low + 1 << 4 for low in range(0, 16, 2)]
    e2m1 = [*E2M1, *(-one for one in E2M1)]
    scale = torch.tensor([[129]], dtype=torch.uint8)
    assert values(of([all_codes * 2], "mxfp4@block_32", 32, scale=scale)) == [[4 * one for one in e2m1] * 2]
    nv = of([all_codes], "nvfp4@block_16", 16, scale=torch.tensor([[1.5]]).to(torch.float8_e4m3fn), global_scale=torch.tensor(0.25))
    assert values(nv) == [[0.375 * one for one in e2m1]]
    twos = [*range(8), *range(-8, 0)]
    mxint4 = of([all_codes * 2], "mxint4@block_32", 32, scale=torch.tensor([[0.5]]).bfloat16())
    assert values(mxint4) == [[0.5 * one for one in twos] * 2]
    int4 = of([all_codes * 2], "int4@group_32", 32, scale=torch.tensor([[0.5]]).half())
    assert values(int4) == [[0.5 * one for one in range(-8, 8)] * 2]
    zeros = torch.tensor([[3]], dtype=torch.uint8)
    uint4 = of([all_codes * 2], "uint4@group_32", 32, scale=torch.tensor([[0.5]]), zero_point=zeros)
    assert values(uint4) == [[0.5 * (one - 3) for one in range(16)] * 2]
    # 0x38 is 1.0 in e4m3, 0x3c in e5m2; 0x7e is the largest, 0x01 the smallest number.
    fp8 = of([[0x38, 0xB8, 0x7E, 0x01]], "fp8_e4m3@channel", 4, scale=torch.tensor([2.0]))
    assert values(fp8) == [[2.0, -2.0, 896.0, 2.0**-8]]
    e5m2 = of([[0x3C, 0xBC, 0x7B, 0x01]], "fp8_e5m2@tensor", 4, scale=torch.tensor(2.0))
    assert values(e5m2) == [[2.0, -2.0, 114688.0, 2.0**-15]]
    assert values(of([[0x38] * 32], "mxfp8_e4m3@block_32", 32, scale=torch.tensor([[0]], dtype=torch.uint8))) == [[2.0**-127] * 32]


@pytest.mark.parametrize("solution", ["reference", "cpu"])
def test_blocks_of_128_with_a_smaller_last_one(solution: str) -> None:
    data = torch.ones(130, 200).to(torch.float8_e4m3fn)
    scale = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    got = dequantize(QuantizedTensor(data, Format.parse("fp8_e4m3@block_128x128"), (130, 200), scale), solution=solution)
    want = torch.ones(130, 200)
    want[:128, 128:], want[128:, :128], want[128:, 128:] = 2.0, 3.0, 4.0
    assert torch.equal(got, want)


def test_a_scale_of_255_is_nan() -> None:
    scale = torch.tensor([[255]], dtype=torch.uint8)
    for solution in ("reference", "cpu"):
        assert dequantize(of([[0x22] * 16], "mxfp4@block_32", 32, scale=scale), solution=solution).isnan().all()


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
@pytest.mark.parametrize("shape", [(3, 512), (2, 131, 256), (0, 256), (2, 0)])
def test_cpu_agrees_with_the_reference_bit_for_bit(fmt: Format, shape: tuple[int, ...]) -> None:
    tensor = random_quantized(fmt, shape, torch.Generator().manual_seed(0), CPU, every_code=True)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        want = dequantize(tensor, out_dtype=dtype, solution="reference")
        assert same_bits(dequantize(tensor, out_dtype=dtype), want)
        out = torch.full((*shape[:-1], 2 * shape[-1]), float("nan"), dtype=dtype)[..., ::2]
        assert dequantize(tensor, out=out) is out
        assert same_bits(out, want)


def test_errors() -> None:
    tensor = of([[0x38] * 4], "fp8_e4m3@channel", 4, scale=torch.tensor([2.0]))
    with pytest.raises(ShapeError, match=r"a QuantizedTensor, got Tensor\nFix: use \.to"):
        dequantize(torch.zeros(2, 2))  # type: ignore[arg-type]
    with pytest.raises(ShapeError, match=r"out \[1, 4\] torch\.float32, got \[4, 1\] torch\.float32"):
        dequantize(tensor, out=torch.zeros(4, 1))
    with pytest.raises(ShapeError, match=r"on the meta device"):
        dequantize(tensor.to("meta"))
    with pytest.raises(NoKernelError, match=r"out=fp64"):
        dequantize(tensor, out_dtype=torch.float64)
    fnuz = QuantizedTensor(
        torch.zeros(2, 2, dtype=torch.float8_e4m3fnuz), Format.parse("fp8_e4m3fnuz@tensor"), (2, 2), torch.ones(())
    )
    with pytest.raises(NoKernelError, match=r"tensor=fp8_e4m3fnuz@tensor"):
        dequantize(fnuz)
    assert dequantize(fnuz, solution="reference").tolist() == [[0.0, 0.0], [0.0, 0.0]]
