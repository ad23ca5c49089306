"""Compile every Triton kernel of the family for devices that are not here; prints one line for each. Run by a test."""

from __future__ import annotations

import inspect
import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tokenspeed_kernel.ops.sampling.triton import argmax, log_probs, penalties, philox, sample, verify

TARGETS = {"sm_90": GPUTarget("cuda", 90, 32), "gfx950": GPUTarget("hip", "gfx950", 64)}
TYPES = {
    **dict.fromkeys(("uniform_ptr", "accept_uniform_ptr"), "*fp64"),
    **dict.fromkeys(("seeds_ptr", "counters_ptr"), "*i64"),
    **dict.fromkeys(("top_k_ptr", "row_offsets_ptr", "token_ids_ptr", "counts_ptr", "pending_ptr"), "*i32"),
    **dict.fromkeys(("ranks_ptr", "top_ids_ptr", "draft_ids_ptr", "number_ptr"), "*i32"),
}
KERNELS = (
    (argmax._argmax_kernel, "*i32", {"BLOCK": 4096}, 16),
    (sample._sample_kernel, "*i32", {"BLOCK": 4096}, 16),
    (sample._probs_kernel, "*fp32", {"BLOCK": 4096}, 16),
    (philox._philox_kernel, "*fp64", {"BLOCK": 128}, 4),
    (penalties._penalties_kernel, "", {"BLOCK": 1024, "HAS_PENDING": True}, 8),
    (penalties._bias_kernel, "", {"BLOCK": 1024}, 8),
    (log_probs._log_probs_kernel, "", {"BLOCK": 4096}, 16),
    (verify._reject_kernel, "*i32", {"BLOCK": 4096}, 16),
    (verify._cut_kernel, "*i32", {}, 1),
)


def argument_type(name: str, output: str, constants: dict[str, int]) -> str:
    """Triton's name for the type of one kernel argument."""
    if name in constants:
        return "constexpr"
    if name == "out_ptr":
        return output
    return TYPES.get(name, "*fp32" if name.endswith("_ptr") else "i32")


for target in sys.argv[1:]:
    for kernel, output, constants, num_warps in KERNELS:
        names = inspect.signature(kernel.fn).parameters
        signature = {name: argument_type(name, output, constants) for name in names}
        source = ASTSource(kernel, signature, constexprs=constants)
        compiled = triton.compile(source, target=TARGETS[target], options={"num_warps": num_warps})
        binary = compiled.asm.get("cubin") or compiled.asm.get("hsaco")
        print(target, kernel.fn.__name__, len(binary))
