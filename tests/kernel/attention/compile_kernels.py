"""Compiles the Triton kernels for GPUs that are not there, and prints what the machine code uses, as JSON.

Run as a program by `test_attention_compiled`, because the interpreter of the other tests replaces Triton's compiler.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tokenspeed_kernel.ops.attention.triton import decode, extend, tuning
from tokenspeed_kernel.ops.kvcache.triton import write_kv
from tokenspeed_kernel.ops.rope.triton import apply_rope

TARGETS = {
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx950": GPUTarget("hip", "gfx950", 64),
}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
POINTERS = {
    "lse_ptr": "*fp32",
    "sinks_ptr": "*fp32",
    "pages_ptr": "*i32",
    "cu_q_ptr": "*i32",
    "lengths_ptr": "*i32",
    "positions_ptr": "*i64",
    "table_ptr": "*fp32",
    "slots_ptr": "*i64",
    "parts_ptr": "*fp32",
    "part_lse_ptr": "*fp32",
}
# As Triton specialises an engine's call: pointers and the strides of heads, tokens and pages are multiples of 16.
NOT_ALIGNED = ("num_", "max_", "window", "splits", "pages_row", "scale", "cap", "lse_", "slot_step", "position_step", "page_size")


def compile_kernel(function: Any, target: str, dtype: str, constants: dict[str, Any], num_warps: int, num_stages: int) -> Any:
    """Compile one kernel as its launcher would have it compiled."""
    signature, constexprs, attributes = {}, {}, {}
    for place, name in enumerate(function.arg_names):
        if name in constants:
            signature[name], constexprs[(place,)] = "constexpr", constants[name]
            continue
        is_pointer = name.endswith("_ptr")
        scalar = "fp32" if name in ("scale", "cap") else "i32"
        signature[name] = POINTERS.get(name, f"*{dtype}") if is_pointer else scalar
        if is_pointer or not name.startswith(NOT_ALIGNED):
            attributes[(place,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=function, signature=signature, constexprs=constexprs, attrs=attributes)
    return triton.compile(source, target=TARGETS[target], options={"num_warps": num_warps, "num_stages": num_stages})


def resources(kernel: Any, target: str) -> dict[str, Any]:
    """Registers, spills and matrix instructions of the machine code."""
    if target.startswith("sm"):
        tool = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", "cuobjdump")
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(kernel.asm["cubin"])
            file.flush()
            command = [tool, "-res-usage", file.name]
            printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        found = re.search(r"REG:(\d+) STACK:(\d+)", printed)
        assert found, printed
        return {
            "registers": int(found[1]),
            "spills": int(found[2]),
            "matrix": any(name in kernel.asm["ptx"] for name in ("wgmma", "mma.sync", "tcgen05.mma")),
        }
    text = kernel.asm["amdgcn"]
    counts = {name: int(re.search(rf"\.{name}:\s+(\d+)", text)[1]) for name in ("vgpr_count", "vgpr_spill_count")}  # type: ignore[index]
    return {"registers": counts["vgpr_count"], "spills": counts["vgpr_spill_count"], "matrix": "mfma" in text}


def attention(kind: str, target: str, dtype: str, head_dim: int, page_size: int, **options: bool) -> dict[str, Any]:
    """Compile an attention kernel in the launcher's configuration for long requests."""
    amd = target.startswith("gfx")
    if kind == "decode":
        function = decode._decode_kernel
        config = tuning.decode_config(DTYPES[dtype], head_dim, 4, 8192, page_size, amd=amd)
    else:
        function = extend._extend_kernel
        config = tuning.extend_config(DTYPES[dtype], head_dim, 4096, 8192, page_size, amd=amd)
    constants = {
        "GROUP": 4,
        "HEAD_DIM": head_dim,
        "BLOCK_D": config.block_d,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "PAGED": kind == "extend",
        "PAGE_SIZE": page_size,
        "CAUSAL": True,
        "WINDOW": options.get("window", False),
        "CAP": options.get("cap", False),
        "SINKS": options.get("sinks", False),
        "LSE": kind == "decode",
    }
    constants = {name: value for name, value in constants.items() if name in function.arg_names}
    return resources(compile_kernel(function, target, dtype, constants, config.num_warps, config.num_stages), target)


def everything(target: str) -> dict[str, Any]:
    """Each kernel in the configurations that engines meet."""
    ragged = extend._NO_PAGES
    found = {
        f"{kind} {dtype} d{head_dim} page {page_size}": attention(kind, target, dtype, head_dim, page_size)
        for kind, dtype, head_dim, page_size in (
            ("extend", "bf16", 128, 16),
            ("extend", "bf16", 128, 64),
            ("extend", "bf16", 64, 16),
            ("extend", "fp32", 64, 16),
            ("prefill", "bf16", 128, ragged),
            ("decode", "bf16", 128, 16),
            ("decode", "bf16", 128, 64),
            ("decode", "fp32", 64, 16),
        )
    }
    found["extend with every option"] = attention("extend", target, "fp16", 64, 16, window=True, cap=True, sinks=True)
    merge = {"HEAD_DIM": 128, "BLOCK_D": 128, "BLOCK_S": 32, "SINKS": True, "LSE": True}
    found["merge"] = resources(compile_kernel(decode._merge_kernel, target, "bf16", merge, 4, 3), target)
    rope = {"HEAD_DIM": 128, "HALF": 64, "BLOCK": 64, "REST": 0, "HEADS": 16, "INTERLEAVED": False}
    found["apply_rope"] = resources(compile_kernel(apply_rope._apply_rope_kernel, target, "bf16", rope, 4, 3), target)
    write = {"ELEMENTS": 1024, "HEAD_DIM": 128, "BLOCK": 1024}
    found["write_kv"] = resources(compile_kernel(write_kv._write_kv_kernel, target, "bf16", write, 4, 3), target)
    return found


if __name__ == "__main__":
    print(json.dumps(everything(sys.argv[1])))
