"""Norm, SwiGLU, rope and cache write: accuracy, layouts, aliasing, refusals."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tokenspeed_kernel.ops.activation import silu_and_mul
from tokenspeed_kernel.ops.kvcache import write_kv
from tokenspeed_kernel.ops.kvcache.cases import SHAPES, Shape, inputs
from tokenspeed_kernel.ops.norm import fused_add_rms_norm, rms_norm
from tokenspeed_kernel.ops.rope import apply_rope

pytestmark = pytest.mark.usefixtures("instruction_set")


def _relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float(((got.double() - want).abs() / want.abs().clamp(min=1e-35)).max())


def test_silu_is_accurate_everywhere() -> None:
    gate = torch.cat((torch.linspace(-87, 87, 40001), torch.logspace(-30, 1, 4000), -torch.logspace(-30, 1, 4000)))
    gate_up = torch.cat((gate, torch.ones_like(gate)))[None]
    exact = gate.double() / (1 + torch.exp(-gate.double()))
    assert _relative_error(silu_and_mul(gate_up, solution="cpu_native")[0], exact) < 1e-6


def test_silu_at_the_ends() -> None:
    gate = torch.tensor([math.nan, math.inf, -math.inf, 0.0, 3e38, -3e38, -95.0, 200.0])
    got = silu_and_mul(torch.cat((gate, torch.ones(8))), solution="cpu_native")
    assert got[:3].isnan().tolist() == [True, False, True]  # -inf * 0
    assert got[1] == math.inf
    assert got[3] == 0
    assert got[4] == gate[4]
    assert abs(float(got[5])) < 1e-6
    assert abs(float(got[6])) < 1e-38
    assert got[7] == 200


@pytest.mark.parametrize("hidden", [1, 7, 8, 15, 16, 17, 31, 33, 576, 1000])
def test_norm_is_accurate(hidden: int) -> None:
    generator = torch.Generator().manual_seed(hidden)
    x, residual = (torch.randn(5, hidden, generator=generator) for _ in range(2))
    weight = torch.rand(hidden, generator=generator) + 0.5
    total = x + residual
    exact = total.double() * torch.rsqrt(total.double().square().mean(-1, keepdim=True) + 1e-5) * weight.double()
    got, got_total = fused_add_rms_norm(x, residual, weight, eps=1e-5, solution="cpu_native")
    assert torch.equal(got_total, total)
    assert _relative_error(got, exact) < 1e-6
    assert torch.equal(rms_norm(total, weight, eps=1e-5, solution="cpu_native"), got)


def test_norm_of_heads_in_a_projection() -> None:
    heads = torch.randn(6, 5, 16)[:, 1:4]
    weight = torch.randn(16)
    assert torch.equal(rms_norm(heads, weight, solution="cpu_native"), rms_norm(heads.contiguous(), weight, solution="cpu_native"))


def test_norm_outputs_may_be_the_inputs() -> None:
    x, residual, weight = torch.randn(3, 40), torch.randn(3, 40), torch.randn(40)
    want, total = fused_add_rms_norm(x, residual, weight, solution="cpu_native")
    out, residual_out = x.clone(), residual.clone()
    fused_add_rms_norm(out, residual_out, weight, out=out, residual_out=residual_out, solution="cpu_native")
    assert torch.equal(out, want)
    assert torch.equal(residual_out, total)
    alone = x.clone()
    rms_norm(alone, weight, out=alone, solution="cpu_native")
    assert torch.equal(alone, rms_norm(x, weight, solution="cpu_native"))


def test_outputs_with_strides_of_their_own() -> None:
    x, weight = torch.randn(2, 3, 10), torch.randn(10)
    outs = [torch.full((2, 10, 3), math.nan).transpose(1, 2) for _ in range(3)]
    assert rms_norm(x, weight, out=outs[0], solution="cpu_native") is outs[0]
    assert torch.equal(outs[0], rms_norm(x, weight, solution="cpu_native"))
    normed, total = fused_add_rms_norm(x, x, weight, out=outs[1], residual_out=outs[2], solution="cpu_native")
    assert normed is outs[1]
    assert total is outs[2]
    assert torch.equal(total, x + x)
    half = torch.full((2, 5, 3), math.nan).transpose(1, 2)
    assert silu_and_mul(x, out=half, solution="cpu_native") is half
    assert torch.equal(half, silu_and_mul(x, solution="cpu_native"))


def test_rows_do_not_depend_on_their_batch_or_the_threads() -> None:
    x, weight = torch.randn(300, 577), torch.randn(577)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        normed, gated = rms_norm(x, weight, solution="cpu_native"), silu_and_mul(x[:, 1:], solution="cpu_native")
        torch.set_num_threads(1)
        assert torch.equal(rms_norm(x, weight, solution="cpu_native"), normed)
        assert torch.equal(silu_and_mul(x[:, 1:], solution="cpu_native"), gated)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(rms_norm(x[7], weight, solution="cpu_native"), normed[7])
    assert torch.equal(silu_and_mul(x[7:9, 1:], solution="cpu_native"), gated[7:9])


def _rope(interleaved: bool = False, dtype: torch.dtype = torch.int64) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    angles = torch.randn(9, 6, generator=generator)
    return {
        "q": torch.randn(4, 3, 20, generator=generator),
        "k": torch.randn(4, 2, 20, generator=generator),
        "positions": torch.tensor([8, 0, 3, 3], dtype=dtype),
        "cos_sin_cache": torch.cat((angles.cos(), angles.sin()), dim=1),
        "interleaved": interleaved,
    }


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_rope_in_place_and_partial(interleaved: bool, dtype: torch.dtype) -> None:
    call = _rope(interleaved, dtype)
    want = apply_rope(**call, solution="reference")
    got = apply_rope(**call, solution="cpu_native")
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
    call["positions"] = torch.stack((call["positions"], call["positions"]), dim=1)[:, 0]  # with a stride
    q, k = apply_rope(**call, q_out=call["q"], k_out=call["k"], solution="cpu_native")
    assert q is call["q"]
    assert k is call["k"]
    assert torch.equal(q, got[0])
    assert torch.equal(k, got[1])


def test_rope_output_over_another_input() -> None:
    call = _rope()
    memory = torch.randn(4, 5, 20)
    memory[:, :3] = call["q"]
    want = apply_rope(**call, solution="cpu_native")
    call["q"] = memory[:, :3]
    shifted = memory[:, 1:4]
    q, _ = apply_rope(**call, q_out=shifted, solution="cpu_native")
    assert q is shifted
    assert torch.equal(shifted, want[0])


@pytest.mark.parametrize("position", [-1, 9, 2**31 - 1])
def test_rope_refuses_a_position_beyond_the_table(position: int) -> None:
    call = _rope()
    call["positions"][2] = position
    before = call["q"].clone()
    with pytest.raises(IndexError, match=rf"positions in 0\.\.8, got {position}"):
        apply_rope(**call, q_out=call["q"], k_out=call["k"], solution="cpu_native")
    assert torch.equal(call["q"], before)


KINDS = [(torch.float32, torch.float32), (torch.float32, torch.bfloat16), (torch.float32, torch.float16), (torch.bfloat16,) * 2]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("dtype", "cache"), KINDS, ids=str)
def test_write_kv(shape: Shape, dtype: torch.dtype, cache: torch.dtype) -> None:
    mine, truth = inputs(shape, dtype=dtype, cache_dtype=cache), inputs(shape, dtype=dtype, cache_dtype=cache)
    write_kv(**mine, solution="cpu_native")
    write_kv(**truth, solution="reference")
    assert torch.equal(mine["k_cache"], truth["k_cache"])
    assert torch.equal(mine["v_cache"], truth["v_cache"])


def test_write_kv_rounds_numbers_that_are_hard_to_round() -> None:
    hard = torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0, 1 + 2**-8, 1 + 3 * 2**-9, 3.4e38, 1e-40, 65519.9, 65520.0, 6e-8])
    k = hard.repeat(3)[:33].reshape(1, 1, 33)  # two vectors and a tail
    for dtype in (torch.bfloat16, torch.float16):
        caches = torch.zeros(2, 1, 1, 1, 33, dtype=dtype)
        write_kv(k, -k, caches[0], caches[1], torch.zeros(1, dtype=torch.int64), solution="cpu_native")
        torch.testing.assert_close(caches[0].flatten(), k.flatten().to(dtype), rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(caches[1].flatten(), -k.flatten().to(dtype), rtol=0, atol=0, equal_nan=True)


def test_write_kv_into_a_slice_of_a_pool() -> None:
    shape = Shape("pool", 7, num_pages=4, page_size=3)
    mine, truth = inputs(shape), inputs(shape)
    pool = torch.full((4, 2, 3, 3, 16), math.nan)
    mine["k_cache"], mine["v_cache"] = pool[:, 0, :, :2], pool[:, 1, :, 1:]
    mine["k_cache"].copy_(truth["k_cache"])
    mine["v_cache"].copy_(truth["v_cache"])
    write_kv(**mine, solution="cpu_native")
    write_kv(**truth, solution="reference")
    assert torch.equal(mine["k_cache"], truth["k_cache"])
    assert torch.equal(mine["v_cache"], truth["v_cache"])
    assert pool[:, 0, :, 2].isnan().all()
    assert pool[:, 1, :, 0].isnan().all()


def test_a_tensor_without_memory_is_refused() -> None:
    x = torch.empty(2, 8, device="meta")
    with pytest.raises(ValueError, match="no memory"):
        silu_and_mul(x, solution="cpu_native")
