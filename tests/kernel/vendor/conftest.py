"""Vendor kernels on the CPU: the wrappers are ours and run as they are, the libraries are stand-ins with recorded signatures."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tokenspeed_kernel import dispatch
from tokenspeed_kernel.registry import Registry, collect_builtin
from tokenspeed_kernel.spec import CPU, Band

SOLUTIONS = ("flashinfer", "flash_mla", "deep_gemm", "trtllm", "cudnn")

_folder = Path(__file__).with_name("stand_ins")
_spec = importlib.util.spec_from_file_location(
    "vendor_stand_ins", _folder / "__init__.py", submodule_search_locations=[str(_folder)]
)
assert _spec is not None and _spec.loader is not None
stand_ins: ModuleType = importlib.util.module_from_spec(_spec)
sys.modules["vendor_stand_ins"] = stand_ins
_spec.loader.exec_module(stand_ins)
# An operator stays for the life of the process; the real library's own, where it is installed, is not touched.
if not hasattr(torch.ops.trtllm, "fp8_block_scaling_gemm"):
    _library = torch.library.Library("trtllm", "FRAGMENT")  # type: ignore[no-untyped-call]
    _library.define(stand_ins.TRTLLM_SCHEMA)
    _library.impl("fp8_block_scaling_gemm", stand_ins.fp8_block_scaling_gemm, "CPU")


def _is_wrapper(name: str) -> bool:
    return ".vendor." in name and name.startswith("tokenspeed_kernel.ops.") and not name.endswith("specs")


@pytest.fixture(scope="module")
def vendor_registry() -> Iterator[Registry]:
    """The references, and every vendor kernel as if it were for the CPU; in use by the ops."""
    builtin = collect_builtin()
    registry = Registry()
    registry.add_contracts(builtin.contract(op) for op in builtin.ops())
    registry.add(spec for spec in builtin if spec.band is Band.REFERENCE)
    registry.add(replace(spec, capability=CPU, requires=()) for spec in builtin if spec.solution in SOLUTIONS)
    kept = {name: sys.modules.pop(name) for name in list(sys.modules) if _is_wrapper(name)}
    made = stand_ins.modules()
    replaced = {name: sys.modules.get(name) for name in made}
    sys.modules.update(made)
    # PyTorch has the operator, with kernels for CUDA alone.
    cudnn = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    cudnn.impl("_scaled_dot_product_cudnn_attention", stand_ins.scaled_dot_product_cudnn_attention, "CPU")
    with dispatch.use_registry(registry.freeze()):
        yield registry
    cudnn._destroy()  # type: ignore[no-untyped-call]
    for name in [name for name in sys.modules if _is_wrapper(name)]:
        del sys.modules[name]
    sys.modules.update(kept)
    for name, module in replaced.items():
        if module is None:
            del sys.modules[name]
        else:
            sys.modules[name] = module
