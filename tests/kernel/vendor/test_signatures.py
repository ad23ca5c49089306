"""The recorded signatures are those of the library that is installed, wherever one is."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import vendor_stand_ins as stand_ins

RECORDED: dict[str, tuple[Any, ...]] = {
    "flashinfer.norm": (stand_ins.rmsnorm, stand_ins.fused_add_rmsnorm),
    "flashinfer.decode": (stand_ins.BatchDecodeWithPagedKVCacheWrapper,),
    "flashinfer.prefill": (
        stand_ins.BatchPrefillWithPagedKVCacheWrapper,
        stand_ins.BatchPrefillWithRaggedKVCacheWrapper,
    ),
    "flashinfer.mla": (stand_ins.BatchMLAPagedAttentionWrapper, stand_ins.MLAPlanMetadata),
    "flash_mla": (stand_ins.flash_mla_with_kvcache, stand_ins.get_mla_metadata),
}
# Compiled functions, which tell no signature: that they are there is all that can be seen without calling them.
COMPILED = {
    "deep_gemm": (
        "fp8_gemm_nt",
        "m_grouped_fp8_gemm_nt_contiguous",
        "m_grouped_fp8_gemm_nt_masked",
        "get_mk_alignment_for_contiguous_layout",
    )
}


def _installed(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except Exception as error:  # noqa: BLE001 - a vendor's package may raise anything where there is no driver
        pytest.skip(f"needs {module.partition('.')[0]}, which does not import: {type(error).__name__}")


def _parameters(function: Callable[..., Any]) -> dict[str, tuple[Any, Any]]:
    found = inspect.signature(function).parameters
    return {name: (one.kind, one.default) for name, one in found.items() if name != "self"}


def _functions(one: Any) -> dict[str, Any]:
    if not inspect.isclass(one):
        return {one.__name__: one}
    names = [name for name in ("__init__", "plan", "run", "csr") if name in vars(one)]
    return {name: getattr(one, name) for name in names if not (name == "__init__" and one is stand_ins.MLAPlanMetadata)}


@pytest.mark.parametrize(("module", "recorded"), [(name, one) for name, many in RECORDED.items() for one in many])
def test_recorded_is_installed(module: str, recorded: Any) -> None:
    library = _installed(module)
    real = getattr(library, recorded.__name__)
    for name, ours in _functions(recorded).items():
        theirs = getattr(real, name) if inspect.isclass(recorded) else real
        # The decoding plan takes its options as **kwargs and hands them on.
        if recorded is stand_ins.BatchDecodeWithPagedKVCacheWrapper and name == "plan":
            theirs = real._plan_impl
        assert _parameters(ours) == _parameters(theirs), f"{module}.{recorded.__name__}.{name}"


@pytest.mark.parametrize(("module", "name"), [(module, name) for module, names in COMPILED.items() for name in names])
def test_compiled_function_is_there(module: str, name: str) -> None:
    assert callable(getattr(_installed(module), name))


def test_trtllm_schema() -> None:
    _installed("tensorrt_llm")
    schema = str(torch.ops.trtllm.fp8_block_scaling_gemm.default._schema)
    assert schema == f"trtllm::{stand_ins.TRTLLM_SCHEMA}"


# Where the wheel is installed but needs a GPU to be imported, its text still tells: file, function there, our record of it.
SOURCES = [
    ("flash_mla", "flash_mla_interface.py", "flash_mla_with_kvcache", stand_ins.flash_mla_with_kvcache),
    ("deep_gemm", "_C.pyi", "fp8_fp4_gemm_nt", stand_ins.fp8_gemm_nt),
    ("deep_gemm", "_C.pyi", "m_grouped_fp8_fp4_gemm_nt_contiguous", stand_ins.m_grouped_fp8_gemm_nt_contiguous),
    ("deep_gemm", "_C.pyi", "m_grouped_fp8_fp4_gemm_nt_masked", stand_ins.m_grouped_fp8_gemm_nt_masked),
]


@pytest.mark.parametrize(("package", "file", "name", "recorded"), SOURCES, ids=[one[2] for one in SOURCES])
def test_recorded_is_in_the_text_of_the_wheel(package: str, file: str, name: str, recorded: Callable[..., Any]) -> None:
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None or not Path(spec.origin).with_name(file).exists():
        pytest.skip(f"needs {package}, which is not installed")
    tree = ast.parse(Path(spec.origin).with_name(file).read_text(encoding="utf-8"))
    (node,) = [one for one in tree.body if isinstance(one, ast.FunctionDef) and one.name == name]
    theirs = [one.arg for one in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
    assert list(inspect.signature(recorded).parameters) == theirs
