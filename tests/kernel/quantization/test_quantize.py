"""Quantizing: code tables, ties, scales, what is not finite, bounds of the round trip, every kernel bit for bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenspeed_kernel import Format, FormatError, QuantizedTensor, ShapeError
from tokenspeed_kernel.ops.quantization import dequantize, empty_quantized, quantize
from tokenspeed_kernel.ops.quantization.cases import CASES
from tokenspeed_kernel.ops.quantization.contract import QUANTIZE_FORMATS
from tokenspeed_kernel.testing import check_case

CPU = torch.device("cpu")
FORMATS = list(dict.fromkeys(str(signature.get("out")) for signature in QUANTIZE_FORMATS))
SMALL = [case for case in CASES if not case.bench]
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for machines without a GPU")
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
# Of the largest number of a block: how far a value may move (half a step where the steps are widest, or what is cut off).
BOUND = {
    "fp8_e4m3": 16 / 448, "fp8_e5m2": 4096 / 57344, "mxfp8_e4m3": 1 / 8, "mxfp8_e5m2": 1 / 4, "mxfp4": 1 / 4, "nvfp4": 1 / 5,
    "mxint4": 1 / 13, "int4": 1 / 14, "uint4": 1 / 14,
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", SMALL, ids=str)
def test_cpu(case, dtype: torch.dtype) -> None:  # type: ignore[no-untyped-def]
    check_case(case, solution="cpu", device=CPU, dtype=dtype)


@interpreted
@pytest.mark.parametrize("case", SMALL, ids=str)
def test_triton_interpreted(case) -> None:  # type: ignore[no-untyped-def]
    pytest.importorskip("triton", reason="needs triton")
    check_case(case, solution="triton", device=CPU, dtype=torch.bfloat16 if "odd" in case.label else torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", SMALL, ids=str)
def test_triton_on_gpu(case, dtype: torch.dtype) -> None:  # type: ignore[no-untyped-def]
    check_case(case, solution="triton", device=torch.device("cuda"), dtype=dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [case for case in CASES if case.bench], ids=str)
def test_real_sizes_on_gpu(case) -> None:  # type: ignore[no-untyped-def]
    check_case(case, solution="triton", device=torch.device("cuda"), dtype=torch.bfloat16)


SOLUTIONS = ["reference", "cpu", pytest.param("triton", marks=interpreted)]


@pytest.mark.parametrize("solution", SOLUTIONS)
@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e5m2"])
def test_every_fp8_code_comes_back_and_ties_go_to_the_even_one(name: str, solution: str) -> None:
    fmt = Format.parse(f"{name}@tensor")
    one = torch.ones(())
    codes = torch.arange(256, dtype=torch.uint8).view(1, 256)
    numbers = codes.view(fmt.storage).float()
    finite = numbers.isfinite()
    back = quantize(numbers, fmt, scale=one, solution=solution).data.view(torch.uint8)
    assert torch.equal(back[finite], codes[finite])
    assert torch.equal(back[numbers.isnan()] & 127, torch.full((int(numbers.isnan().sum()),), 127, dtype=torch.uint8))
    # Between two neighbours: just below the middle, the middle, just above it.
    positive = numbers[(codes < 128) & finite]
    middle = (positive[:-1] + positive[1:]) / 2
    around = torch.stack((torch.nextafter(middle, torch.tensor(-1.0)), middle, torch.nextafter(middle, torch.tensor(1e9))))
    got = quantize(around, fmt, scale=one, solution=solution).data.view(torch.uint8)
    low = torch.arange(len(middle), dtype=torch.uint8)
    assert torch.equal(got[0], low) and torch.equal(got[2], low + 1)
    assert torch.equal(got[1], low + low % 2)
    largest = float(positive[-1])
    outside = torch.tensor([[largest * 1.01, largest * 2, float("inf"), -float("inf")]])
    assert dequantize(quantize(outside, fmt, scale=one, solution=solution)).tolist() == [[largest, largest, largest, -largest]]


@pytest.mark.parametrize("solution", SOLUTIONS)
@pytest.mark.parametrize("text", ["mxfp4@block_32", "nvfp4@block_16"])
def test_every_fp4_code_comes_back_and_ties_go_to_the_even_one(text: str, solution: str) -> None:
    middles = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
    evens = [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0]
    signed = [*E2M1, *(-one for one in E2M1)]
    ties = [*middles, 6.0, *(-one for one in middles), -6.0]
    x = torch.tensor([signed * 2, ties * 2])
    # So large a global scale that each block's is 1.
    parts = {"global_scale": torch.ones(())} if text.startswith("nv") else {}
    got = quantize(x, text, solution=solution, **parts)
    wanted = torch.tensor([signed * 2, [*evens, 6.0, *(-one for one in evens), -6.0] * 2])
    assert torch.equal(dequantize(got), wanted)
    codes = torch.stack((got.data & 15, got.data >> 4), -1).flatten(1)
    assert codes[0, :16].tolist() == list(range(16)), "-0 keeps its sign"


@pytest.mark.parametrize("solution", SOLUTIONS)
def test_scales(solution: str) -> None:
    def scale(text: str, *values: float, **parts: torch.Tensor) -> object:
        x = torch.zeros(1, 128)
        x[0, : len(values)] = torch.tensor(values)
        result = quantize(x, text, solution=solution, **parts)
        assert result.scale is not None
        return result.scale.flatten().tolist()

    assert scale("fp8_e4m3@tensor", 896.0, -1.0) == [2.0]
    assert scale("fp8_e5m2@token", 57344.0) == [1.0]
    assert scale("fp8_e4m3@block_1x128", -224.0) == [0.5]
    assert scale("fp8_e4m3@channel") == [1.0], "a row of zeros"
    # 2 ** floor(log2(largest)) / 2 ** (exponent of the format's largest number), stored with 127 added.
    assert scale("mxfp8_e4m3@block_32", 448.0) == [127, 127, 127, 127]
    assert scale("mxfp8_e4m3@block_32", 512.0) == [128, 127, 127, 127]
    assert scale("mxfp4@block_32", 7.9, -1.0) == [127, 127, 127, 127]
    assert scale("mxfp4@block_32", 2.0**-126, -1e-45) == [0, 127, 127, 127]
    assert scale("int4@group_128", 15.0) == [2.0]
    assert scale("mxint4@block_32", 7.0, -16.0) == [2.0, 1.0, 1.0, 1.0]
    assert scale("uint4@group_128", 20.0, -10.0) == [2.0]
    nv = quantize(torch.full((1, 16), 6.0 * 448.0 * 3), "nvfp4@block_16", solution=solution)
    assert nv.global_scale is not None and nv.scale is not None
    assert (nv.global_scale.item(), nv.scale.float().item()) == (3.0, 448.0)


@pytest.mark.parametrize("solution", SOLUTIONS)
def test_nan_stays_and_infinity_does_not_spread(solution: str) -> None:
    for text in FORMATS:
        x = torch.ones(2, 256)
        x[0, 3], x[1, 5], x[1, 6] = float("nan"), float("inf"), -float("inf")
        got = dequantize(quantize(x, text, solution=solution))
        assert got[0, 3].isnan(), text
        assert got[1].isfinite().all(), text
        assert got[1, 5] > 0.9 and got[1, 6] <= (0 if text.startswith("uint4") else -0.9), text
        if text.startswith(("fp8", "mxfp8")):
            assert got.isnan().sum() == 1, text


@pytest.mark.parametrize("text", FORMATS)
@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**31), st.floats(-20, 15))
def test_bounds_of_the_round_trip(text: str, seed: int, size: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(3, 256, generator=generator) * 2.0**size
    got = dequantize(quantize(x, text))
    rows, columns = Format.parse(text).block
    largest = x.abs().amax() if rows != 1 else x.abs().unflatten(1, (-1, columns or 256)).amax(2, keepdim=True)
    span = largest.expand(3, 256 // (columns or 256), columns or 256).reshape(3, 256) if rows == 1 else largest
    if text.startswith("uint4"):
        span = 2 * span
    bound = BOUND[text.partition("@")[0]] * span
    assert ((got - x).abs() <= bound * 1.01).all()
    # What was quantized once stays as it is, with the same scales.
    if text.startswith("fp8"):
        first = quantize(x, text)
        again = quantize(dequantize(first), text, scale=first.scale)
        assert torch.equal(again.data.view(torch.uint8), first.data.view(torch.uint8))


def test_given_scales_are_taken_as_they_are() -> None:
    x = torch.randn(4, 128)
    scale = torch.tensor([0.5, 1.0, 2.0, 4.0])
    got = quantize(x, "fp8_e4m3@channel", scale=scale)
    assert got.scale is not None and got.scale.data_ptr() == scale.data_ptr()
    assert torch.equal(got.data.float(), (x / scale[:, None]).to(torch.float8_e4m3fn).float())
    out = empty_quantized("fp8_e4m3@channel", (4, 128), CPU)
    assert quantize(x, "fp8_e4m3@channel", scale=scale, out=out) is out
    assert out.scale is not None and out.scale.flatten().tolist() == scale.tolist()


def test_errors() -> None:
    x = torch.zeros(4, 128)
    with pytest.raises(FormatError, match=r"gguf_q4_0@inline is a format of files"):
        quantize(x, "gguf_q4_0@inline")
    with pytest.raises(ShapeError, match=r"columns a multiple of 32, got \[4, 40\]"):
        quantize(torch.zeros(4, 40), "mxfp4@block_32")
    with pytest.raises(ShapeError, match=r"\[128\]"):
        quantize(torch.zeros(128), "fp8_e4m3@tensor")
    with pytest.raises(ShapeError, match=r"mxfp4@block_32: no scale, for it is computed"):
        quantize(x, "mxfp4@block_32", scale=torch.ones(4, 4))
    with pytest.raises(ShapeError, match=r"fp8_e4m3@tensor: no global_scale"):
        quantize(x, "fp8_e4m3@tensor", global_scale=torch.ones(()))
    with pytest.raises(ShapeError, match=r"scale \[4, 1\] .* got \[3\]"):
        quantize(x, "fp8_e4m3@channel", scale=torch.ones(3))
    with pytest.raises(ShapeError, match=r"expected out fp8_e4m3@channel \[4, 128\], got fp8_e4m3@token \[4, 128\]"):
        quantize(x, "fp8_e4m3@channel", out=empty_quantized("fp8_e4m3@token", (4, 128), CPU))
    with pytest.raises(ShapeError, match=r"x to be a tensor, got a list"):
        quantize([1.0], "fp8_e4m3@tensor")  # type: ignore[arg-type]
    with pytest.raises(ShapeError, match=r"x to be a plain tensor"):
        quantize(quantize(x, "fp8_e4m3@tensor"), "fp8_e4m3@tensor")  # type: ignore[arg-type]


def test_the_library_form_gives_the_same() -> None:
    x = torch.randn(4, 256)

    def both(x: torch.Tensor) -> torch.Tensor:
        first = quantize(x, "nvfp4@block_16")
        second = quantize(x, "uint4@group_128")
        return dequantize(first) + dequantize(second)

    compiled = torch.compile(both, fullgraph=True, backend="eager")
    assert torch.equal(compiled(x), both(x))
    for text in FORMATS:
        arguments = (x, text, torch.ones(()), None, None) if text == "fp8_e4m3@tensor" else (x, text, None, None, None)
        torch.library.opcheck(torch.ops.tokenspeed.quantize.default, arguments)


def test_a_quantized_tensor_is_an_operand_of_mm() -> None:
    from tokenspeed_kernel.ops.gemm import mm

    x, weight = torch.randn(3, 256), torch.randn(8, 256)
    got = mm(quantize(x, "fp8_e4m3@token"), quantize(weight, "fp8_e4m3@channel"), out_dtype=torch.float32)
    assert isinstance(got, torch.Tensor) and not isinstance(got, QuantizedTensor)
    assert torch.nn.functional.cosine_similarity(got.flatten(), (x @ weight.t()).flatten(), dim=0) > 0.998
