"""The other norms: independent truths, heads of a projection, rows far apart, the library's form, refusals."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.mamba2.modeling_mamba2 import MambaRMSNormGated
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated

from tokenspeed_kernel.errors import ShapeError
from tokenspeed_kernel.ops import norm
from tokenspeed_kernel.ops.norm import (
    fused_add_gemma_rms_norm,
    gated_rms_norm,
    gemma_rms_norm,
    layer_norm,
    rms_norm,
)

OPS = torch.ops.tokenspeed


@pytest.fixture(params=["cpu", "reference", "triton"])
def solution(request: pytest.FixtureRequest) -> str:
    """Every solution that runs on this machine without a GPU."""
    if request.param == "triton":
        pytest.importorskip("triton", reason="needs triton")
        if torch.cuda.is_available():
            pytest.skip("the interpreter is for machines without a GPU")
    return str(request.param)


def _close(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got, want.detach(), rtol=1e-5, atol=1e-5)


def test_equal_to_transformers(solution: str) -> None:
    x, gate, weight = torch.randn(5, 48), torch.randn(5, 48), torch.randn(48)
    theirs = Gemma2RMSNorm(48, eps=1e-6)
    theirs.weight.data = weight
    _close(gemma_rms_norm(x, weight, eps=1e-6, solution=solution), theirs(x))
    before = Qwen3NextRMSNormGated(48, eps=1e-6)
    before.weight.data = weight
    _close(gated_rms_norm(x, gate, weight, eps=1e-6, solution=solution), before(x, gate))
    for group_size in (48, 16):
        after = MambaRMSNormGated(48, group_size, eps=1e-6)
        after.weight.data = weight
        got = gated_rms_norm(x, gate, weight, norm_before_gate=False, group_size=group_size, solution=solution)
        _close(got, after(x, gate))


def test_layer_norm_is_pytorchs(solution: str) -> None:
    x, weight, bias = torch.randn(4, 3, 40), torch.randn(40), torch.randn(40)
    _close(layer_norm(x, weight, bias, solution=solution), torch.nn.functional.layer_norm(x, (40,), weight, bias))
    _close(layer_norm(x, weight, solution=solution), torch.nn.functional.layer_norm(x, (40,), weight))


def test_fused_is_the_two_ops(solution: str) -> None:
    x, residual, weight = torch.randn(4, 32).half(), torch.randn(4, 32).half(), torch.randn(32).half()
    normed, total = fused_add_gemma_rms_norm(x, residual, weight, solution=solution)
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, gemma_rms_norm(total, weight, solution=solution))


CALLS: dict[str, Callable[..., torch.Tensor]] = {
    "rms_norm": rms_norm,
    "gemma_rms_norm": gemma_rms_norm,
    "layer_norm": lambda x, w, **o: layer_norm(x, w, w, **o),
    "gated_rms_norm": lambda x, w, **o: gated_rms_norm(x, x, w, group_size=4, **o),
    "gated_rms_norm after": lambda x, w, **o: gated_rms_norm(x, x, w, norm_before_gate=False, **o),
}


@pytest.mark.parametrize("name", CALLS)
def test_strides_are_honoured_in_and_out(name: str, solution: str) -> None:
    """Report Z10, and its kind: every stride of every dimension, in inputs and outputs alike, gives the contiguous result."""
    call, weight = CALLS[name], torch.randn(48)[::2]
    assert not weight.is_contiguous()
    base = torch.randn(6, 5, 24)
    views = {
        "last dimension strided": torch.empty(24, 6, 5).movedim(0, 2).copy_(base),
        "heads of a projection": torch.empty(6, 9, 24)[:, 2:7].copy_(base),
        "tokens and heads exchanged": torch.empty(5, 6, 24).transpose(0, 1).copy_(base),
        "every second element": torch.empty(6, 5, 48)[..., 1::2].copy_(base),
        "rows backwards in memory": torch.empty(6, 5, 24).flip(0).copy_(base),
    }
    want = call(base, weight.contiguous(), solution="reference")
    for label, view in views.items():
        got = call(view, weight, solution=solution)
        assert got.is_contiguous(), label
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5, msg=lambda text, label=label: f"{label}: {text}")
        out = torch.empty_strided(view.shape, view.stride()).fill_(float("nan"))
        assert call(view, weight, out=out, solution=solution) is out
        torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-5, msg=lambda text, label=label: f"{label}: {text}")
    in_place = views["heads of a projection"]
    call(in_place, weight, out=in_place, solution=solution)
    torch.testing.assert_close(in_place, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", CALLS)
def test_rows_beyond_2_31_elements(name: str, solution: str, tmp_path: Path) -> None:
    """Report K3: the second row of heads starts where an offset of 32 bits has wrapped."""
    outer = 2**31 + 64
    path = tmp_path / "sparse.bin"
    with path.open("wb") as file:
        file.truncate(4 * (outer + 3 * 24))
    if path.stat().st_blocks * 512 > 2**20:
        pytest.skip("needs a file system with sparse files")
    storage = torch.from_file(os.fspath(path), shared=True, size=outer + 3 * 24, dtype=torch.float32)
    far = storage.as_strided((2, 3, 24), (outer, 24, 1))
    far.copy_(torch.randn(2, 3, 24))
    weight = torch.randn(24)
    want = CALLS[name](far.clone(memory_format=torch.contiguous_format), weight, solution="reference")
    torch.testing.assert_close(CALLS[name](far, weight, solution=solution), want, rtol=1e-5, atol=1e-5)
    CALLS[name](far, weight, out=far, solution=solution)
    torch.testing.assert_close(far.clone(memory_format=torch.contiguous_format), want, rtol=1e-5, atol=1e-5)


def _x(*shape: int) -> torch.Tensor:
    return torch.randn(*shape)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("gemma_rms_norm", (_x(3, 8), _x(8), 1e-6)),
        ("gemma_rms_norm", (_x(2, 3, 8).transpose(0, 1), _x(8), 1e-6, "cpu")),
        ("fused_add_gemma_rms_norm", (_x(8, 3).t(), _x(3, 8), _x(8), 1e-6)),
        ("layer_norm", (_x(3, 8), _x(8), None, 1e-5)),
        ("layer_norm", (_x(0, 8), _x(8), _x(8), 1e-5)),
        ("gated_rms_norm", (_x(3, 8), _x(3, 8), _x(8), 1e-6, True, None)),
        ("gated_rms_norm", (_x(3, 8), _x(3, 8), _x(8), 1e-6, False, 4)),
    ],
)
def test_opcheck(name: str, arguments: tuple[Any, ...]) -> None:
    torch.library.opcheck(getattr(OPS, name).default, arguments)


def test_compiled_without_a_graph_break_equals_eager() -> None:
    def block(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> tuple[torch.Tensor, ...]:
        normed, total = fused_add_gemma_rms_norm(x, gate, weight, residual_out=torch.empty_like(x))
        gated = gated_rms_norm(total, gate, weight, group_size=4)
        return layer_norm(gemma_rms_norm(normed, weight), weight, weight, out=out), gated

    arguments = [_x(3, 8), _x(3, 8), _x(8)]
    eager, traced = torch.full((3, 8), float("nan")), torch.full((3, 8), float("nan"))
    want = block(*arguments, eager)
    got = torch.compile(block, fullgraph=True, backend="aot_eager")(*arguments, traced)
    torch.testing.assert_close(got, want)
    assert torch.equal(traced, eager)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: gemma_rms_norm(_x(2, 8), _x(7)), r"norm\.gemma_rms_norm: .* got x \[2, 8\] and weight \[7\]"),
        (lambda: fused_add_gemma_rms_norm(_x(2, 8), _x(8), _x(8)), r"expected residual \[2, 8\]"),
        (lambda: fused_add_gemma_rms_norm(_x(2, 8), _x(2, 8).half(), _x(8)), r"residual \[2, 8\] torch\.float32, got"),
        (lambda: layer_norm(_x(2, 8), _x(8), _x(7)), r"bias \[hidden\], got x \[2, 8\] and bias \[7\]"),
        (lambda: layer_norm(_x(2, 8), _x(8), _x(8).half()), "bias of weight's dtype"),
        (lambda: layer_norm(_x(2, 8), _x(8), out=_x(8, 2)), r"expected out \[2, 8\]"),
        (lambda: gated_rms_norm(_x(2, 8), _x(2, 7), _x(8)), r"expected gate \[2, 8\]"),
        (lambda: gated_rms_norm(_x(2, 8), _x(2, 8), _x(8), group_size=3), "group_size that divides hidden=8, got 3"),
        (lambda: gated_rms_norm(_x(2, 8), _x(2, 8), _x(8), group_size=0), "group_size that divides hidden=8, got 0"),
    ],
)
def test_bad_operands_are_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        call()


def test_one_tensor_for_both_outputs_is_refused() -> None:
    out = _x(2, 8)
    with pytest.raises(ShapeError, match="one tensor for both"):
        fused_add_gemma_rms_norm(_x(2, 8), _x(2, 8), _x(8), out=out, residual_out=out)


def test_eager_call_does_not_enter_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("the dispatcher was entered")

    for module, name in ((norm.gemma, "_library_plain"), (norm.gemma, "_library_fused"), (norm.gated, "_library_op")):
        monkeypatch.setattr(module, name, refuse)
    x, weight = _x(2, 8), _x(8)
    gemma_rms_norm(x, weight)
    fused_add_gemma_rms_norm(x, x, weight)
    gated_rms_norm(x, x, weight)
