"""The torch.library form of the ops: opcheck, torch.compile without a graph break, export."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tokenspeed_kernel import QuantizedTensor
from tokenspeed_kernel.errors import ShapeError
from tokenspeed_kernel.ops import moe
from tokenspeed_kernel.ops.moe.cases_experts import random_experts

OPS = torch.ops.tokenspeed
IDS = torch.tensor([[0, 2], [-1, 1], [2, 2]], dtype=torch.int32)
SHARES = torch.rand(3, 2)


def _parts(stack: torch.Tensor | QuantizedTensor) -> tuple[Any, ...]:
    if isinstance(stack, torch.Tensor):
        return stack, None, None, None, "", []
    return stack.data, stack.scale, stack.global_scale, stack.zero_point, str(stack.format), list(stack.shape)


def _experts(fmt: str) -> tuple[torch.Tensor | QuantizedTensor, torch.Tensor | QuantizedTensor]:
    generator = torch.Generator().manual_seed(0)
    made = [random_experts(generator, shape, fmt, torch.device("cpu"), torch.float32) for shape in ((3, 64, 32), (3, 32, 32))]
    return made[0], made[1]


ARGUMENTS: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("topk_routing", (torch.randn(3, 8), 2)),
    ("topk_routing", (torch.randn(8, 3).t(), 2, "sigmoid", True, torch.randn(8), 4, 2, "top2_sum", 2.5, "cpu")),
    ("topk_routing", (torch.randn(0, 8).bfloat16(), 2)),
    ("permute", (torch.randn(3, 8), IDS, 3)),
    ("permute", (torch.randn(8, 3).t(), IDS, 2, 1)),
    ("unpermute", (torch.randn(6, 8), IDS, SHARES)),
    ("unpermute", (torch.randn(8, 6).t(), IDS, SHARES, torch.randn(3, 8), "cpu")),
    *(
        ("fused_experts", (torch.randn(3, 32), *_parts(_experts(fmt)[0]), *_parts(_experts(fmt)[1]), IDS, SHARES))
        for fmt in ("", "fp8_e4m3@channel", "nvfp4@block_16", "uint4@group_32")
    ),
    (
        "fused_experts",
        (
            *(torch.randn(32, 3).t(), *_parts(_experts("")[0]), *_parts(_experts("")[1]), IDS, SHARES),
            *(torch.randn(3, 64), torch.randn(3, 32), "swiglu", 7.0, 1.702, 1.0, 1, torch.randn(3, 32), "cpu"),
        ),
    ),
)


@pytest.mark.parametrize(("name", "arguments"), ARGUMENTS, ids=[f"{index} {one[0]}" for index, one in enumerate(ARGUMENTS)])
def test_opcheck(name: str, arguments: tuple[Any, ...]) -> None:
    tests = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    if any(isinstance(one, torch.Tensor) and one.dtype is torch.float8_e4m3fn for one in arguments):
        tests = tests[1:]  # it compares inputs by arithmetic that PyTorch lacks for fp8
    torch.library.opcheck(getattr(OPS, name).default, arguments, test_utils=tests)


def test_library_op_checks_shapes() -> None:
    with pytest.raises(ShapeError):
        OPS.topk_routing(torch.zeros(3), 1)
    with pytest.raises(ShapeError):
        OPS.permute(torch.zeros(3, 8), IDS.long(), 3)
    w13, w2 = _experts("")
    with pytest.raises(ShapeError):
        OPS.fused_experts(torch.zeros(3, 31), *_parts(w13), *_parts(w2), IDS, SHARES)


def _layer(x: torch.Tensor, router: torch.Tensor, w13: Any, w2: Any, out: torch.Tensor, weights_out: torch.Tensor) -> Any:
    """All ops of the family, with and without given outputs."""
    weights, ids = moe.topk_routing(x @ router.t(), 2, renormalize=True, weights_out=weights_out)
    rows, offsets, places = moe.permute(x, ids, num_experts=3)
    again = moe.unpermute(rows, places, weights, addend=x)
    moe.fused_experts(again, w13, w2, ids, weights, activation=moe.GatedActivation(limit=2.0), out=out)
    return out + 1, offsets, weights_out


@pytest.mark.parametrize("fmt", ["", "mxfp4@block_32"])
def test_compiled_without_a_graph_break_equals_eager(fmt: str) -> None:
    w13, w2 = _experts(fmt)
    generator = torch.Generator().manual_seed(4)
    x, router = torch.randn(4, 32, generator=generator), torch.randn(3, 32, generator=generator)

    def arguments() -> tuple[Any, ...]:
        return x, router, w13, w2, torch.full((4, 32), float("nan")), torch.zeros(4, 2)

    compiled = torch.compile(_layer, fullgraph=True)
    for want, got in zip(_layer(*arguments()), compiled(*arguments()), strict=True):
        torch.testing.assert_close(got, want)


def test_export_holds_our_ops() -> None:
    w13, w2 = _experts("")

    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor, router: torch.Tensor) -> torch.Tensor:
            weights, ids = moe.topk_routing(x @ router.t(), 2)
            return moe.fused_experts(x, w13, w2, ids, weights)

    arguments = torch.randn(4, 32), torch.randn(3, 32)
    program = torch.export.export(Model(), arguments)
    targets = {str(node.target) for node in program.graph.nodes}
    assert {"tokenspeed.topk_routing.default", "tokenspeed.fused_experts.default"} <= targets
    torch.testing.assert_close(program.module()(*arguments), Model()(*arguments))


@pytest.mark.parametrize("wrong", [[[1.0]], None, 3], ids=str)
def test_what_is_no_tensor_is_named(wrong: Any) -> None:
    w13, w2 = _experts("")
    x = torch.randn(3, 32)
    made = moe.plan(moe.MoeConfig(3, 2, 32, 32), "cpu", x_format="fp32", weight_format="fp32")
    weights = moe.process_weights(made, w13, w2)
    for call, name in (
        (lambda: moe.topk_routing(wrong, 2), "logits"),
        (lambda: moe.permute(wrong, IDS, num_experts=3), "x"),
        (lambda: moe.unpermute(x, wrong, SHARES), "row_of_pair"),
        (lambda: moe.fused_experts(x, wrong, w2, IDS, SHARES), "w13"),
        (lambda: moe.apply(made, weights, x, IDS, wrong), "topk_weights"),
    ):
        with pytest.raises(ShapeError, match=f"expected {name} to be a tensor"):
            call()
