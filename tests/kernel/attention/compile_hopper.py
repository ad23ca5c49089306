"""Compiles the Hopper decode kernel for sm_90a as its launcher has it compiled, and prints what the machine code uses, as JSON.

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
from triton.compiler import ASTSource

from tokenspeed_kernel.ops.attention.hopper.planner import plan_stream
from tokenspeed_kernel.ops.attention.hopper.stream import decode_stream_kernel

PROCESSORS = 132
POINTERS = {
    **dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "out_ptr"), "*bf16"),
    **dict.fromkeys(("lse_ptr", "sinks_ptr", "parts_ptr", "stats_ptr"), "*fp32"),
    **dict.fromkeys(("pages_ptr", "lengths_ptr", "arrivals_ptr"), "*i32"),
}
# As Triton specialises an engine's call: pointers and the strides of heads, tokens and pages are multiples of 16.
NOT_ALIGNED = ("num_", "max_", "min_", "window", "pages_row", "scale", "cap")


def compile_stream(
    num_reqs: int, num_heads: int, num_kv_heads: int, head_dim: int, page_size: int, options: tuple[str, ...]
) -> dict[str, Any]:
    """Compile one form and read its machine code."""
    plan = plan_stream(num_reqs, num_heads, num_kv_heads, head_dim, PROCESSORS)
    constants: dict[str, Any] = {
        "REQS": 1 if num_reqs == 1 else 64, "KV_HEADS": num_kv_heads, "GROUP": num_heads // num_kv_heads, "HEAD_DIM": head_dim,
        "PAGE_SIZE": page_size, "HEADS": plan.heads, "CHUNKS": plan.chunks, "BLOCK_M": plan.block_m, "BLOCK_N": plan.block_n,
        "ROWS": plan.rows, "PARTS": plan.parts, "WIDE": False, "CHAINED": True,
        **{name: name in options for name in ("WINDOW", "CAP", "SINKS", "LSE")},
    }  # fmt: skip
    signature, values, attributes = {}, {}, {}
    for place, name in enumerate(decode_stream_kernel.arg_names):
        if name in constants:
            signature[name], values[(place,)] = "constexpr", constants[name]
            continue
        signature[name] = POINTERS.get(name, "fp32" if name in ("scale", "cap") else "i32")
        if name in POINTERS or not name.startswith(NOT_ALIGNED):
            attributes[(place,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=decode_stream_kernel, signature=signature, constexprs=values, attrs=attributes)
    options_of_compiler = {"num_warps": plan.num_warps, "num_stages": plan.num_stages}
    kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options_of_compiler)
    tool = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", "cuobjdump")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        printed = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", printed)
    assert found, printed
    text = kernel.asm["ptx"]
    return {
        "resident": -(-plan.programs // PROCESSORS),
        "threads": 32 * plan.num_warps,
        "registers": int(found[1]),
        "stack": int(found[2]),
        "shared": kernel.metadata.shared,
        "matrix": text.count("mma.sync.aligned.m16n8k16"),
        "wide_async_copies": len(re.findall(r"cp\.async\.cg\.shared\.global \[.*?\], \[.*?\], (?:0x10|16)", text)),
        "narrow_async_copies": text.count("cp.async.ca"),
        "barriers_in_loop": _count_beside(text, "mma.sync", r"\b(bar|barrier)\.sync"),
        "spills_in_loop": _count_beside(kernel.asm["sass"], "HMMA", r"\b(LDL|STL)\b"),
    }


def _count_beside(text: str, product: str, pattern: str) -> int:
    """Lines with a pattern in the loop over tiles: from the first matrix product to the branch back behind the last."""
    lines = text.splitlines()
    products = [place for place, line in enumerate(lines) if product in line]
    last = next(place for place in range(products[-1], len(lines)) if re.search(r"\b(bra|BRA)\b", lines[place]))
    return sum(bool(re.search(pattern, line)) for line in lines[products[0] : last])


FORMS = {
    "b1 32/8 d128 page 64": (1, 32, 8, 128, 64, ()),
    "b64 32/8 d128 page 16": (64, 32, 8, 128, 16, ()),
    "b128 32/8 d128 page 64": (128, 32, 8, 128, 64, ()),
    "b64 64/8 d64 page 64 with sinks, window, LSE": (64, 64, 8, 64, 64, ("WINDOW", "SINKS", "LSE")),
    "b1 64/8 d64 page 16 with cap": (1, 64, 8, 64, 16, ("CAP",)),
    "b16 9/3 d64 page 16": (16, 9, 3, 64, 16, ()),
}

if __name__ == "__main__":
    print(json.dumps({name: compile_stream(*form) for name, form in FORMS.items()}))
