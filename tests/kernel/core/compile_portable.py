"""Compiles the Triton kernels of the simple families for GPUs that are not there, and prints what came out, as JSON.

Run as a program by `test_compiled`, because the interpreter of the other tests replaces Triton's compiler.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tokenspeed_kernel.ops.activation.triton.silu_and_mul import _silu_and_mul_kernel
from tokenspeed_kernel.ops.embedding.triton.embedding import _embedding_kernel
from tokenspeed_kernel.ops.gemm.triton.mm import _choose_tiles, _mm_kernel
from tokenspeed_kernel.ops.norm.triton.rms_norm import _rms_norm_kernel

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "sm_120": GPUTarget("cuda", 120, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
    "gfx950": GPUTarget("hip", "gfx950", 64),
}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
UNIT_STRIDES = ("x_col", "residual_col", "weight_step", "weight_col", "out_col", "residual_out_col", "bias_step", "ids_step")


def launches(target: str, dtype: str) -> Iterator[tuple[str, Any, dict[str, Any], int, int]]:
    """Yield (name, kernel, compile-time constants, warps, stages) as the launchers choose them."""
    for add in (False, True):
        for block, one_block in ((1024, True), (8192, True), (8192, False)):
            name = f"{'fused_add_' if add else ''}rms_norm {block if one_block else 'long rows'}"
            constants = {"ADD": add, "BLOCK": block, "ONE_BLOCK": one_block}
            yield name, _rms_norm_kernel, constants, min(max(block // 512, 1), 8), 3
    yield "embedding", _embedding_kernel, {"BLOCK": 1024}, 4, 3
    yield "silu_and_mul", _silu_and_mul_kernel, {"BLOCK": 1024}, 4, 3
    for rows in (1, 64, 512):
        tiles = _choose_tiles(rows, DTYPES[dtype], amd=target.startswith("gfx"))
        shape = {"ROWS": tiles.rows, "FEATURES": tiles.features, "DEPTH": tiles.depth}
        constants = {"HAS_BIAS": True, "WHOLE_DEPTH": True, "GROUP": 8, **shape}
        yield f"mm {rows} rows", _mm_kernel, constants, tiles.num_warps, tiles.num_stages


def compile_kernel(function: Any, target: str, dtype: str, constants: dict[str, Any], warps: int, stages: int) -> Any:
    """Compile as a launch on contiguous tensors would: pointers and row strides are multiples of 16, column strides 1."""
    constants = {**constants, **{name: 1 for name in function.arg_names if name in UNIT_STRIDES}}
    signature, constexprs, attributes = {}, {}, {}
    for place, name in enumerate(function.arg_names):
        if name in constants:
            signature[name], constexprs[(place,)] = "constexpr", constants[name]
            continue
        pointer = "*i64" if name == "ids_ptr" else f"*{dtype}"
        signature[name] = pointer if name.endswith("_ptr") else "fp32" if name == "eps" else "i32"
        if name.endswith(("_ptr", "_row")) or name in ("hidden", "inner", "in_features"):
            attributes[(place,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=function, signature=signature, constexprs=constexprs, attrs=attributes)
    return triton.compile(source, target=TARGETS[target], options={"num_warps": warps, "num_stages": stages})


def facts(kernel: Any, target: str) -> dict[str, Any]:
    """Spilled bytes or registers, shared memory, and which matrix instructions are there."""
    shared = kernel.metadata.shared
    if target.startswith("sm"):
        tool = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", "cuobjdump")
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(kernel.asm["cubin"])
            file.flush()
            printed = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
        found = re.search(r"REG:(\d+) STACK:(\d+)", printed)
        assert found, printed
        ptx = kernel.asm["ptx"]
        matrix = any(name in ptx for name in ("wgmma.mma", "mma.sync", "tcgen05.mma"))
        return {"spills": int(found[2]), "shared": shared, "matrix": matrix, "tf32": "tf32" in ptx}
    text = kernel.asm["amdgcn"]
    spills = re.search(r"\.vgpr_spill_count:\s+(\d+)", text)
    assert spills
    return {"spills": int(spills[1]), "shared": shared, "matrix": "v_mfma" in text, "tf32": "xf32" in text}


def main() -> None:
    """Arguments: targets; prints {target: {dtype: {kernel: facts}}}."""
    result: dict[str, Any] = {}
    for target in sys.argv[1:]:
        for dtype in DTYPES:
            for name, function, constants, warps, stages in launches(target, dtype):
                kernel = compile_kernel(function, target, dtype, constants, warps, stages)
                result.setdefault(target, {}).setdefault(dtype, {})[name] = facts(kernel, target)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
