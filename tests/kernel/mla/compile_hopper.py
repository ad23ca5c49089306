"""Compiles the Hopper decode kernels for sm_90a as their launcher has them compiled, and prints what came out, as JSON.

Run as a program by `test_hopper_compiled`, because the interpreter of the other tests replaces Triton's compiler.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import tempfile
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from tokenspeed_kernel.ops.mla.hopper.merge import latent_merge_kernel
from tokenspeed_kernel.ops.mla.hopper.planner import MERGE_WARPS, LatentPlan, plan_latent
from tokenspeed_kernel.ops.mla.hopper.stream import latent_stream_kernel

PROCESSORS = 132
LAYOUT = repr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
TYPES = {
    **dict.fromkeys(("q_ptr", "out_ptr"), "*bf16"),
    **dict.fromkeys(("lse_ptr", "parts_ptr", "stats_ptr"), "*fp32"),
    **dict.fromkeys(("pages_ptr", "lengths_ptr"), "*i32"),
    "latent_desc": f"tensordesc<bf16[64, 512],{LAYOUT}>",
    "rope_desc": f"tensordesc<bf16[64, 64],{LAYOUT}>",
    "scale": "fp32",
}
# As Triton specialises an engine's call: pointers and the strides of q and out are multiples of 16.
ALIGNED = ("q_req", "q_token", "q_head", "out_req", "out_token", "out_head")


def compile_kernel(kernel: Any, constants: dict[str, Any], num_warps: int) -> dict[str, Any]:
    """Compile one form and read its machine code."""
    signature, values, attributes = {}, {}, {}
    for place, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name], values[(place,)] = "constexpr", constants[name]
            continue
        signature[name] = TYPES.get(name, "i32")
        if name.endswith("_ptr") or name in ALIGNED:
            attributes[(place,)] = [["tt.divisibility", 16]]
    source = GluonASTSource(fn=kernel, signature=signature, constexprs=values, attrs=attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": num_warps})
    tool = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", "cuobjdump")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        printed = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", printed)
    assert found, printed
    machine = compiled.asm["sass"].splitlines()
    products = [place for place, line in enumerate(machine) if "HGMMA" in line]
    return {
        "registers": int(found[1]),
        "stack": int(found[2]),
        "shared": compiled.metadata.shared,
        "products": dict(_counts(re.findall(r"wgmma\.mma_async\S*?(m64n\d+k16)", compiled.asm["ptx"]))),
        "bulk_copies": compiled.asm["ptx"].count("cp.async.bulk.tensor"),
        "register_exchange": compiled.asm["ptx"].count("setmaxnreg"),
        # Products wait in groups: one wait for each would mean that the compiler serialised them.
        "waits": sum("WARPGROUP.DEPBAR" in line for line in machine[products[0] : products[-1] + 40]) if products else 0,
        "stores_to_stack_in_loop": sum("STL" in line for line in machine[products[0] : products[-1]]) if products else 0,
    }


def _counts(found: list[str]) -> dict[str, int]:
    return {name: found.count(name) for name in sorted(set(found))}


def stream_constants(plan: LatentPlan, num_heads: int, *, reqs: int, lse: bool) -> dict[str, Any]:
    """Compile-time constants of the kernel that attends."""
    return {"REQS": reqs, "HEADS": num_heads, "ROWS": plan.rows, "SWAP": plan.swap, "CAUSAL": True, "LSE": lse}


def merge_constants(plan: LatentPlan, num_heads: int, *, reqs: int, lse: bool) -> dict[str, Any]:
    """Compile-time constants of the kernel that merges."""
    constants = {"REQS": reqs, "HEADS": num_heads, "ROWS": plan.rows, "ONE_ROW": plan.one_row, "PARTS": plan.parts}
    return {**constants, "SLICE": plan.merge_slice, "LSE": lse}


if __name__ == "__main__":
    report = {}
    for name, num_reqs, query_rows, max_tiles, lse in (
        ("b1 16 rows", 1, 16, 1024, False),
        ("b1 64 rows", 1, 64, 1024, False),
        ("b4 64 rows", 4, 64, 1024, True),
        ("b128 16 rows", 128, 16, 128, True),
    ):
        plan = plan_latent(num_reqs, query_rows, max_tiles, PROCESSORS)
        reqs = {1: 1, 4: 8, 128: 512}[num_reqs]
        stream = stream_constants(plan, 16, reqs=reqs, lse=lse)
        report[f"stream {name}"] = compile_kernel(latent_stream_kernel, stream, plan.num_warps)
        merge = merge_constants(plan, 16, reqs=reqs, lse=lse)
        report[f"merge {name}"] = compile_kernel(latent_merge_kernel, merge, MERGE_WARPS)
    print(json.dumps(report))
