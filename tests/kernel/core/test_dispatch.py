"""Binding a kernel once, and what the table must notice."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest
import torch

from tokenspeed_kernel import dispatch
from tokenspeed_kernel.dispatch import BoundOp, load_kernel, use_registry
from tokenspeed_kernel.errors import KernelLoadError, NoKernelError, PlatformError
from tokenspeed_kernel.ops.norm import rms_norm
from tokenspeed_kernel.registry import Registry
from tokenspeed_kernel.spec import ANYWHERE, CPU, Band, KernelSpec, OpContract

CPU_DEVICE = torch.device("cpu")
FP32 = (torch.float32, torch.float32)


@pytest.fixture
def kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module of kernels for the toy op."""
    (tmp_path / "toy_kernels.py").write_text(
        "def fast(q, cache):\n    return 'fast'\n\n\ndef slow(q, cache):\n    return 'slow'\n\n\n"
        "def wrong(q, kv):\n    return 'wrong'\n"
    )
    (tmp_path / "toy_broken.py").write_text("import no_such_module_xyz\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("toy_kernels", None)


def test_selection_runs_once_for_each_kind_of_call(
    kernels: None, toy: Registry, contract: OpContract, make_spec, monkeypatch
) -> None:  # type: ignore[no-untyped-def]
    toy.add([make_spec("fast", implementation="toy_kernels:fast")])
    seen = []
    original = dispatch.select
    monkeypatch.setattr(dispatch, "select", lambda *args: seen.append(str(args[1])) or original(*args))
    op = BoundOp(contract)
    with use_registry(toy.freeze()):
        for _ in range(3):
            assert op.kernel(CPU_DEVICE, FP32, (16, False))(None, None) == "fast"
        op.kernel(CPU_DEVICE, FP32, (64, False))
        op.kernel(CPU_DEVICE, FP32, (64, False), "toy")
    assert seen == [
        "toy.decode on cpu, q=fp32, cache=fp32, page_size=16, sinks=False",
        "toy.decode on cpu, q=fp32, cache=fp32, page_size=64, sinks=False",
        'toy.decode on cpu, q=fp32, cache=fp32, page_size=64, sinks=False, solution="toy"',
    ]
    assert not op.table, "leaving the registry forgets what was bound"


def test_solution_and_environment(
    kernels: None, toy: Registry, contract: OpContract, make_spec, monkeypatch: pytest.MonkeyPatch
) -> None:  # type: ignore[no-untyped-def]
    toy.add([make_spec("fast", implementation="toy_kernels:fast")])
    toy.add([make_spec("slow", implementation="toy_kernels:slow", band=Band.PORTABLE, solution="other")])
    op = BoundOp(contract)
    with use_registry(toy.freeze()):
        assert op.kernel(CPU_DEVICE, FP32, (16, False), "other")(None, None) == "slow"
        assert op.kernel(CPU_DEVICE, FP32, (16, False))(None, None) == "fast"
        monkeypatch.setenv("TOKENSPEED_KERNEL_DISABLE", "fast")
        assert op.kernel(CPU_DEVICE, FP32, (16, False))(None, None) == "fast", "it is bound already"
        op.clear()
        assert op.kernel(CPU_DEVICE, FP32, (16, False))(None, None) == "slow"


def test_table_is_bounded(kernels: None, toy: Registry, contract: OpContract, make_spec, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    toy.add([make_spec("fast", implementation="toy_kernels:fast")])
    monkeypatch.setattr(dispatch, "_MAX_BOUND", 8)
    op = BoundOp(contract)
    with use_registry(toy.freeze()):
        for page_size in range(50):
            op.kernel(CPU_DEVICE, FP32, (page_size, False))
            assert len(op.table) <= 8


@pytest.mark.parametrize(
    ("implementation", "message"),
    [
        ("toy_kernels:wrong", r"must take \(q, cache\), got \(q, kv\)"),
        ("toy_kernels:gone", "does not load: AttributeError: module 'toy_kernels' has no attribute 'gone'"),
        ("toy_broken:fast", "does not load: ModuleNotFoundError: No module named 'no_such_module_xyz'"),
    ],
)
def test_kernel_that_does_not_load_is_an_error_not_another_kernel(  # type: ignore[no-untyped-def]
    kernels: None, toy: Registry, contract: OpContract, make_spec, implementation: str, message: str
) -> None:
    toy.add(
        [make_spec("fast", implementation=implementation), make_spec("slow", implementation="toy_kernels:slow", band=Band.PORTABLE)]
    )
    with use_registry(toy.freeze()), pytest.raises(KernelLoadError, match=message):
        BoundOp(contract).kernel(CPU_DEVICE, FP32, (16, False))


def test_load_kernel_keeps_the_cause(kernels: None, contract: OpContract) -> None:
    spec = KernelSpec("toy.decode", "fast", "toy", Band.PORTABLE, "toy_broken:fast", CPU)
    with pytest.raises(KernelLoadError) as caught:
        load_kernel(spec, contract)
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)
    assert 'set TOKENSPEED_KERNEL_DISABLE="fast"' in str(caught.value)


def test_registry_is_put_back_after_an_error(toy: Registry) -> None:
    before = dispatch.default_registry()
    with pytest.raises(ZeroDivisionError), use_registry(toy.freeze()):
        raise ZeroDivisionError
    assert dispatch.default_registry() is before


def test_real_op_through_the_table() -> None:
    x, weight = torch.randn(2, 8), torch.ones(8)
    torch.testing.assert_close(rms_norm(x, weight), rms_norm(x, weight, solution="cpu"), rtol=1e-6, atol=1e-6)
    with pytest.raises(
        NoKernelError, match=r"norm\.rms_norm on cpu, x=fp64(.|\n)*cpu_rms_norm: x in \{bf16, fp16, fp32\}, got fp64"
    ):
        rms_norm(x.double(), weight)
    assert rms_norm(x.double(), weight, solution="reference").dtype is torch.float64
    with pytest.raises(PlatformError):
        BoundOp(OpContract("toy.op", ("x",), ("x",))).kernel(torch.device("mps"), (torch.float32,))


def test_a_kernel_that_takes_keywords_only_serves_an_op_that_passes_by_position(monkeypatch: pytest.MonkeyPatch) -> None:
    def kernel(x: object, *, scale: object, out: object) -> tuple[object, ...]:
        return x, scale, out

    monkeypatch.setitem(sys.modules, "keyword_kernels", types.SimpleNamespace(kernel=kernel))
    contract = OpContract("norm.scaled", ("x",), ("x", "scale", "out"), by_position=True)
    spec = KernelSpec("norm.scaled", "keyword_scaled", "keyword", Band.PORTABLE, "keyword_kernels:kernel", ANYWHERE)
    assert load_kernel(spec, contract)(1, 2, 3) == (1, 2, 3)
