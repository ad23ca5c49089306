"""Compiles the Triton kernel over rows at two distances for GPUs that are not there, and prints what came out, as JSON.

Run as a program by `test_norm_compiled`, because the interpreter of the other tests replaces Triton's compiler.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tokenspeed_kernel.ops.norm.triton.rows import _norm_rows_kernel

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "sm_120": GPUTarget("cuda", 120, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
    "gfx950": GPUTarget("hip", "gfx950", 64),
}
PLAIN = {"CENTRE": False, "OFFSET": False, "BIAS": False, "ADD": False, "GATE": False, "GATE_FIRST": False}
KINDS = {
    "rms_norm": {},
    "gemma_rms_norm": {"OFFSET": True},
    "fused_add_gemma_rms_norm": {"OFFSET": True, "ADD": True},
    "layer_norm": {"CENTRE": True, "BIAS": True},
    "gated_rms_norm": {"GATE": True},
    "gated_rms_norm after": {"GATE": True, "GATE_FIRST": True},
}
COLUMNS = ("x_col", "other_col", "weight_step", "bias_step", "out_col", "total_col")


def compile_kernel(target: str, dtype: str, constants: dict[str, Any], warps: int) -> Any:
    """Compile as a launch on contiguous rows would: pointers and row strides are multiples of 16, column strides 1."""
    function = _norm_rows_kernel
    constants = {**constants, **dict.fromkeys(COLUMNS, 1)}
    signature, constexprs, attributes = {}, {}, {}
    for place, name in enumerate(function.arg_names):
        if name in constants:
            signature[name], constexprs[(place,)] = "constexpr", constants[name]
            continue
        signature[name] = f"*{dtype}" if name.endswith("_ptr") else "fp32" if name == "eps" else "i32"
        if name.endswith(("_ptr", "_outer", "_inner")) or name == "hidden":
            attributes[(place,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=function, signature=signature, constexprs=constexprs, attrs=attributes)
    return triton.compile(source, target=TARGETS[target], options={"num_warps": warps})


def spills(kernel: Any, target: str) -> int:
    """Bytes of stack on NVIDIA, registers on AMD."""
    if target.startswith("sm"):
        tool = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", "cuobjdump")
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(kernel.asm["cubin"])
            file.flush()
            printed = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
        found = re.search(r"STACK:(\d+)", printed)
    else:
        found = re.search(r"\.vgpr_spill_count:\s+(\d+)", kernel.asm["amdgcn"])
    assert found
    return int(found[1])


def main() -> None:
    """Arguments: target; prints {kernel: spills}."""
    target = sys.argv[1]
    result = {}
    for kind, options in KINDS.items():
        for dtype, rows, block, one_block in (("bf16", 16, 128, True), ("bf16", 1, 8192, True), ("fp32", 1, 8192, False)):
            constants = {**PLAIN, **options, "ROWS": rows, "BLOCK": block, "ONE_BLOCK": one_block}
            kernel = compile_kernel(target, dtype, constants, min(max(rows * block // 512, 1), 8))
            result[f"{kind} {dtype} {rows}x{block}{'' if one_block else ' long'}"] = spills(kernel, target)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
