"""Compiles the Triton kernels for quantized operands and stacks for GPUs that are not there, and prints what came out, as JSON.

Run as a program by `test_scaled_compiled`, because the interpreter of the other tests replaces Triton's compiler.
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

from tokenspeed_kernel import Format, QuantizedTensor
from tokenspeed_kernel.ops.embedding.triton.embedding import _embedding_scaled_kernel
from tokenspeed_kernel.ops.gemm.triton.few_rows import _add_parts_kernel, _few_rows_kernel, choose_few_rows_tiles
from tokenspeed_kernel.ops.gemm.triton.grouped import _batched_kernel, _contiguous_kernel
from tokenspeed_kernel.ops.gemm.triton.mm_scaled import _mm_scaled_kernel
from tokenspeed_kernel.ops.gemm.triton.product import choose_tiles, product_constants
from tokenspeed_kernel.ops.quantization.triton.dequantize import _dequantize_kernel
from tokenspeed_kernel.ops.quantization.triton.quantize import _blocks_kernel, _largest_kernel, _matrix_scale_kernel, _row_kernel
from tokenspeed_kernel.ops.quantization.triton.tile import Operand, operand
from tokenspeed_kernel.quantized import data_shape, scale_shape

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "sm_120": GPUTarget("cuda", 120, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
    "gfx950": GPUTarget("hip", "gfx950", 64),
}
NAMES = {
    torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.uint8: "u8", torch.float8_e4m3fn: "fp8e4nv",
    torch.float8_e5m2: "fp8e5", torch.int32: "i32",
}  # fmt: skip
# Of 16, as Triton finds them to be when it is launched.
MULTIPLES = ("x_row", "w_row", "out_row", "x_matrix", "w_matrix", "in_features", "out_features", "depth_each", "out_split")
FP8_PAIRS = (("fp8_e4m3@token", "fp8_e4m3@channel"), ("fp8_e4m3@block_1x128", "fp8_e4m3@block_128x128"))
PAIRS = (
    *FP8_PAIRS,
    ("fp8_e4m3@tensor", "fp8_e4m3@tensor"),
    ("mxfp8_e4m3@block_32", "mxfp4@block_32"),
    ("nvfp4@block_16", "nvfp4@block_16"),
    *(
        ("bf16", weight)
        for weight in (
            "bf16", "fp8_e4m3@block_128x128", "fp8_e5m2@channel", "mxfp8_e4m3@block_32", "mxfp4@block_32", "nvfp4@block_16",
            "mxint4@block_32", "int4@group_128", "int4@group_32", "uint4@group_64", "gguf_q4_0@inline", "gguf_q4_1@inline",
            "gguf_q8_0@inline", "gguf_q4_k@inline", "gguf_q6_k@inline",
        )
    ),
    ("fp16", "int4@group_128"),
    ("fp32", "gguf_q4_1@inline"),
)  # fmt: skip


def empty(text: str, *shape: int) -> torch.Tensor | QuantizedTensor:
    """An operand without memory."""
    fmt = Format.parse(text)
    if fmt not in Format.scaled():
        return torch.empty(shape, dtype=fmt.storage, device="meta")
    scales = scale_shape(fmt, shape)
    dtype = {"nvfp4": torch.float8_e4m3fn}.get(fmt.logical, torch.uint8 if fmt.logical.startswith("mxfp") else torch.float32)
    return QuantizedTensor(
        torch.empty(data_shape(fmt, shape), dtype=fmt.storage, device="meta"),
        fmt,
        shape,
        None if scales is None else torch.empty(scales, dtype=dtype, device="meta"),
        torch.empty(shape[:-2], device="meta") if fmt.logical == "nvfp4" else None,
        torch.empty(scales, dtype=torch.uint8, device="meta") if fmt.logical == "uint4" and scales else None,
    )


def parts_of(tensor: torch.Tensor | QuantizedTensor, native: bool) -> Operand:
    """Taken apart as the launcher does on a device that multiplies fp8 (`native`), or not."""
    parts = operand(tensor)
    if not native or not isinstance(tensor, QuantizedTensor):
        return parts
    return parts._replace(tensors=(tensor.data, *parts.tensors[1:]), constants=("fp8", *parts.constants[1:]))


def launches(target: str, pairs: tuple[tuple[str, str], ...], rows: tuple[int, ...]) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """Yield (name, kernel, arguments for `compile_kernel`)."""
    amd = target.startswith("gfx")
    for x_text, weight_text in pairs:
        native = (x_text, weight_text) in FP8_PAIRS and target not in ("sm_80", "gfx942")
        for num_rows in rows:
            for name, kernel, extra in (
                ("mm", _mm_scaled_kernel, {"HAS_BIAS": True, "GROUP": 8}),
                ("mm few", _few_rows_kernel, {"HAS_BIAS": True}),
                ("masked", _batched_kernel, {"MASKED": True}),
                ("contiguous", _contiguous_kernel, {"BY_IDS": False, "EXPERTS": 128}),
            ):
                if name == "mm few" and num_rows > 16:
                    continue
                if name[:2] != "mm" and weight_text not in ("bf16", "fp8_e4m3@block_128x128", "mxfp4@block_32"):
                    continue
                lead = () if name[:2] == "mm" else (8,)
                x = empty(x_text, *(lead if name == "masked" else ()), num_rows, 4096)
                weight = empty(weight_text, *lead, 4096, 4096)
                left, right = parts_of(x, native), parts_of(weight, native)
                plain = x.dtype if isinstance(x, torch.Tensor) else None
                wide = plain is torch.float32
                tiles = choose_tiles(num_rows, left, right, wide=wide, amd=amd)
                tiles = choose_few_rows_tiles(right, wide=wide, amd=amd) if name == "mm few" else tiles
                constants = {**product_constants(left, right, plain, tiles), **extra}
                pointers = {
                    f"{side}_{part}ptr": NAMES[tensor.dtype]
                    for side, parts in (("x", left), ("w", right))
                    for part, tensor in zip(("", "scale_", "zero_", "global_"), parts.tensors, strict=True)
                }
                label = f"{name} {x_text} {weight_text} {num_rows} rows"
                options = {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages}
                yield label, kernel, {"constants": constants, "pointers": pointers, "options": options}


def quantization_launches(*, few: bool) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """As `launches`, for `dequantize` and `quantize`."""
    options = {"num_warps": 4, "num_stages": 3}
    for text in ("nvfp4@block_16",) if few else ("nvfp4@block_16", "gguf_q6_k@inline", "fp8_e4m3@block_128x128"):
        parts = operand(empty(text, 64, 4096))
        kind, how, block_rows, block_cols, has_global = parts.constants
        constants = {
            "KIND": kind, "SCALE": how, "BLOCK_ROWS": block_rows, "BLOCK_COLS": block_cols, "GLOBAL": has_global,
            "ROWS": 4, "DEPTH": 256,
        }  # fmt: skip
        names = ("data_ptr", "scale_ptr", "zero_ptr", "global_ptr")
        pointers = {name: NAMES[tensor.dtype] for name, tensor in zip(names, parts.tensors, strict=True)}
        yield f"dequantize {text}", _dequantize_kernel, {"constants": constants, "pointers": pointers, "options": options}
        look_up = {name: value for name, value in constants.items() if name not in ("ROWS", "DEPTH")}
        arguments = {"constants": {**look_up, "BLOCK": 512}, "pointers": {**pointers, "ids_ptr": "i64"}, "options": options}
        yield f"embedding {text}", _embedding_scaled_kernel, arguments
    kinds = (
        ("e4m3", "float", 448.0, 1, 128, "fp32", False), ("e5m2", "float", 57344.0, 128, 128, "fp32", False),
        ("e4m3", "e8m0", 448.0, 1, 32, "u8", False), ("e2m1", "e8m0", 6.0, 1, 32, "u8", False),
        ("e2m1", "e4m3", 6.0, 1, 16, "u8", True),
        ("twos", "whole", 0.0, 1, 32, "bf16", False), ("int4", "whole", 0.0, 1, 128, "fp16", False),
        ("uint4", "whole", 0.0, 1, 128, "bf16", False),
    )  # fmt: skip
    for kind, how, largest, block_rows, block_cols, kept, has_global in kinds[-4:] if few else kinds:
        square = block_rows > 1
        constants = {
            "KIND": kind, "SCALE": how, "LARGEST": largest, "BLOCK_ROWS": block_rows, "BLOCK_COLS": block_cols, "GIVEN": False,
            "GLOBAL": has_global, "ROWS": 128 if square else 4, "COLUMNS": 128 if square else 256,
        }  # fmt: skip
        pointers = {"x_ptr": "bf16", "data_ptr": "u8", "scale_ptr": kept, "zero_ptr": "u8", "global_ptr": "fp32"}
        arguments = {"constants": constants, "pointers": pointers, "options": {"num_warps": 8 if square else 4, "num_stages": 3}}
        yield f"quantize {kind} {how} {block_cols}", _blocks_kernel, arguments
    given = {
        "KIND": "e4m3", "SCALE": "float", "LARGEST": 448.0, "BLOCK_ROWS": 0, "BLOCK_COLS": 0, "GIVEN": True, "GLOBAL": False,
        "ROWS": 4, "COLUMNS": 256,
    }  # fmt: skip
    pointers = {"x_ptr": "bf16", "data_ptr": "u8", "scale_ptr": "fp32", "zero_ptr": "u8", "global_ptr": "fp32"}
    yield "quantize given", _blocks_kernel, {"constants": given, "pointers": pointers, "options": options}
    for kind, largest in (("e4m3", 448.0), ("uint4", 0.0)):
        constants = {"KIND": kind, "LARGEST": largest, "COLUMNS": 1024}
        yield f"quantize rows {kind}", _row_kernel, {"constants": constants, "pointers": pointers, "options": options}
    sums = {"constants": {"HAS_BIAS": True, "FEATURES": 512}, "pointers": {"parts_ptr": "fp32"}, "options": options}
    yield "add parts", _add_parts_kernel, sums
    whole = {"constants": {"ROWS": 8, "COLUMNS": 256}, "pointers": {"x_ptr": "bf16", "out_ptr": "i32"}, "options": options}
    yield "largest", _largest_kernel, whole
    scales = {"constants": {"BLOCK": 8}, "pointers": {"bits_ptr": "i32", "scale_ptr": "fp32"}, "options": options}
    yield "matrix scale", _matrix_scale_kernel, scales


def compile_kernel(function: Any, target: str, constants: dict[str, Any], pointers: dict[str, str], options: dict[str, int]) -> Any:
    """Compile as a launch on contiguous tensors would: pointers and row strides are multiples of 16, column strides 1."""
    pointers = {"counts_ptr": "i32", "owners_ptr": "i32", "bias_ptr": "bf16", "out_ptr": "bf16", **pointers}
    unit = [name for name in function.arg_names if name.endswith("_col") and "scale" not in name and "zero" not in name]
    constants = {**constants, **dict.fromkeys(unit, 1)}
    signature, constexprs, attributes = {}, {}, {}
    for place, name in enumerate(function.arg_names):
        if name in constants:
            signature[name], constexprs[(place,)] = "constexpr", constants[name]
            continue
        signature[name] = f"*{pointers[name]}" if name.endswith("_ptr") else "fp32" if name == "divisor" else "i32"
        if name.endswith("_ptr") or name in MULTIPLES:
            attributes[(place,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=function, signature=signature, constexprs=constexprs, attrs=attributes)
    return triton.compile(source, target=TARGETS[target], options=options)


def facts(kernel: Any, target: str) -> dict[str, Any]:
    """Spilled bytes or registers, shared memory, and whether the matrix unit gets fp8, or half-precision, operands."""
    if target.startswith("sm"):
        tool = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", "cuobjdump")
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(kernel.asm["cubin"])
            file.flush()
            printed = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
        found = re.search(r"STACK:(\d+)", printed)
        assert found, printed
        text = kernel.asm["ptx"]
        fp8 = bool(re.search(r"(wgmma|mma\.sync|tcgen05\.mma)[^\n]*(e4m3|f8f6f4)", text))
        matrix = any(name in text for name in ("wgmma.mma", "mma.sync", "tcgen05.mma"))
    else:
        text = kernel.asm["amdgcn"]
        fp8, matrix = bool(re.search(r"v_mfma\w*(fp8|f8)", text)), "v_mfma" in text
        found = re.search(r"\.vgpr_spill_count:\s+(\d+)", text)
        assert found
    tf32 = "tf32" in text or "xf32" in text
    return {"spills": int(found[1]), "shared": kernel.metadata.shared, "fp8": fp8, "matrix": matrix, "tf32": tf32}


def main() -> None:
    """Arguments: a target, then `all` or `few`; prints {kernel: facts}."""
    target, extent = sys.argv[1:]
    few = (FP8_PAIRS[0], ("bf16", "bf16"), ("bf16", "nvfp4@block_16"), ("bf16", "gguf_q4_k@inline"))
    result: dict[str, Any] = {}
    pairs, rows = (PAIRS, (1, 64, 512)) if extent == "all" else (few, (1, 512))
    for name, function, arguments in launches(target, pairs, rows):
        result[name] = facts(compile_kernel(function, target, **arguments), target)
    for name, function, arguments in quantization_launches(few=extent != "all"):
        result[name] = facts(compile_kernel(function, target, **arguments), target)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
