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

from tokenspeed_kernel.ops.mla.hopper.decode import SCORE_REGISTERS
from tokenspeed_kernel.ops.mla.hopper.merge import latent_merge_kernel
from tokenspeed_kernel.ops.mla.hopper.planner import FEW_ROWS, MERGE_WARPS, LatentPlan, plan_latent
from tokenspeed_kernel.ops.mla.hopper.stream import latent_stream_kernel
from tokenspeed_kernel.ops.mla.hopper.wide import latent_wide_kernel

PROCESSORS = 132
LAYOUT = repr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
TYPES = {
    **dict.fromkeys(("q_ptr", "out_ptr", "parts_ptr"), "*bf16"),
    **dict.fromkeys(("lse_ptr", "stats_ptr"), "*fp32"),
    **dict.fromkeys(("pages_ptr", "lengths_ptr", "notes_ptr"), "*i32"),
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
        "old": triton.__version__.startswith("3.6."),
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


def merge_constants(plan: LatentPlan, *, lse: bool) -> dict[str, Any]:
    """Compile-time constants of the kernel that merges."""
    constants = {"HEADS": 16, "ROWS": plan.rows, "TAKEN": plan.merge_rows, "PARTS": plan.merge_parts, "SLICE": plan.merge_slice}
    return {**constants, "LSE": lse}


if __name__ == "__main__":
    report = {}
    for name, num_reqs, query_rows, max_tiles, lse in (
        ("b1 16 rows", 1, 16, 1024, False),
        ("b16 16 rows", 16, 16, 16, True),
        ("b128 16 rows", 128, 16, 128, True),
        ("b1 64 rows", 1, 64, 1024, False),
        ("b64 512 rows", 64, 512, 128, True),
    ):
        plan = plan_latent(num_reqs, query_rows, max_tiles, PROCESSORS)
        reqs = {1: 1, 16: 64, 64: 64, 128: 512}[num_reqs]
        common = {"REQS": reqs, "HEADS": 16, "CAUSAL": True, "LSE": lse, "BY_REQUEST": plan.by_request}
        if plan.rows == FEW_ROWS:
            report[f"stream {name}"] = compile_kernel(latent_stream_kernel, {**common, "ROWS": plan.rows}, 4)
        else:
            wide = {**common, "SCORE_REGS": SCORE_REGISTERS}
            report[f"wide {name}"] = compile_kernel(latent_wide_kernel, wide, 8)
        report[f"merge {name}"] = compile_kernel(latent_merge_kernel, merge_constants(plan, lse=lse), MERGE_WARPS)
    print(json.dumps(report))
