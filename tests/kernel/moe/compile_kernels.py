"""Compiles the family's Triton kernels for GPUs that are not there, as the launchers would launch them, and prints facts as JSON.

The launchers run on tensors without data; each kernel is replaced by a recorder that compiles it with the types, alignments and
constants of that launch. Run as a program by `test_compiled`: the interpreter of the other tests replaces Triton's compiler.
"""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tokenspeed_kernel import QuantizedTensor
from tokenspeed_kernel.ops.activation.triton import gated as activation
from tokenspeed_kernel.ops.moe import GatedActivation
from tokenspeed_kernel.ops.moe.contract import ACTIVATION_FORMATS, WEIGHT_FORMATS
from tokenspeed_kernel.ops.moe.triton import experts, few_tokens, many_tokens, permute, routing, sort, weights
from tokenspeed_kernel.quantized import data_shape, scale_shape
from tokenspeed_kernel.signature import Format

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "sm_120": GPUTarget("cuda", 120, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
    "gfx950": GPUTarget("hip", "gfx950", 64),
}
TYPES = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int32: "*i32",
    torch.uint8: "*u8",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.float8_e5m2: "*fp8e5",
}
KERNELS: tuple[tuple[Any, str], ...] = (
    (activation, "_gated_kernel"),
    (routing, "_routing_kernel"),
    (sort, "_sort_kernel"),
    (permute, "_gather_kernel"),
    (permute, "_weighted_sum_kernel"),
    (few_tokens, "_first_few_kernel"),
    (few_tokens, "_second_few_kernel"),
    (many_tokens, "_first_many_kernel"),
    (many_tokens, "_second_many_kernel"),
)
FEW_FORMATS = ("fp8_e4m3@block_128x128", "mxfp4@block_32", "nvfp4@block_16", "uint4@group_64")


class Recorder:
    """Stands in for a kernel: a launch compiles it, once for each set of constants, and keeps the facts."""

    def __init__(self, function: Any, target: str, found: dict[str, Any]) -> None:
        self.function, self.target, self.found, self.label = function, target, found, ""
        self.known: set[str] = set()

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        assert all(0 < size < 2**16 for size in grid[1:]), grid
        return self.launch

    def launch(self, *given: Any, num_warps: int = 4, num_stages: int = 3, **constants: Any) -> None:
        """Compile as Triton would for these arguments."""
        values = {**dict(zip(self.function.arg_names, given, strict=False)), **constants}
        signature, constexprs, attributes = {}, {}, {}
        for place, parameter in enumerate(self.function.params):
            name, value = parameter.name, values[parameter.name]
            if parameter.is_constexpr or (isinstance(value, int) and value == 1):
                signature[name], constexprs[(place,)] = "constexpr", value
                continue
            tensor = isinstance(value, torch.Tensor)
            signature[name] = TYPES[value.dtype] if tensor else "fp32" if isinstance(value, float) else "i32"
            if tensor or (isinstance(value, int) and value % 16 == 0):
                attributes[(place,)] = [["tt.divisibility", 16]]
        key = str((signature, constexprs, attributes, num_warps, num_stages))
        if key in self.known:
            return
        self.known.add(key)
        source = ASTSource(fn=self.function, signature=signature, constexprs=constexprs, attrs=attributes)
        options = {"num_warps": num_warps, "num_stages": num_stages}
        kernel = triton.compile(source, target=TARGETS[self.target], options=options)
        self.found[f"{self.label}: {self.function.__name__}"] = facts(kernel, self.target)


def facts(kernel: Any, target: str) -> dict[str, Any]:
    """Spills, shared memory and matrix instructions of the machine code."""
    shared = kernel.metadata.shared
    if target.startswith("sm"):
        tool = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", "cuobjdump")
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(kernel.asm["cubin"])
            file.flush()
            printed = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
        used = re.search(r"REG:(\d+) STACK:(\d+)", printed)
        assert used, printed
        ptx = kernel.asm["ptx"]
        matrix = any(name in ptx for name in ("wgmma.mma", "mma.sync", "tcgen05.mma"))
        return {"registers": int(used[1]), "spills": int(used[2]), "shared": shared, "matrix": matrix, "tf32": "tf32" in ptx}
    text = kernel.asm["amdgcn"]
    counts = {name: int(re.search(rf"\.{name}:\s+(\d+)", text)[1]) for name in ("vgpr_count", "vgpr_spill_count")}  # type: ignore[index]
    return {
        "registers": counts["vgpr_count"],
        "spills": counts["vgpr_spill_count"],
        "shared": shared,
        "matrix": "v_mfma" in text,
        "tf32": "xf32" in text,
    }


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """A tensor without data."""
    return torch.empty(shape, dtype=dtype, device="meta")


def stack(shape: tuple[int, int, int], fmt: str, dtype: torch.dtype) -> torch.Tensor | QuantizedTensor:
    """Weights without data."""
    if not fmt:
        return empty(*shape, dtype=dtype)
    form = Format.parse(fmt)
    scales = scale_shape(form, shape)
    assert scales is not None
    kind = {"nvfp4": torch.float8_e4m3fn, "mxint4": torch.bfloat16, "mxfp4": torch.uint8}.get(form.logical, torch.float32)
    scale = empty(*scales, dtype=torch.uint8 if form.logical.startswith("mxfp8") else kind)
    total = empty(shape[0], dtype=torch.float32) if form.logical == "nvfp4" else None
    zero = empty(*scales, dtype=torch.uint8) if form.logical == "uint4" else None
    return QuantizedTensor(empty(*data_shape(form, shape), dtype=form.storage), form, shape, scale, total, zero)


