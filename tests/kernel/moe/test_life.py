"""plan -> process_weights -> apply: the typed life of a layer's experts, and what each step refuses."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from tokenspeed_kernel import QuantizedTensor
from tokenspeed_kernel.errors import NoKernelError, ShapeError
from tokenspeed_kernel.ops import moe
from tokenspeed_kernel.ops.activation import silu_and_mul
from tokenspeed_kernel.ops.moe.cases_experts import random_experts

E, K, H, I = 5, 2, 64, 32
CPU = torch.device("cpu")
CONFIG = moe.MoeConfig(num_experts=E, top_k=K, hidden_size=H, intermediate_size=I)
CLAMPED = moe.GatedActivation(limit=0.5, alpha=1.702, up_offset=1.0)


def _batch(tokens: int = 7, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.rand(tokens, E, generator=generator).argsort(1)[:, :K].int()
    weights = torch.rand(tokens, K, generator=generator)
    return {"x": torch.randn(tokens, H, generator=generator).to(dtype), "topk_ids": ids, "topk_weights": weights}


def _weights(fmt: str = "", dtype: torch.dtype = torch.float32, inner: int = I) -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(2)
    shapes = ((E, 2 * inner, H), (E, H, inner))
    first, second = (random_experts(generator, shape, fmt, CPU, dtype) for shape in shapes)
    return first, second


@pytest.mark.parametrize("fmt", ["", "fp8_e4m3@channel", "mxfp4@block_32", "uint4@group_32", "nvfp4@block_16"])
def test_apply_is_fused_experts(fmt: str) -> None:
    w13, w2 = _weights(fmt)
    made = moe.plan(CONFIG, "cpu", x_format="fp32", weight_format=fmt or "fp32")
    batch = _batch()
    got = moe.apply(made, moe.process_weights(made, w13, w2), **batch)
    want = moe.fused_experts(batch.pop("x"), w13, w2, **batch, solution="reference")
    torch.testing.assert_close(got, want)


def test_the_plan_says_which_kernel_and_why() -> None:
    made = moe.plan(CONFIG, "cpu", x_format="bf16", weight_format="mxfp4@block_32")
    assert (made.kernel, made.solution) == ("cpu_fused_experts", "cpu")
    lines = made.explain().splitlines()
    assert lines[0] == "moe.fused_experts on cpu: cpu_fused_experts"
    assert any("triton_fused_experts (PORTABLE): built for nvidia>=sm_80" in line for line in lines)
    assert any("reference_fused_experts (REFERENCE): never chosen unless asked for" in line for line in lines)
    assert moe.plan(CONFIG, "cpu", x_format="bf16", weight_format="bf16", solution="reference").kernel == "reference_fused_experts"


def test_no_kernel_is_an_error_with_every_reason() -> None:
    with pytest.raises(NoKernelError, match=r"(?s)moe\.fused_experts on cpu.*w13=fp64.*cpu_fused_experts: "):
        moe.plan(CONFIG, "cpu", x_format="fp32", weight_format="fp64")


def test_raw_weights_are_refused() -> None:
    w13, w2 = _weights()
    made = moe.plan(CONFIG, "cpu", x_format="fp32", weight_format="fp32")
    for raw in (w13, (w13, w2), None):
        with pytest.raises(ShapeError, match=r"(?s)expected weights processed for.*was not processed.*moe\.process_weights"):
            moe.apply(made, raw, **_batch())  # type: ignore[arg-type]


def test_weights_of_another_plan_are_refused() -> None:
    first = moe.plan(CONFIG, "cpu", x_format="fp32", weight_format="fp32")
    second = moe.plan(CONFIG, "cpu", x_format="fp32", weight_format="fp32")
    weights = moe.process_weights(first, *_weights())
    with pytest.raises(ShapeError, match="those of another plan"):
        moe.apply(second, weights, **_batch())
    shared = moe.process_shared_expert(first, torch.randn(2 * I, H), torch.randn(H, I))
    with pytest.raises(ShapeError, match="expected shared_expert processed for"):
        moe.apply(second, moe.process_weights(second, *_weights()), **_batch(), shared_expert=shared)


@pytest.mark.parametrize("order", ["up_gate", "interleaved"])
@pytest.mark.parametrize("fmt", ["", "fp8_e4m3@tensor", "fp8_e4m3@channel", "mxfp4@block_32", "uint4@group_32"])
def test_orders_of_rows(order: str, fmt: str) -> None:
    """The same experts, with the rows of w13 in another order."""
    w13, w2 = _weights(fmt)
    rows = torch.arange(2 * I).view(2, I)
    index = rows.flip(0).flatten() if order == "up_gate" else rows.t().flatten()
    if isinstance(w13, QuantizedTensor):
        scale = w13.scale if w13.format.scale == "tensor" else w13.scale[:, index]
        zero = None if w13.zero_point is None else w13.zero_point[:, index]
        data = w13.data.view(torch.uint8)[:, index].view(w13.data.dtype)
        mixed: Any = QuantizedTensor(data, w13.format, w13.shape, scale, w13.global_scale, zero)
    else:
        mixed = w13[:, index]
    bias = torch.randn(E, 2 * I)
    config = dataclasses.replace(CONFIG, biased=True, activation=CLAMPED)
    made = moe.plan(config, "cpu", x_format="fp32", weight_format=fmt or "fp32")
    second = {"w2_bias": torch.randn(E, H)}
    want = moe.apply(made, moe.process_weights(made, w13, w2, w13_bias=bias, **second), **_batch())
    got = moe.apply(made, moe.process_weights(made, mixed, w2, w13_bias=bias[:, index], order=order, **second), **_batch())
    torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_blocks_of_rows_can_be_swapped_but_not_interleaved() -> None:
    config = dataclasses.replace(CONFIG, intermediate_size=128)
    w13, w2 = _weights("fp8_e4m3@block_128x128", inner=128)
    made = moe.plan(config, "cpu", x_format="fp32", weight_format="fp8_e4m3@block_128x128")
    scale = w13.scale.flip(1)
    data = w13.data.view(torch.uint8).roll(128, 1).view(torch.float8_e4m3fn)
    mixed = QuantizedTensor(data, w13.format, w13.shape, scale)
    want = moe.apply(made, moe.process_weights(made, w13, w2), **_batch())
    torch.testing.assert_close(moe.apply(made, moe.process_weights(made, mixed, w2, order="up_gate"), **_batch()), want)
    with pytest.raises(ShapeError, match="reorder the rows before quantizing"):
        moe.process_weights(made, mixed, w2, order="interleaved")


def test_weights_in_order_share_memory_and_others_do_not() -> None:
    w13, w2 = _weights()
    made = moe.plan(CONFIG, "cpu", x_format="fp32", weight_format="fp32")
    kept = moe.process_weights(made, w13, w2)
    assert kept.w13.data_ptr() == w13.data_ptr()  # type: ignore[union-attr]
    assert kept.size_bytes == w13.nbytes + w2.nbytes
    moved = moe.process_weights(made, w13.transpose(1, 2).contiguous().transpose(1, 2), w2, order="up_gate")
    want = moe.process_weights(made, w13, w2, order="up_gate")
    w13.zero_()  # the originals may go
    batch = _batch()
    torch.testing.assert_close(moe.apply(made, moved, **batch), moe.apply(made, want, **batch), rtol=0, atol=0)
    assert moved.w13.is_contiguous()  # type: ignore[union-attr]


def test_experts_of_two_ranks_sum_to_all() -> None:
    w13, w2 = _weights()
    whole = moe.plan(CONFIG, "cpu", x_format="fp32", weight_format="fp32")
    want = moe.apply(whole, moe.process_weights(whole, w13, w2), **_batch())
    total = torch.zeros_like(want)
    for first, count in ((0, 2), (2, 3)):
        config = dataclasses.replace(CONFIG, first_expert=first, num_local_experts=count)
        made = moe.plan(config, "cpu", x_format="fp32", weight_format="fp32")
        local = slice(first, first + count)
        total += moe.apply(made, moe.process_weights(made, w13[local], w2[local]), **_batch())
    torch.testing.assert_close(total, want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("gated", [False, True])
def test_shared_expert(dtype: torch.dtype, gated: bool) -> None:
    w13, w2 = _weights(dtype=dtype)
    made = moe.plan(CONFIG, "cpu", x_format=dtype, weight_format=dtype)
    weights = moe.process_weights(made, w13, w2)
    first, second = torch.randn(2 * 48, H).to(dtype) / 8, torch.randn(H, 48).to(dtype) / 8
    gate = torch.randn(H).to(dtype) if gated else None
    batch = _batch(dtype=dtype)
    x = batch["x"].double()
    alone = silu_and_mul(x @ first.double().t(), solution="reference") @ second.double().t()
    if gate is not None:
        alone = alone * torch.sigmoid(x @ gate.double())[:, None]
    want = moe.apply(made, weights, **batch).double() + alone
    shared = moe.process_shared_expert(made, first, second, gate=gate)
    out = torch.full(batch["x"].shape, float("nan"), dtype=dtype)
    got = moe.apply(made, weights, **batch, shared_expert=shared, out=out)
    assert got is out
    tolerance = {"rtol": 1e-4, "atol": 1e-4} if dtype is torch.float32 else {"rtol": 2e-2, "atol": 3e-2}
    torch.testing.assert_close(got.double(), want, **tolerance)
    elsewhere = moe.apply(made, weights, **batch, shared_expert=alone.to(dtype))
    torch.testing.assert_close(elsewhere.double(), want, **tolerance)


def test_shared_expert_in_another_order_and_format() -> None:
    made = moe.plan(dataclasses.replace(CONFIG, activation=CLAMPED), "cpu", x_format="fp32", weight_format="fp32")
    weights = moe.process_weights(made, *_weights())
    first, second = torch.randn(2 * I, H), torch.randn(H, I)
    mixed = first.view(2, I, H).transpose(0, 1).reshape(2 * I, H)
    results = [
        moe.apply(made, weights, **_batch(), shared_expert=moe.process_shared_expert(made, one, second, order=order))
        for one, order in ((first, "gate_up"), (mixed, "interleaved"), (first.roll(I, 0), "up_gate"))
    ]
    for result in results[1:]:
        torch.testing.assert_close(result, results[0], rtol=0, atol=0)
    stack, _ = _weights("fp8_e4m3@channel")
    _, last = _weights("fp8_e4m3@channel")
    quantized = moe.process_shared_expert(made, stack[0], last[0])
    assert moe.apply(made, weights, **_batch(), shared_expert=quantized).isfinite().all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"w13": torch.zeros(E, 2 * I, H, dtype=torch.bfloat16)}, "expected w13 in fp32 on cpu, as planned, got bf16"),
        ({"w13": torch.zeros(E, 2 * I + 2, H)}, "expected w13"),
        ({"w13": torch.zeros(4, 2 * I, H), "w2": torch.zeros(4, H, I)}, "expected 5 experts of hidden_size=64"),
        ({"w13_bias": torch.zeros(E, 2 * I)}, "expected no w13_bias, as planned, got one"),
        ({"order": "gate"}, "expected order in {gate_up, up_gate, interleaved}, got 'gate'"),
        ({"w2": "weights"}, "expected w2 as a tensor or a QuantizedTensor, got str"),
    ],
)
def test_weights_that_do_not_fit_the_plan(change: dict[str, Any], message: str) -> None:
    w13, w2 = _weights()
    made = moe.plan(CONFIG, "cpu", x_format="fp32", weight_format="fp32")
    with pytest.raises(ShapeError) as caught:
        moe.process_weights(**{"plan": made, "w13": w13, "w2": w2, **change})
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(7, H, dtype=torch.bfloat16)}, "expected x torch.float32 on cpu and top_k=2, as planned"),
        ({"x": torch.zeros(7, H + 1)}, "expected x [num_tokens, 64], got [7, 65]"),
        ({"x": torch.zeros(6, H)}, "expected topk_ids and topk_weights [6, top_k]"),
        ({"topk_ids": torch.zeros(7, K, dtype=torch.int64)}, "expected topk_ids torch.int32, got torch.int64"),
        ({"topk_weights": torch.zeros(7, K, dtype=torch.float64)}, "expected topk_weights torch.float32"),
        ({"topk_ids": torch.zeros(7, 3, dtype=torch.int32), "topk_weights": torch.zeros(7, 3)}, "and top_k=3"),
        ({"out": torch.zeros(7, H, dtype=torch.float16)}, "expected out torch.float32"),
        ({"out": torch.zeros(3, H)}, "expected out [7, 64], got [3, 64]"),
        ({"shared_expert": torch.zeros(7, H - 1)}, "expected shared_expert's result [7, 64]"),
    ],
)
def test_batches_that_do_not_fit_the_plan(change: dict[str, Any], message: str) -> None:
    made = moe.plan(CONFIG, "cpu", x_format="fp32", weight_format="fp32")
    weights = moe.process_weights(made, *_weights())
    with pytest.raises(ShapeError) as caught:
        moe.apply(made, weights, **{**_batch(), **change})
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: dataclasses.replace(CONFIG, top_k=0), "expected top_k >= 1, got 0"),
        (lambda: dataclasses.replace(CONFIG, first_expert=3, num_local_experts=3), "a range of experts within 0..4"),
        (lambda: moe.GatedActivation("relu"), "expected kind in {swiglu, gelu, gelu_tanh}, got 'relu'"),
        (lambda: moe.GatedActivation(limit=0.0), "expected limit > 0"),
        (lambda: moe.GatedActivation("gelu", limit=2.0), "expected no limit, alpha or up_offset with gelu"),
        (lambda: moe.plan(CONFIG, "cpu", x_format="fp32", weight_format="fp32", bias_format="fp32"), "expected no bias_format"),
    ],
)
def test_options_that_contradict_each_other(make: Any, message: str) -> None:
    with pytest.raises(ShapeError) as caught:
        make()
    assert message in str(caught.value)


def test_empty_batch() -> None:
    made = moe.plan(CONFIG, "cpu", x_format="fp32", weight_format="fp32")
    weights = moe.process_weights(made, *_weights())
    batch = {name: value[:0] for name, value in _batch().items()}
    shared = moe.process_shared_expert(made, torch.randn(2 * I, H), torch.randn(H, I), gate=torch.randn(H))
    assert moe.apply(made, weights, **batch, shared_expert=shared).shape == (0, H)


@pytest.mark.parametrize("fmt", ["", "mxfp4@block_32"])
def test_compiled_without_a_graph_break_equals_eager(fmt: str) -> None:
    made = moe.plan(CONFIG, "cpu", x_format="fp32", weight_format=fmt or "fp32")
    weights = moe.process_weights(made, *_weights(fmt))
    shared = moe.process_shared_expert(made, torch.randn(2 * I, H), torch.randn(H, I), gate=torch.randn(H))
    router = torch.randn(E, H)

    def layer(x: torch.Tensor) -> torch.Tensor:
        topk_weights, ids = moe.topk_routing(x @ router.t(), K, renormalize=True)
        return moe.apply(made, weights, x, ids, topk_weights, shared_expert=shared)

    x = _batch()["x"]
    torch.testing.assert_close(torch.compile(layer, fullgraph=True)(x), layer(x))
