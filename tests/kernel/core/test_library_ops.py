"""The torch.library form of the ops: opcheck, torch.compile without a graph break, export."""

from __future__ import annotations

import pytest
import torch

import tokenspeed_kernel.ops.activation
import tokenspeed_kernel.ops.embedding
import tokenspeed_kernel.ops.gemm
import tokenspeed_kernel.ops.norm
from tokenspeed_kernel.errors import NoKernelError, ShapeError
from tokenspeed_kernel.ops.activation import silu_and_mul
from tokenspeed_kernel.ops.embedding import embedding
from tokenspeed_kernel.ops.gemm import mm
from tokenspeed_kernel.ops.norm import fused_add_rms_norm, rms_norm

OPS = torch.ops.tokenspeed


def _x(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape).to(dtype)


ARGUMENTS = {
    "rms_norm": [
        (_x(3, 8), _x(8), 1e-6),
        (_x(2, 3, 8).transpose(0, 1), _x(8), 1e-6, "cpu"),
        (_x(0, 8, dtype=torch.bfloat16), _x(8), 1e-6),
    ],
    "fused_add_rms_norm": [(_x(3, 8), _x(3, 8), _x(8), 1e-6), (_x(8, 3).t(), _x(3, 8), _x(8), 1e-6)],
    "embedding": [(torch.tensor([1, 9, 0]), _x(4, 8)), (torch.zeros(0, dtype=torch.int32), _x(4, 8, dtype=torch.float16))],
    "silu_and_mul": [(_x(3, 8),), (_x(2, 3, 8),), (_x(8, 3).t(),)],
    "mm": [
        (_x(3, 8), _x(5, 8)),
        (_x(1, 8), _x(5, 8), _x(5)),
        (_x(2, 3, 8, dtype=torch.bfloat16), _x(5, 8, dtype=torch.bfloat16), None, torch.float32),
        (_x(8, 3).t(), _x(8, 5).t(), _x(5), None, "cpu"),
    ],
}


@pytest.mark.parametrize(("name", "index"), [(name, index) for name, calls in ARGUMENTS.items() for index in range(len(calls))])
def test_opcheck(name: str, index: int) -> None:
    torch.library.opcheck(getattr(OPS, name).default, ARGUMENTS[name][index])


def test_library_op_checks_shapes_and_solution() -> None:
    with pytest.raises(ShapeError):
        OPS.rms_norm(_x(3, 8), _x(7), 1e-6)
    with pytest.raises(ShapeError):
        OPS.mm(_x(3, 8), _x(5, 7))
    with pytest.raises(NoKernelError):
        OPS.silu_and_mul(_x(3, 8), "no_such_solution")


def _block(token_ids, table, norm, weight, bias, out):  # type: ignore[no-untyped-def]
    """All four families, with and without given outputs."""
    x = embedding(token_ids, table)
    normed = rms_norm(x, norm, eps=1e-5)
    hidden = silu_and_mul(mm(normed, weight, bias))
    normed, residual = fused_add_rms_norm(hidden, x, norm, out=hidden, residual_out=x)
    mm(normed, weight, out=out)
    return normed, residual, out


def _arguments() -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(3)
    shapes = ((11, 8), (8,), (16, 8), (16,))
    tensors = [torch.randn(*shape, generator=generator) for shape in shapes]
    return torch.tensor([3, 10, 11, 0]), *tensors, torch.full((4, 16), float("nan"))


def test_compiled_without_a_graph_break_equals_eager() -> None:
    compiled = torch.compile(_block, fullgraph=True)
    for want, got in zip(_block(*_arguments()), compiled(*_arguments()), strict=True):
        torch.testing.assert_close(got, want)


def test_export_holds_our_ops() -> None:
    class Model(torch.nn.Module):
        def forward(self, token_ids, table, norm, weight, bias, out):  # type: ignore[no-untyped-def]
            return _block(token_ids, table, norm, weight, bias, out.clone())

    program = torch.export.export(Model(), _arguments())
    targets = {str(node.target) for node in program.graph.nodes}
    assert {f"tokenspeed.{name}.default" for name in ARGUMENTS} <= targets
    for want, got in zip(_block(*_arguments()), program.module()(*_arguments()), strict=True):
        torch.testing.assert_close(got, want)


def test_eager_call_does_not_enter_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("the dispatcher was entered")

    for module, name in (
        (tokenspeed_kernel.ops.norm.api, "_library_rms_norm"),
        (tokenspeed_kernel.ops.norm.api, "_library_fused_add_rms_norm"),
        (tokenspeed_kernel.ops.embedding.api, "_library_embedding"),
        (tokenspeed_kernel.ops.activation.api, "_library_silu_and_mul"),
        (tokenspeed_kernel.ops.gemm.api, "_library_mm"),
    ):
        monkeypatch.setattr(module, name, refuse)
    _block(*_arguments())