def quantized_rows(x: torch.Tensor, form: Format) -> QuantizedTensor:
    """What `quantize` makes of rows, without data."""
    scales = scale_shape(form, tuple(x.shape))
    assert scales is not None
    return QuantizedTensor(empty(*x.shape, dtype=form.storage), form, tuple(x.shape), empty(*scales, dtype=torch.float32))


def run_experts(
    tokens: int, sizes: tuple[int, int, int, int], fmt: str, dtype: torch.dtype, *, options: bool, rows: str | None = None
) -> None:
    """Launch the experts' kernels; `options`: clamp, bias, addend; `rows`: format of the rows."""
    num_experts, top_k, hidden, inner = sizes
    w13, w2 = stack((num_experts, 2 * inner, hidden), fmt, dtype), stack((num_experts, hidden, inner), fmt, dtype)
    extra: dict[str, Any] = {}
    if options:
        extra = {
            "w13_bias": empty(num_experts, 2 * inner, dtype=dtype),
            "w2_bias": empty(num_experts, hidden, dtype=dtype),
            "activation": GatedActivation(limit=7.0, alpha=1.702, up_offset=1.0),
            "addend": empty(tokens, hidden, dtype=dtype),
        }
    ids, shares = empty(tokens, top_k, dtype=torch.int32), empty(tokens, top_k, dtype=torch.float32)
    experts.fused_experts(empty(tokens, hidden, dtype=dtype), w13, w2, ids, shares, **extra, activation_format=rows)


def launches(*, everything: bool) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield (label, a call that launches) as engines meet them."""
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    bias = empty(256, dtype=fp32)
    grouped = {"num_groups": 8, "top_groups": 4, "group_score": "top2_sum", "correction_bias": bias}
    yield "softmax", lambda: routing.topk_routing(empty(64, 128), 8, renormalize=True)
    yield "sigmoid groups", lambda: routing.topk_routing(empty(64, 256, dtype=fp32), 8, scoring="sigmoid", **grouped)
    yield "topk_softmax", lambda: routing.topk_routing(empty(64, 32), 4, scoring="topk_softmax")
    yield "swiglu_clamped", lambda: activation.swiglu_clamped(empty(64, 5760), 7.0, alpha=1.702, up_offset=1.0, interleaved=True)
    yield "gelu", lambda: activation.gelu_and_mul(empty(64, 4096, dtype=fp32))
    yield "gelu_tanh", lambda: activation.gelu_and_mul(empty(64, 4096, dtype=fp16), approximate="tanh")
    yield "permute", lambda: permute.permute(empty(4096, 2048), empty(4096, 8, dtype=torch.int32), num_experts=128)
    pairs = empty(4096, 8, dtype=torch.int32), empty(4096, 8, dtype=fp32)
    yield "unpermute", lambda: permute.unpermute(empty(32768, 2048), *pairs, addend=empty(4096, 2048))
    wide, clamped = (128, 8, 2048, 768), (32, 4, 2880, 2880)
    for tokens in (1, 16, 1024, 8192):
        yield f"bf16 {tokens} tokens", lambda tokens=tokens: run_experts(tokens, wide, "", bf16, options=False)
    for tokens in (1, 64):
        yield f"fp32 {tokens} tokens", lambda tokens=tokens: run_experts(tokens, wide, "", fp32, options=False)
        yield f"fp16 {tokens} tokens, clamp, bias", lambda tokens=tokens: run_experts(tokens, clamped, "", fp16, options=True)
        for fmt in WEIGHT_FORMATS if everything else FEW_FORMATS:
            label = f"{fmt} {tokens} tokens"
            yield label, lambda tokens=tokens, fmt=fmt: run_experts(tokens, wide, fmt, bf16, options=False)
        for rows, fmts in ACTIVATION_FORMATS.items():
            label, fmt = f"{rows} {fmts[-1]} {tokens} tokens", fmts[-1]
            yield label, lambda tokens=tokens, fmt=fmt, rows=rows: run_experts(tokens, wide, fmt, bf16, options=False, rows=rows)
    if everything:
        for tokens in (1024, 8192):
            for rows, fmts in ACTIVATION_FORMATS.items():
                label, fmt = f"{rows} {fmts[-1]} {tokens} tokens", fmts[-1]
                call = functools.partial(run_experts, tokens, wide, fmt, bf16, options=False, rows=rows)
                yield label, call
            for fmt in FEW_FORMATS:
                label = f"{fmt} {tokens} tokens"
                yield label, lambda tokens=tokens, fmt=fmt: run_experts(tokens, wide, fmt, bf16, options=False)
        for tokens in (1, 64):
            label = f"mxfp4 {tokens} tokens, clamp, bias"
            yield label, lambda tokens=tokens: run_experts(tokens, clamped, "mxfp4@block_32", bf16, options=True)


def main() -> None:
    """Arguments: target, and `all` for every format; prints {kernel: facts}."""
    target, found = sys.argv[1], {}
    hip = target.startswith("gfx")
    torch.version.hip = "compiling" if hip else None
    weights.has_fp8 = lambda device: not hip and int(target[3:]) >= 89
    experts.quantize = quantized_rows  # it launches kernels of another family
    recorders = []
    for module, name in KERNELS:
        recorders.append(Recorder(getattr(module, name), target, found))
        setattr(module, name, recorders[-1])
    for label, call in launches(everything=sys.argv[2:] == ["all"]):
        for recorder in recorders:
            recorder.label = label
        call()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
