"""Compiles the Triton kernels for GPUs that are not there, and prints what the machine code uses, as JSON.

Run as a program by `test_linear_attention_compiled`, because the interpreter of the other tests replaces Triton's compiler.
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

from tokenspeed_kernel.ops.linear_attention.triton import causal_conv1d, gdn, mamba2

TARGETS = {
    "sm_80": (GPUTarget("cuda", 80, 32), 166912),
    "sm_90": (GPUTarget("cuda", 90, 32), 232448),
    "sm_100": (GPUTarget("cuda", 100, 32), 232448),
    "sm_120": (GPUTarget("cuda", 120, 32), 101376),
    "gfx942": (GPUTarget("hip", "gfx942", 64), 65536),
    "gfx950": (GPUTarget("hip", "gfx950", 64), 163840),
}
"""Target, and the shared memory that a block may use. Source: CUDA programming guide; AMD CDNA 3 and 4 ISA guides."""
BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
FLOAT32 = ("g_ptr", "beta_ptr", "states_ptr", "a_ptr", "d_ptr", "dt_bias_ptr")
INT32 = ("slots_ptr", "bounds_ptr")
# As Triton specialises an engine's call: counts and strides of 1 are not multiples of 16.
NOT_ALIGNED = ("num_reqs", "num_slots", "q_len", "slot_step", "known_step", "g_head", "beta_head", "dt_head", "lowest", "highest",
               "scale", "a_step", "d_step", "dt_bias_step", "state_place", "state_channel", "weight_", "bias_step")  # fmt: skip
FLOATS = ("scale", "lowest", "highest")


def launches(shared: int, dtype: str) -> Iterator[tuple[str, Any, dict[str, Any], int, int]]:
    """Yield (name, kernel, compile-time constants, warps, stages) as the launchers choose them for usual heads."""
    size = BYTES[dtype]
    for key_dim, value_dim in ((128, 128), (64, 64), (256, 128)):
        chunk, block_v, warps, stages = gdn.scan_config(size, key_dim, value_dim, shared)
        shape = {"GROUP": 2, "KEY_DIM": key_dim, "VALUE_DIM": value_dim, "BLOCK_K": key_dim, "BLOCK_V": block_v, "L2": True}
        name = f"{key_dim}x{value_dim}"
        yield f"gdn solve {name}", gdn._solve_chunks_kernel, {**shape, "CHUNK": chunk, "BLOCK_R": 16}, warps, 1
        yield f"gdn scan {name}", gdn._scan_chunks_kernel, {**shape, "CHUNK": chunk, "KNOWN": True}, warps, stages
        yield f"gdn decode {name}", gdn._gdn_decode_kernel, {**shape, "BLOCK_V": min(value_dim, 4096 // key_dim)}, 4, 3
    options = {"SKIP": True, "GATE": True, "BIAS": True, "SOFTPLUS": True, "LIMIT": True}
    for head_dim, state_dim in ((64, 128), (64, 64)):
        chunk, block_p, warps, stages = mamba2.mamba2_config(size, head_dim, state_dim, shared)
        shape = {"GROUP": 8, "HEAD_DIM": head_dim, "STATE_DIM": state_dim, "BLOCK_N": state_dim, **options}
        name = f"{head_dim}x{state_dim}"
        constants = {**shape, "BLOCK_P": block_p, "CHUNK": chunk, "KNOWN": True}
        yield f"mamba2 prefill {name}", mamba2._mamba2_prefill_kernel, constants, warps, stages
        update = {**shape, "BLOCK_P": min(head_dim, 4096 // state_dim)}
        yield f"mamba2 update {name}", mamba2._selective_state_update_kernel, update, 4, 3
    for ragged, block_t in ((True, 16), (False, 1)):
        constants = {"WIDTH": 4, "RAGGED": ragged, "KNOWN": ragged, "BIAS": True, "SILU": True, "BLOCK_T": block_t, "BLOCK_C": 128,
                     "BLOCK_R": 16}  # fmt: skip
        yield f"conv {'prefill' if ragged else 'update'}", causal_conv1d._causal_conv1d_kernel, constants, 4, 3


def compile_kernel(function: Any, target: GPUTarget, dtype: str, constants: dict[str, Any], warps: int, stages: int) -> Any:
    """Compile one kernel as its launcher would have it compiled."""
    signature, constexprs, attributes = {}, {}, {}
    for place, name in enumerate(function.arg_names):
        if name in constants:
            signature[name], constexprs[(place,)] = "constexpr", constants[name]
        elif name.endswith("_ptr"):
            kind = "i32" if name in INT32 else "u8" if name == "known_ptr" else "fp32" if name in FLOAT32 else dtype
            signature[name] = f"*{kind}"
        else:
            signature[name] = "fp32" if name in FLOATS else "i32"
        if name not in constants and not name.startswith(NOT_ALIGNED):
            attributes[(place,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=function, signature=signature, constexprs=constexprs, attrs=attributes)
    return triton.compile(source, target=target, options={"num_warps": warps, "num_stages": stages})


def facts(kernel: Any, target: str) -> dict[str, Any]:
    """Spilled bytes or registers, shared memory, and whether matrix instructions are there."""
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
        return {"registers": int(found[1]), "spills": int(found[2]), "shared": shared, "matrix": matrix, "tf32": "tf32" in ptx}
    text = kernel.asm["amdgcn"]
    counts = {name: int(re.search(rf"\.{name}:\s+(\d+)", text)[1]) for name in ("vgpr_count", "vgpr_spill_count")}  # type: ignore[index]
    used = {"registers": counts["vgpr_count"], "spills": counts["vgpr_spill_count"], "shared": shared}
    return {**used, "matrix": "v_mfma" in text, "tf32": "xf32" in text}


def main() -> None:
    """Arguments: target, dtypes; prints {dtype: {kernel: facts}}."""
    target, shared = TARGETS[sys.argv[1]]
    result: dict[str, Any] = {}
    for dtype in sys.argv[2:]:
        for name, function, constants, warps, stages in launches(shared, dtype):
            kernel = compile_kernel(function, target, dtype, constants, warps, stages)
            result.setdefault(dtype, {})[name] = facts(kernel, sys.argv[1])
    print(json.dumps(result))


if __name__ == "__main__":
    main()
