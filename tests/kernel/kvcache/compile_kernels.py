"""Compiles the Triton kernels of the cache ops for GPUs that are not there, and prints what came out, as JSON.

Run as a program by `test_kvcache_compiled`, because the interpreter of the other tests replaces Triton's compiler.
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

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tokenspeed_kernel.ops.kvcache.triton.pages import _stream_pages_kernel, _transfer_pages_kernel
from tokenspeed_kernel.ops.kvcache.triton.rope_write import _rope_write_kv_kernel
from tokenspeed_kernel.ops.kvcache.triton.scaled import _write_scaled_kv_kernel
from tokenspeed_kernel.ops.mla.triton.rope_write import _rope_write_mla_kernel

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "sm_120": GPUTarget("cuda", 120, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
    "gfx950": GPUTarget("hip", "gfx950", 64),
}
ALIGNED = ("_ptr", "_token", "_head", "_page", "_offset")


def kernels(target: str) -> Iterator[tuple[str, Any, dict[str, str], dict[str, Any]]]:
    """Yield (name, kernel, types of the pointers, compile-time constants)."""
    for dtype in ("bf16", "fp16", "fp32"):
        for paged in (True, False):
            for step in (0, 1):
                pointers = {"k_ptr": dtype, "v_ptr": dtype, "k_cache_ptr": "u8", "v_cache_ptr": "u8", "slots_ptr": "i64"}
                pointers |= {"k_scale_ptr": "fp32", "v_scale_ptr": "fp32"}
                constants = {"ELEMENTS": 1024, "HEAD_DIM": 128, "BLOCK": 1024, "PAGED": paged}
                constants |= {"k_scale_step": 1} if step else {}
                yield f"scaled {dtype} {paged} {step}", _write_scaled_kv_kernel, pointers, constants
    for word in ("i64", "i32", "u8"):
        for by_pair in (False, True):
            pointers = {"src_ptr": word, "dst_ptr": word, "src_pages_ptr": "i64", "dst_pages_ptr": "i32"}
            constants = {"SRC_BY_PAIR": by_pair, "DST_BY_PAIR": False, "BLOCK": 2048}
            yield f"pages {word} {by_pair}", _transfer_pages_kernel, pointers, constants
        yield f"pages {word} by few programs", _stream_pages_kernel, pointers, {"BLOCK": 1024}

    yield from rotations(target)


def rotations(target: str) -> Iterator[tuple[str, Any, dict[str, str], dict[str, Any]]]:
    """The writes that rotate, the latent cache's too: chained where the target can, fp8 of the device or encoded."""
    lists = {"positions_ptr": "i64", "table_ptr": "fp32", "slots_ptr": "i64"}
    hopper = target == "sm_90"
    for interleaved in (False, True):
        common = {"INTERLEAVED": interleaved, "CHAINED": hopper, "position_step": 1, "slot_step": 1}
        for stored in ("bf16", "fp8e4nv" if hopper else "u8"):
            pointers = dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "q_out_ptr"), "bf16") | lists
            pointers |= {"k_cache_ptr": stored, "v_cache_ptr": stored, "k_scale_ptr": "fp32", "v_scale_ptr": "fp32"}
            constants = {
                "HEAD_DIM": 128,
                "HALF": 64,
                "BLOCK": 64,
                "BLOCK_D": 128,
                "REST": 0,
                "HEADS": 8,
                "SCALED": stored != "bf16",
            }
            yield f"rope write {stored} {interleaved}", _rope_write_kv_kernel, pointers, constants | common
        pointers = dict.fromkeys(("q_ptr", "k_ptr", "latent_ptr", "q_out_ptr", "kv_ptr"), "bf16") | lists
        constants = {"LATENT": 512, "HALF": 32, "BLOCK": 32, "BLOCK_L": 512, "HEADS": 16}
        yield f"rope write latent {interleaved}", _rope_write_mla_kernel, pointers, constants | common


def compile_kernel(target: str, function: Any, pointers: dict[str, str], constants: dict[str, Any]) -> Any:
    """Compile as a launch on usual strides would."""
    signature, constexprs, attributes = {}, {}, {}
    for place, name in enumerate(function.arg_names):
        if name in constants:
            signature[name], constexprs[(place,)] = "constexpr", constants[name]
            continue
        signature[name] = f"*{pointers[name]}" if name in pointers else "i32"
        if name.endswith(ALIGNED):
            attributes[(place,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=function, signature=signature, constexprs=constexprs, attrs=attributes)
    return triton.compile(source, target=TARGETS[target], options={"num_warps": 4})


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
    print(json.dumps({name: spills(compile_kernel(target, *rest), target) for name, *rest in kernels(target)}))


if __name__ == "__main__":
    main()
