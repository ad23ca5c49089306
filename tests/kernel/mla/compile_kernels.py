"""Compiles the latent and sparse attention kernels for a GPU that is not there, as their launchers would, and prints what came out.

Run as a program by the tests, because the interpreter of the other tests replaces Triton's compiler:

    python compile_kernels.py FAMILY TARGET

with `mla`, `dsa` or `attention` (the merging of states); prints {kernel: facts} as JSON.
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
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tokenspeed_kernel.ops.attention.triton.merge import _merge_states_kernel
from tokenspeed_kernel.ops.dsa.triton.indexer import (
    _NO_PAGES,
    _few_queries_kernel,
    _indexer_kernel,
    few_queries_config,
    indexer_config,
)
from tokenspeed_kernel.ops.dsa.triton.sparse import _sparse_kernel
from tokenspeed_kernel.ops.dsa.triton.topk import NOMINATING_WARPS, _choose_kernel, _nominate_kernel, _sample_kernel, choice_config
from tokenspeed_kernel.ops.mla.triton import tuning
from tokenspeed_kernel.ops.mla.triton.merge import _PARTS, _SLICE, _merge_parts_kernel
from tokenspeed_kernel.ops.mla.triton.paged import _paged_kernel
from tokenspeed_kernel.ops.mla.triton.prefill import _prefill_kernel
from tokenspeed_kernel.ops.mla.triton.tuning import DeviceFacts
from tokenspeed_kernel.ops.mla.triton.write import _write_kernel

TARGETS = {
    "sm_80": (GPUTarget("cuda", 80, 32), DeviceFacts(108, 166912, False, 8)),
    "sm_90": (GPUTarget("cuda", 90, 32), DeviceFacts(132, 232448, False, 9)),
    "sm_100": (GPUTarget("cuda", 100, 32), DeviceFacts(148, 232448, False, 10)),
    "sm_120": (GPUTarget("cuda", 120, 32), DeviceFacts(188, 101376, False, 12)),
    "gfx942": (GPUTarget("hip", "gfx942", 64), DeviceFacts(304, 65536, True)),
    "gfx950": (GPUTarget("hip", "gfx950", 64), DeviceFacts(256, 163840, True)),
}
"""Shared memory that a block may use. Source: CUDA programming guide, "Compute Capabilities"; AMD CDNA 3 and 4 ISA guides."""
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp8e4nv": torch.float8_e4m3fn}
DOTS = {"bf16": tl.bfloat16, "fp16": tl.float16, "fp32": tl.float32, "fp8e4nv": tl.float8e4nv}
POINTERS = {
    **dict.fromkeys(("lse_ptr", "parts_ptr", "part_lse_ptr", "weights_ptr", "scale_ptr", "scores_ptr"), "*fp32"),
    **dict.fromkeys(("pages_ptr", "cu_q_ptr", "cu_k_ptr", "lengths_ptr"), "*i32"),
}
# As Triton specialises an engine's call: pointers and the strides of heads, tokens and pages are multiples of 16.
NOT_ALIGNED = ("num_", "max_", "splits", "q_len", "pages_row", "lse_", "slot", "page_size", "weights_", "scale_", "cache_slots")

Kernels = Iterator[tuple[str, Any, dict[str, Any], int, int, dict[str, str]]]


def mla(facts: DeviceFacts) -> Kernels:
    """(name, kernel, compile-time constants, warps, stages, types of pointers) of the latent attention kernels."""
    for dtype, cache, rows, heads, page_size, ragged in (
        ("bf16", "", 16, 16, 64, False),
        ("bf16", "", 32, 16, 64, False),
        ("bf16", "", 64, 16, 64, False),
        ("bf16", "", 128, 128, 64, False),
        ("bf16", "", 16, 16, 16, False),
        ("fp16", "", 128, 128, 16, True),
        ("fp32", "", 64, 16, 64, False),
        ("bf16", "packed", 16, 16, 64, False),
        ("bf16", "packed", 128, 128, 64, False),
        ("fp32", "packed", 64, 16, 16, True),
    ):
        config = tuning.latent_config(DTYPES[dtype], 512, 64, rows, 8192, page_size, facts)
        config = tuning.packed_config(config, facts) if cache else config
        constants = {**_latent(config, heads), "PAGE_SIZE": page_size, "RAGGED": ragged, "CAUSAL": True}
        name = f"paged {dtype}{' packed' * bool(cache)} rows {rows} page {page_size}{' ragged' * ragged}"
        operands = _operands(dtype, "q_ptr", "kv_ptr", "out_ptr") | ({"kv_ptr": "*u8"} if cache else {})
        yield name, _paged_kernel, constants, config.num_warps, config.num_stages, operands
    for dtype, head_dim, v_head_dim, rows in (("bf16", 192, 128, 4096), ("bf16", 192, 128, 32), ("fp32", 192, 128, 4096)):
        tiles = tuning.prefill_config(DTYPES[dtype], head_dim, v_head_dim, rows, 8192, facts)
        constants = {
            "GROUP": 1,
            "HEAD_DIM": head_dim,
            "VALUE_DIM": v_head_dim,
            "BLOCK_D": tiles.block_d,
            "BLOCK_E": tiles.block_e,
            "BLOCK_V": tiles.block_v,
            "BLOCK_M": tiles.block_m,
            "BLOCK_N": tiles.block_n,
            "CAUSAL": True,
            "LSE": True,
        }
        operands = _operands(dtype, "q_ptr", "k_ptr", "v_ptr", "out_ptr")
        yield f"prefill {dtype} rows {rows}", _prefill_kernel, constants, tiles.num_warps, tiles.num_stages, operands
    merge = {"HEADS": 16, "LATENT": 512, "SLICE": _SLICE, "PARTS": _PARTS, "LSE": True}
    yield "merge parts", _merge_parts_kernel, merge, 4, 3, _operands("bf16", "out_ptr")
    write = {"LATENT": 512, "ROPE": 64, "BLOCK_L": 512, "BLOCK_R": 64}
    operands = {**_operands("bf16", "latent_ptr", "rope_ptr", "kv_ptr"), "slots_ptr": "*i64"}
    yield "write", _write_kernel, write, 2, 3, operands
    yield "write packed", _write_kernel, write, 2, 3, {**operands, "kv_ptr": "*u8"}


def dsa(facts: DeviceFacts) -> Kernels:
    """The sparse attention kernels."""
    for dtype, heads in (("bf16", 128), ("bf16", 64), ("fp16", 16), ("fp32", 128)):
        config = tuning.latent_config(DTYPES[dtype], 512, 64, heads, 2048, 1, facts)
        operands = {**_operands(dtype, "q_ptr", "kv_ptr", "out_ptr"), "slots_ptr": "*i32"}
        constants = _latent(config, heads)
        yield f"sparse {dtype} heads {heads}", _sparse_kernel, constants, config.num_warps, config.num_stages, operands
    indexers = [("bf16", "bf16", True), ("fp16", "fp16", False), ("fp32", "fp32", True), ("bf16", "fp8e4nv", True)]
    if facts.major == 9:
        indexers.append(("fp8e4nv", "fp8e4nv", False))
    for dtype, keys, paged in indexers:
        if keys == "fp8e4nv" and (facts.major == 8 or facts.shared_bytes == 65536):
            continue  # no conversion from e4m3 on sm_80 and gfx942: the spec says so
        tiles = indexer_config(DTYPES[dtype], 64, 128, 8192, keys == "fp8e4nv", facts.major)
        warps, stages = tiles.pop("num_warps"), tiles.pop("num_stages")
        pages = {"PAGED": paged, "PAGE_SIZE": 64 if paged else _NO_PAGES}
        constants = {"HEADS": 64, "DIM": 128, "CAUSAL": True, "DOT": DOTS[dtype], "SCALED": keys == "fp8e4nv", **pages, **tiles}
        operands = {**_operands(keys, "q_ptr", "k_ptr"), "out_ptr": "*fp32"}
        products = " products" if dtype == "fp8e4nv" else ""
        yield f"indexer {keys}{products}", _indexer_kernel, constants, warps, stages, operands
        tiles = few_queries_config(tiles, 1, 8192, 64, facts.processors) or {}
        if tiles and tiles["CHUNK"] >= 128:
            warps, stages = tiles.pop("num_warps"), tiles.pop("num_stages")
            constants = {name: value for name, value in constants.items() if name != "BLOCK_Q"} | tiles
            yield f"indexer of few {keys}{products}", _few_queries_kernel, constants, warps, stages, operands
    operands = dict.fromkeys(("out_ptr", "least_ptr", "keys_ptr", "positions_ptr", "counts_ptr"), "*i32")
    for paged, num_keys, k in ((False, 8192, 2048), (True, 65536, 2048), (True, 65536, 20000)):
        choice = choice_config(num_keys, k)
        constants = {"PAGED": paged, "PARTS": choice.parts, "CAPACITY": choice.capacity, "BLOCK": choice.block}
        yield f"choose {k} of {num_keys}", _choose_kernel, constants, choice.num_warps, 3, operands
        if choice.parts:
            constants = {"PARTS": choice.parts, "BLOCK": choice.block}
            yield f"sample {k} of {num_keys}", _sample_kernel, {"SAMPLE": choice.sample}, NOMINATING_WARPS, 3, operands
            yield f"nominate {k} of {num_keys}", _nominate_kernel, constants, NOMINATING_WARPS, 3, operands


def attention(facts: DeviceFacts) -> Kernels:
    """The merging of states."""
    for states, head_dim in ((2, 128), (8, 512)):
        constants = {"STATES": states, "HEADS": 32, "HEAD_DIM": head_dim, "BLOCK_D": head_dim, "BLOCK_ROWS": 2048 // head_dim}
        constants |= {"CHAINED": False}
        yield f"merge {states} states", _merge_states_kernel, constants, 4, 3, _operands("bf16", "out_ptr")


def _latent(config: tuning.LatentConfig, heads: int) -> dict[str, Any]:
    tiles = {name.upper(): getattr(config, name) for name in ("block_l", "block_r", "block_v", "chunk", "block_m", "block_n")}
    return {"HEADS": heads, "LATENT": 512, "ROPE": 64, "LSE": True, **tiles}


def _operands(dtype: str, *names: str) -> dict[str, str]:
    return dict.fromkeys(names, f"*{dtype}")


def compile_kernel(function: Any, target: str, constants: dict[str, Any], warps: int, stages: int, pointers: dict[str, str]) -> Any:
    """Compile one kernel as its launcher would have it compiled."""
    signature: dict[str, Any] = {}
    constexprs: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}
    aligned = [["tt.divisibility", 16]]
    for place, name in enumerate(function.arg_names):
        if name in constants:
            signature[name], constexprs[(place,)] = "constexpr", constants[name]
        elif name.startswith(("outs_", "lses_")):  # one for each state
            kind = "i32" if not name.endswith("_ptr") else "*bf16" if name.startswith("outs_") else "*fp32"
            signature[name] = (kind,) * constants["STATES"]
            for state in range(constants["STATES"] if name != "lses_head" else 0):
                attributes[(place, state)] = aligned
        elif name.endswith("_ptr"):
            signature[name] = {**POINTERS, **pointers}[name]
            attributes[(place,)] = aligned
        else:
            signature[name] = "fp32" if name == "scale" else "i32"
            if name != "k" and not name.startswith(NOT_ALIGNED):
                attributes[(place,)] = aligned
    source = ASTSource(fn=function, signature=signature, constexprs=constexprs, attrs=attributes)
    return triton.compile(source, target=TARGETS[target][0], options={"num_warps": warps, "num_stages": stages})


def resources(kernel: Any, target: str) -> dict[str, Any]:
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
        matrix = next((name for name in ("wgmma.mma", "tcgen05.mma", "mma.sync") if name in ptx), "")
        return {"registers": int(found[1]), "spills": int(found[2]), "shared": shared, "matrix": matrix, "tf32": "tf32" in ptx}
    text = kernel.asm["amdgcn"]
    counts = {}
    for name in ("vgpr_count", "vgpr_spill_count"):
        found = re.search(rf"\.{name}:\s+(\d+)", text)
        assert found, name
        counts[name] = int(found[1])
    matrix = "v_mfma" if "v_mfma" in text else ""
    used = {"registers": counts["vgpr_count"], "spills": counts["vgpr_spill_count"]}
    return {**used, "shared": shared, "matrix": matrix, "tf32": "xf32" in text}


def main(family: str, target: str) -> None:
    """Compile a family and print the facts."""
    found = {}
    kernels = {"mla": mla, "dsa": dsa, "attention": attention}[family](TARGETS[target][1])
    for name, function, constants, warps, stages, pointers in kernels:
        try:
            found[name] = resources(compile_kernel(function, target, constants, warps, stages, pointers), target)
        except Exception as error:
            raise RuntimeError(f"{name} for {target}: {error}") from error
        print(name, found[name], file=sys.stderr, flush=True)
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
