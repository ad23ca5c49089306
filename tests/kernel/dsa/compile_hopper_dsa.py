"""Compiles the Hopper kernel of sparse attention for sm_90a as its launcher has it compiled, and prints what came out, as JSON.

Run as a program by `test_dsa_hopper_compiled`, because the interpreter of the other tests replaces Triton's compiler.
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
from triton.experimental.gluon._runtime import GluonASTSource

from tokenspeed_kernel.ops.dsa.hopper.planner import plan_sparse
from tokenspeed_kernel.ops.dsa.hopper.stream import sparse_stream_kernel

PROCESSORS = 132
TYPES = {"q_ptr": "*bf16", "kv_ptr": "*bf16", "lse_ptr": "*fp32", "slots_ptr": "*i32", "scale": "fp32"}
# As Triton specialises an engine's call: pointers, and strides of rows, are multiples of 16.
ALIGNED = (
    "q_req",
    "q_token",
    "q_head",
    "kv_page",
    "kv_token",
    "slots_req",
    "slots_token",
    "out_req",
    "out_token",
    "out_head",
    "out_split",
)


def compile_stream(num_tokens: int, num_heads: int, *, flat: bool) -> dict[str, Any]:
    """Compile what that many tokens with 2048 slots each take, and read its machine code."""
    plan = plan_sparse(num_tokens, num_heads, 2048, PROCESSORS)
    constants = {
        "HEADS": num_heads, "KEYS": plan.keys, "STAGES": plan.stages, "PARTS": plan.parts, "FLAT": flat, "LSE": plan.splits > 1,
        "GATHER_REGISTERS": plan.gather_registers, "WEIGH_REGISTERS": plan.weigh_registers,
    }  # fmt: skip
    types = {**TYPES, "out_ptr": "*fp32" if plan.splits > 1 else "*bf16"}
    signature, values, attributes = {}, {}, {}
    for place, name in enumerate(sparse_stream_kernel.arg_names):
        if name in constants:
            signature[name], values[(place,)] = "constexpr", constants[name]
            continue
        signature[name] = types.get(name, "i32")
        if name.endswith("_ptr") or name in ALIGNED:
            attributes[(place,)] = [["tt.divisibility", 16]]
    source = GluonASTSource(fn=sparse_stream_kernel, signature=signature, constexprs=values, attrs=attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8})
    tool = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", "cuobjdump")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        printed = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", printed)
    assert found, printed
    ptx, machine = compiled.asm["ptx"], compiled.asm["sass"].splitlines()
    products = re.findall(r"wgmma\.mma_async\S*?(m64n\d+k16)", ptx)
    return {
        "keys": plan.keys,
        "flat": flat,
        "registers": int(found[1]),
        "stack": int(found[2]),
        "shared": compiled.metadata.shared,
        "products": {name: products.count(name) for name in sorted(set(products))},
        "copies": ptx.count("cp.async.cg.shared.global"),
        "narrow_copies": ptx.count("cp.async.ca.shared.global"),
        "register_exchange": ptx.count("setmaxnreg"),
        "waits": sum("WARPGROUP.DEPBAR" in line for line in machine),
    }


if __name__ == "__main__":
    report = {}
    for tokens, heads, pool in ((1024, 128, True), (1024, 64, False), (1, 128, True), (32, 64, True)):
        report[f"{tokens} tokens, {heads} heads"] = compile_stream(tokens, heads, flat=pool)
    print(json.dumps(report))
