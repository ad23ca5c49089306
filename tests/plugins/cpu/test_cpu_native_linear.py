"""Products with quantized weights: exact on rounded activations, near enough on the given ones, the same in any company."""

from __future__ import annotations

import math

import pytest
import torch
from quantized_weights import GGUF, GROUPED, gguf_weight, grouped_weight, rounded

from tokenspeed_kernel import NoKernelError, QuantizedTensor
from tokenspeed_kernel.errors import ShapeError
from tokenspeed_kernel.ops.gemm import PackedWeight, mm, pack_weight

FORMATS = (*GGUF, *GROUPED)


def _weight(fmt: str, rows: int, columns: int, scale: torch.dtype = torch.float16) -> tuple[QuantizedTensor, torch.Tensor]:
    return gguf_weight(fmt, rows, columns) if fmt in GGUF else grouped_weight(fmt, rows, columns, scale)


def _pack(weight: QuantizedTensor) -> PackedWeight:
    packed = pack_weight(weight, round_activations=True)
    assert packed.solution == "cpu_native"
    return packed


def _x(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.usefixtures("byte_products")
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("rows", [1, 33])
@pytest.mark.parametrize("columns", [256, 768])
def test_integer_emulation_and_bound(fmt: str, rows: int, columns: int) -> None:
    weight, values = _weight(fmt, rows, columns)
    packed = _pack(weight)
    for tokens in (1, 2, 3, 7, 8, 13):
        x = _x(tokens, columns)
        got = packed(x).double()
        taken, step = rounded(x)
        # On the rounded activations only float32 sums of the blocks differ from the truth.
        terms = taken.abs() @ values.abs().T
        assert ((got - taken @ values.T).abs() <= columns / 32 * 2**-23 * terms).all()
        # Each activation is off by half a step at most, so that a product is by half a step times its weight.
        truth = x.double() @ values.T
        assert ((got - truth).abs() <= (step / 2) @ values.abs().T + columns / 32 * 2**-23 * terms).all()
        # What is lost is noise of 1/127/sqrt(12) of the largest in each 32: far below one in ten thousand of the direction.
        assert torch.cosine_similarity(got.flatten(), truth.flatten(), dim=0) > (0.9999 if got.numel() > 8 else 0.99)


@pytest.mark.parametrize("fmt", FORMATS)
def test_every_instruction_set_and_company_gives_the_same_bits(fmt: str) -> None:
    from tokenspeed_kernel_cpu import _kernels

    weight, _ = _weight(fmt, 50, 512)
    packed, x, bias = _pack(weight), _x(300, 512), _x(50)
    before, threads, results = _kernels.instruction_set(), torch.get_num_threads(), []
    try:
        for name in _kernels.instruction_sets():
            _kernels.use_instruction_set(name)
            for count in (1, 2, 3):
                torch.set_num_threads(count)
                results.append(packed(x, bias))
            for start, stop in ((0, 1), (5, 7), (99, 131), (17, 32)):
                assert torch.equal(packed(x[start:stop], bias), results[0][start:stop])
    finally:
        torch.set_num_threads(threads)
        _kernels.use_instruction_set(before)
    assert all(torch.equal(one, results[0]) for one in results)


@pytest.mark.parametrize("fmt", ["gguf_q4_1", "gguf_q8_0"])
def test_more_tokens_than_are_in_memory_at_a_time(fmt: str) -> None:
    weight, _ = _weight(fmt, 20, 32)
    packed, x = _pack(weight), _x(2500, 32)
    whole = packed(x)
    assert torch.equal(whole[1020:1030], packed(x[1020:1030]))
    assert torch.equal(whole[2499:], packed(x[2499:]))


@pytest.mark.usefixtures("byte_products")
@pytest.mark.parametrize("fmt", ["gguf_q4_1", "gguf_q6_k", "uint4@group_64"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_layouts_bias_and_outputs(fmt: str, dtype: torch.dtype) -> None:
    weight, _ = _weight(fmt, 19, 256)
    packed, x = _pack(weight), _x(2, 3, 256, dtype=dtype)
    want = packed(x)
    assert want.dtype is dtype
    assert want.shape == (2, 3, 19)
    assert torch.equal(packed(x.reshape(6, 256)).reshape(2, 3, 19), want)
    assert torch.equal(packed(x[0, 1]), want[0, 1])
    assert torch.equal(packed(x.repeat_interleave(2, dim=-1)[..., ::2]), want)
    assert torch.equal(packed(x.reshape(6, 256).t().contiguous().t()), want.reshape(6, 19))
    assert torch.equal(packed(torch.cat((x, x), dim=1)[:, :3]), want)
    out = torch.full((2, 3, 19), math.nan, dtype=dtype)
    assert packed(x, out=out) is out
    assert torch.equal(out, want)
    apart = torch.full((2, 3, 40), math.nan, dtype=dtype)[..., ::2][..., :19]
    assert packed(x, out=apart) is apart
    assert torch.equal(apart, want)
    bias = _x(19, seed=2)
    exact = packed(x.float()).double() + bias.double()
    torch.testing.assert_close(packed(x, bias), exact.to(dtype), rtol=1e-6 if dtype is torch.float32 else 2**-7, atol=1e-4)
    torch.testing.assert_close(packed(x, bias.to(dtype)), (exact - bias.double() + bias.to(dtype).double()).to(dtype))


def test_bf16_activations_are_those_numbers() -> None:
    weight, _ = _weight("gguf_q4_1", 40, 288)
    packed, x = _pack(weight), _x(9, 288, dtype=torch.bfloat16)
    assert torch.equal(packed(x), packed(x.float()).to(torch.bfloat16))


@pytest.mark.usefixtures("byte_products")
@pytest.mark.parametrize("fmt", FORMATS)
def test_nothing_to_do(fmt: str) -> None:
    weight, _ = _weight(fmt, 20, 256)
    assert _pack(weight)(_x(0, 256)).shape == (0, 20)
    assert _pack(weight)(torch.zeros(3, 256)).eq(0).all()
    none, _ = _weight(fmt, 0, 256)
    assert _pack(none)(_x(3, 256)).shape == (3, 0)
    flat, _ = _weight(fmt, 5, 0)
    assert torch.equal(_pack(flat)(_x(3, 0), torch.arange(5.0)), torch.arange(5.0).expand(3, 5))


@pytest.mark.usefixtures("byte_products")
@pytest.mark.parametrize("fmt", ["gguf_q4_0", "gguf_q4_k", "gguf_q8_0", "gguf_q6_k"])
def test_extreme_activations(fmt: str) -> None:
    weight, values = _weight(fmt, 24, 256)
    packed, x = _pack(weight), _x(6, 256)
    x[0, 70] = math.nan
    x[1, 0] = math.inf
    x[2] = 1e-38  # its block's step would have no finite reciprocal
    x[3] = 1e34
    got = packed(x)
    assert got[:2].isnan().all()
    assert got[2].eq(0).all()
    truth = x.double() @ values.T
    torch.testing.assert_close(got[3:].double(), truth[3:], rtol=0.02, atol=float(truth[3].abs().max()) * 0.01)
    assert torch.equal(got[4:], packed(x[4:]))


def test_lowest_byte_of_q8_0() -> None:
    weight, _ = _weight("gguf_q8_0", 16, 64)
    data = weight.data.clone()
    data.view(16, 2, 34)[:, :, 2:] = 128  # -128, which no quantizer writes and a file can hold
    lowest = QuantizedTensor(data, "gguf_q8_0@inline", (16, 64))
    import gguf

    from tokenspeed_kernel_cpu import _kernels

    values = torch.from_numpy(gguf.quants.dequantize(data.numpy(), gguf.GGMLQuantizationType.Q8_0)).double()
    x = torch.ones(1, 64)
    before = _kernels.instruction_set()
    try:
        for name in _kernels.instruction_sets():
            _kernels.use_instruction_set(name)
            torch.testing.assert_close(_pack(lowest)(x).double(), x.double() @ values.T, rtol=1e-6, atol=0)
    finally:
        _kernels.use_instruction_set(before)


def test_weights_stay_quantized() -> None:
    for fmt in FORMATS:
        weight, _ = _weight(fmt, 64, 1024)
        assert _pack(weight).data.size_bytes <= 1.06 * weight.size_bytes
    for fmt in ("gguf_q8_0", "gguf_q6_k"):
        weight, _ = _weight(fmt, 64, 1024)
        assert _pack(weight).data.owners[0].data_ptr() == weight.data.data_ptr()


@pytest.mark.parametrize("fmt", FORMATS)
def test_rows_of_a_larger_weight(fmt: str) -> None:
    weight, _ = _weight(fmt, 70, 256)
    x = _x(3, 256)
    assert torch.equal(_pack(weight.rows(16, 49))(x), _pack(weight)(x)[:, 16:49])
    assert torch.equal(_pack(weight.rows(7, 9))(x), _pack(weight)(x)[:, 7:9])


@pytest.mark.parametrize("scale", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("fmt", GROUPED)
def test_scales_of_groups(fmt: str, scale: torch.dtype) -> None:
    weight, values = grouped_weight(fmt, 21, 384, scale)
    taken, _ = rounded(_x(4, 384))
    torch.testing.assert_close(_pack(weight)(_x(4, 384)).double(), taken @ values.T, rtol=1e-5, atol=1e-3)


@pytest.mark.usefixtures("byte_products")
@pytest.mark.parametrize("fmt", FORMATS)
def test_activations_as_they_are(fmt: str) -> None:
    weight, values = _weight(fmt, 37, 512)
    packed = pack_weight(weight)
    assert packed.solution == "cpu_native"
    x, bias = _x(9, 512), _x(37)
    got = packed(x)
    # A hundred terms and more are added in float32: far from the half per cent that rounding to 8 bits costs.
    assert ((got.double() - x.double() @ values.T).abs() <= 512 * 2**-24 * (x.double().abs() @ values.abs().T)).all()
    assert torch.equal(packed(x[3:4]), got[3:4])
    assert torch.equal(packed(x[1:6]), got[1:6])
    torch.testing.assert_close(packed(x, bias), got + bias)
    half = x.bfloat16()
    assert torch.equal(packed(half), packed(half.float()).bfloat16())
    assert packed(_x(0, 512)).shape == (0, 37)
    if fmt in GGUF:
        assert torch.equal(mm(x, weight, bias, solution="cpu_native"), packed(x, bias))
        wide = mm(half, weight, solution="cpu_native", out_dtype=torch.float32)
        assert torch.equal(wide, packed(half.float()))


def test_activations_as_they_are_in_every_instruction_set() -> None:
    from tokenspeed_kernel_cpu import _kernels

    before = _kernels.instruction_set()
    for fmt in FORMATS:
        packed, x, results = pack_weight(_weight(fmt, 50, 512)[0]), _x(30, 512), []
        try:
            for name in _kernels.instruction_sets():
                _kernels.use_instruction_set(name)
                results.append(packed(x))
        finally:
            _kernels.use_instruction_set(before)
        assert all(torch.equal(one, results[0]) for one in results)


def test_nobody_is_given_rounded_activations_unasked() -> None:
    weight, values = _weight("gguf_q4_1", 32, 64)
    x = _x(5, 64)
    torch.testing.assert_close(pack_weight(weight)(x).double(), x.double() @ values.T, rtol=1e-5, atol=1e-5)
    with pytest.raises(NoKernelError, match="cpu_native_pack_weight: round_activations=True, got False"):
        pack_weight(weight, solution="cpu_native_pack_weight")


def test_wrong_operands_are_refused() -> None:
    packed = _pack(_weight("gguf_q4_1", 32, 64)[0])
    with pytest.raises(ShapeError, match=r"x \[..., 64\]"):
        packed(_x(3, 32))
    with pytest.raises(ShapeError, match="float64"):
        packed(_x(3, 64).double())
    with pytest.raises(ShapeError, match=r"out \[3, 32\]"):
        packed(_x(3, 64), out=torch.empty(3, 31))
    with pytest.raises(ValueError, match="no memory"):
        packed(torch.empty(3, 64, device="meta"))
