"""Compiles the Hopper prefill kernel for sm_90a as its launchers have it compiled, and prints what came out, as JSON.

Run as a program, with names of forms, by `test_hopper_prefill_compiled`: the interpreter of other tests replaces Triton's compiler.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from tokenspeed_kernel.ops.attention.hopper import prefill
from tokenspeed_kernel.ops.attention.hopper.prefill_tiles import prefill_kernel
from tokenspeed_kernel.ops.mla.hopper.prefill import mla_prefill

LAYOUT = repr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
POINTERS = {
    **dict.fromkeys(("out_ptr",), "*bf16"),
    **dict.fromkeys(("lse_ptr", "sinks_ptr"), "*fp32"),
    **dict.fromkeys(("cu_q_ptr", "lengths_ptr", "pages_ptr", "counters_ptr"), "*i32"),
}
# As Triton specialises an engine's call: pointers and the strides of heads and tokens are multiples of 16.
ALIGNED = ("q_head", "k_head", "v_head", "out_token", "out_head")


class Recorder:
    """Stands for the kernel: keeps what its launcher passes."""

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*arguments: Any, **constants: Any) -> None:
            names = [name for name in prefill_kernel.arg_names if name not in constants]
            self.arguments, self.constants = dict(zip(names, arguments, strict=True)), constants

        return launch


def recorded(call: Any, **arguments: Any) -> Recorder:
    """What a launcher passes to the kernel for tensors of the host."""
    recorder = Recorder()
    prefill.prefill_kernel, prefill.num_processors = recorder, lambda device: 132
    call(**arguments)
    return recorder


def compile_kernel(recorder: Recorder) -> dict[str, Any]:
    """Compile one form and read its machine code."""
    signature, values, attributes = {}, {}, {}
    constants = dict(recorder.constants)
    num_warps = constants.pop("num_warps")
    for place, name in enumerate(prefill_kernel.arg_names):
        if name in constants:
            signature[name], values[(place,)] = "constexpr", constants[name]
        elif name.endswith("_desc"):
            signature[name] = f"tensordesc<bf16{recorder.arguments[name].block_shape},{LAYOUT}>"
        else:
            signature[name] = POINTERS.get(name, "fp32" if name in ("scale", "cap") else "i32")
            if name in POINTERS or name in ALIGNED:
                attributes[(place,)] = [["tt.divisibility", 16]]
    source = GluonASTSource(fn=prefill_kernel, signature=signature, constexprs=values, attrs=attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": num_warps})
    tool = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", "cuobjdump")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        used, machine = (
            subprocess.run([tool, option, file.name], capture_output=True, text=True, check=True).stdout
            for option in ("-res-usage", "-sass")
        )
    found = re.search(r"REG:(\d+) STACK:(\d+)", used)
    assert found, used
    return {
        "registers": int(found[1]),
        "stack": int(found[2]),
        "shared": compiled.metadata.shared,
        "products": {
            kind: compiled.asm["ptx"].count(f"wgmma.mma_async.sync.aligned.{kind}.") for kind in _kinds(compiled.asm["ptx"])
        },
        "roles": [_role(part) for part in re.split(r"USETMAXREG", machine) if "HGMMA" in part or "UTMALDG" in part],
    }


def _kinds(text: str) -> list[str]:
    return sorted(set(re.findall(r"wgmma\.mma_async\.sync\.aligned\.(m64n\d+k16)\.", text)))


def _role(text: str) -> dict[str, Any]:
    """What the machine code of one role (a group that multiplies, the warp that brings) does."""
    lines = text.splitlines()
    return {
        "products": sum("HGMMA" in line for line in lines),
        # Products wait in groups: one wait for each would mean that the compiler serialised them.
        "waits": sum("WARPGROUP.DEPBAR" in line for line in lines),
        "bulk_loads": sum("UTMALDG" in line for line in lines),
        "bulk_stores": sum("UTMASTG" in line for line in lines),
        "loops": _loops(text),
    }


def _loops(text: str) -> list[dict[str, int]]:
    """Innermost loops with products: how many, how many instructions, and how many of them reach for registers in memory."""
    code = [(int(at, 16), what) for at, what in re.findall(r"/\*([0-9a-f]{4,5})\*/\s+(.*?);", text)]
    place = {at: index for index, (at, _) in enumerate(code)}
    spans = []
    for index, (at, what) in enumerate(code):
        target = re.search(r"\bBRA\b.*?(0x[0-9a-f]+)", what)
        start = place.get(int(target[1], 16)) if target and int(target[1], 16) < at else None
        if start is not None and any("HGMMA" in one for _, one in code[start:index]):
            spans.append((start, index))
    inner = [one for one in spans if not any(one[0] <= other[0] and other[1] < one[1] for other in spans if other != one)]
    return [
        {
            "products": sum("HGMMA" in what for _, what in code[start : end + 1]),
            "instructions": end + 1 - start,
            "in_memory": sum(bool(re.search(r"\b(LDL|STL)\b", what)) for _, what in code[start : end + 1]),
        }
        for start, end in inner
    ]


def forms() -> dict[str, Recorder]:
    """Calls as engines make them, by name."""
    options = {"dtype": torch.bfloat16}
    starts = torch.tensor([0, 100, 300], dtype=torch.int32)
    lengths = {"cu_seqlens_q": starts, "max_seqlen_q": 200, "max_seqlen_k": 200}
    made = {}
    for dim, heads in ((128, 32), (64, 64)):
        q, k = torch.randn((300, heads, dim), **options), torch.randn((300, 8, dim), **options)
        made[f"ragged d{dim}"] = recorded(prefill.mha_prefill, q=q, k=k, v=k, cu_seqlens_k=starts, **lengths)
    q = torch.randn((300, 32, 128), **options)
    for page, more in ((16, {}), (64, {"sliding_window": 128, "sinks": torch.randn(32), "logit_cap": 5.0, "return_lse": True})):
        paged = {"page_table": torch.zeros((2, 13), dtype=torch.int32), "seq_lens": torch.tensor([100, 200], dtype=torch.int32)}
        cache = torch.randn((20, page, 8, 128), **options)
        made[f"page {page}{' everything' if more else ''}"] = recorded(
            prefill.mha_extend, q=q, k_cache=cache, v_cache=cache, **paged, **lengths, **more
        )
    q, k, v = (torch.randn((300, 16, dim), **options) for dim in (192, 192, 128))
    made["mla"] = recorded(mla_prefill, q=q, k=k, v=v, cu_seqlens_k=starts, **lengths)
    return made


if __name__ == "__main__":
    print(json.dumps({name: compile_kernel(forms()[name]) for name in sys.argv[1:]}))
