"""The wheel of the kernel package: two requirements, small, and alive where there is no Triton, GPU, driver or compiler."""

from __future__ import annotations

import email
import json
import zipfile
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from tokenspeed_kernel.plugin_kit.scaffold import project_files

EXTRAS = {"triton", "cutlass", "flashinfer", "deep-gemm", "trtllm"}


def _requirements(wheel: Path) -> tuple[list[Requirement], list[Requirement], set[str]]:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [one for one in archive.namelist() if one.endswith(".dist-info/METADATA")]
        metadata = email.message_from_string(archive.read(name).decode())
    requirements = [Requirement(text) for text in metadata.get_all("Requires-Dist", [])]
    hard = [one for one in requirements if one.marker is None or "extra" not in str(one.marker)]
    return hard, [one for one in requirements if one not in hard], set(metadata.get_all("Provides-Extra", []))


def test_two_hard_requirements_and_the_rest_are_extras(kernel_wheel: Path) -> None:
    hard, optional, extras = _requirements(kernel_wheel)
    assert sorted(one.name for one in hard) == ["packaging", "torch"]
    torch_range = next(one.specifier for one in hard if one.name == "torch")
    assert all(torch_range.contains(version, prereleases=True) for version in ("2.9.0", "2.11.0", "2.13.0+cpu", "2.15.0", "3.0.0"))
    assert not torch_range.contains("2.8.0")
    assert extras >= EXTRAS
    for extra in EXTRAS:
        assert [one.name for one in optional if one.marker is not None and one.marker.evaluate({"extra": extra})], extra


def test_installing_it_replaces_no_torch(kernel_environment: Any) -> None:
    assert "Requirement already satisfied: torch" in kernel_environment.told
    assert "Would install" not in kernel_environment.told
    assert "Successfully installed tokenspeed-kernel" in kernel_environment.told


def test_it_is_small_and_for_any_platform(kernel_wheel: Path) -> None:
    assert kernel_wheel.name.endswith("-py3-none-any.whl")
    assert kernel_wheel.stat().st_size < 3_000_000
    with zipfile.ZipFile(kernel_wheel) as archive:
        names = archive.namelist()
    assert not [one for one in names if "__pycache__" in one or one.endswith((".so", ".pyc"))]
    assert any(one.endswith("tokenspeed_kernel/py.typed") for one in names)
    assert any(".dist-info/licenses/LICENSE" in one for one in names)


def test_new_works_from_the_wheel(kernel_environment: Any, tmp_path: Path) -> None:
    code = "import sys; from tokenspeed_kernel.cli import main; sys.exit(main(sys.argv[1:]))"
    kernel_environment.run("-c", code, "plugin", "new", "acme-kernels", "--directory", str(tmp_path / "made"))
    files = [path for path in (tmp_path / "made").rglob("*") if path.is_file()]
    assert {str(path.relative_to(tmp_path / "made")): path.read_text() for path in files} == project_files("acme-kernels")


IMPORTS = """
import json, sys, torch
before = set(sys.modules)
import tokenspeed_kernel
from tokenspeed_kernel.registry import collect_builtin
import importlib, pkgutil
from tokenspeed_kernel import ops
for family in pkgutil.iter_modules(ops.__path__):
    if family.ispkg:
        importlib.import_module(f"tokenspeed_kernel.ops.{family.name}")
registry = collect_builtin().freeze()
libraries = {library.module.partition(".")[0] for spec in registry for library in spec.libraries}
tops = {name.partition(".")[0] for name in set(sys.modules) - before}
print(json.dumps({"tops": sorted(tops), "libraries": sorted(libraries), "kernels": sum(1 for _ in registry),
                  "cuda": torch.cuda.is_initialized(), "where": tokenspeed_kernel.__file__}))
"""


def test_importing_everything_imports_no_library(kernel_environment: Any) -> None:
    found = json.loads(kernel_environment.run("-c", IMPORTS).stdout)
    assert found["where"].startswith(str(kernel_environment.site)), "what is tested is the installed wheel"
    assert found["kernels"] > 50
    assert not found["cuda"]
    vendors = {"triton", "cutlass", "flashinfer", "flash_mla", "deep_gemm", "tensorrt_llm"}
    assert not (vendors | set(found["libraries"])) & set(found["tops"])


EVERY_OP = """
import collections, json, shutil, sys, torch
assert not any(shutil.which(one) for one in ("cc", "gcc", "g++", "clang", "c++", "nvcc", "ninja", "cmake"))
torch.set_num_threads(1)
from tokenspeed_kernel import dispatch
from tokenspeed_kernel.errors import NoKernelError
from tokenspeed_kernel.testing import family_cases, public_op
registry = dispatch.default_registry()
done, whys = collections.Counter(), {}
for family in sorted({op.partition(".")[0] for op in registry.ops()}):
    for case in family_cases(family):
        if case.bench or done[case.op]:
            continue
        for dtype in case.dtypes or (torch.float32, torch.bfloat16):
            try:
                inputs = case.build(torch.Generator().manual_seed(0), torch.device("cpu"), dtype)
                if any(isinstance(one, torch.Tensor) and one.numel() == 0 for one in inputs.values()):
                    break
                public_op(case.op)(**inputs)
            except NoKernelError as error:
                whys[case.op] = str(error)
                continue
            done[case.op] += 1
            break
from tokenspeed_kernel.ops.gemm import pack_weight
packed = pack_weight(torch.randn(8, 16))(torch.randn(3, 16))
done["gemm.pack_weight"] += packed.shape == (3, 8)
missing = {op: whys.get(op, "no case") for op in registry.ops() if not done[op]}
print(json.dumps({"missing": missing, "done": sorted(done), "triton": "triton" in sys.modules, "plugins": len(registry.plugins)}))
"""


def test_every_op_has_a_result_without_compiler_triton_or_gpu(kernel_environment: Any) -> None:
    found = json.loads(kernel_environment.run("-c", EVERY_OP).stdout.splitlines()[-1])
    assert found["missing"] == {}
    assert len(found["done"]) > 20
    assert found["plugins"] == 0
    assert not found["triton"]
