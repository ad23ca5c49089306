"""Positions on several axes: every kernel against the reference, the models' own rotation, refusals, the library's form."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLTextConfig
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLRotaryEmbedding
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLTextConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRotaryEmbedding

from tokenspeed_kernel import ShapeError
from tokenspeed_kernel.case import Case
from tokenspeed_kernel.ops.rope import RopeConfig, apply_rope, cases, multi_axis, multi_axis_cos_sin, rope_cos_sin
from tokenspeed_kernel.testing import check_case

CASES = [case for case in cases.CASES if case.op == "rope.multi_axis_cos_sin"]
SMALL = [case for case in CASES if not case.bench]
FP32 = torch.float32


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_cpu(case: Case) -> None:
    check_case(case, solution="cpu", device=torch.device("cpu"), dtype=FP32)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for machines without a GPU")
@pytest.mark.parametrize("case", SMALL, ids=str)
def test_triton_interpreted(case: Case) -> None:
    pytest.importorskip("triton", reason="needs triton")
    check_case(case, solution="triton", device=torch.device("cpu"), dtype=FP32)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=str)
def test_triton_on_gpu(case: Case) -> None:
    check_case(case, solution="triton", device=torch.device("cuda"), dtype=FP32)


@pytest.mark.parametrize(
    ("config_class", "embedding_class", "sections", "interleaved"),
    [
        (Qwen2VLTextConfig, Qwen2VLRotaryEmbedding, [16, 24, 24], False),
        (Qwen3VLTextConfig, Qwen3VLTextRotaryEmbedding, [24, 20, 20], True),
        (Qwen3VLTextConfig, Qwen3VLTextRotaryEmbedding, [22, 22, 20], True),
    ],
)  # fmt: skip
def test_equal_to_transformers(config_class: Any, embedding_class: Any, sections: list[int], interleaved: bool) -> None:
    parameters = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": sections, "mrope_interleaved": interleaved}
    settings = {"hidden_size": 1024, "num_attention_heads": 8, "head_dim": 128, "max_position_embeddings": 4096}
    theirs = config_class(**settings, rope_parameters=parameters)
    positions = torch.randint(0, 4096, (3, 50), generator=torch.Generator().manual_seed(2))
    cos, sin = embedding_class(theirs)(torch.empty(1), positions[:, None])
    config = RopeConfig.from_hf({**settings, "rope_parameters": parameters})
    assert config.sections == tuple(sections)
    table = rope_cos_sin(config, 4096)
    got = multi_axis_cos_sin(table, positions, config.sections, interleaved=config.interleaved_sections)
    torch.testing.assert_close(got[:, :64], cos[0, :, :64], atol=1e-6, rtol=0)
    torch.testing.assert_close(got[:, 64:], sin[0, :, :64], atol=1e-6, rtol=0)


@pytest.mark.parametrize("interleaved", [False, True])
def test_alike_on_all_axes_is_the_rotation_on_one(interleaved: bool) -> None:
    inputs = cases.inputs(cases.Shape("text", 9, 4, 2, 32, 32))
    positions, table = inputs["positions"], inputs["cos_sin_cache"]
    rows = multi_axis_cos_sin(table, positions.expand(3, 9), (6, 5, 5), interleaved=interleaved)
    assert torch.equal(rows, table[positions])
    want = apply_rope(**inputs)
    got = apply_rope(inputs["q"], inputs["k"], torch.arange(9), rows)
    assert all(torch.equal(one, other) for one, other in zip(got, want, strict=True))


def test_position_outside_the_table() -> None:
    table = rope_cos_sin(RopeConfig(16, 16), 10)
    for position in (-1, 10):
        positions = torch.tensor([[0, 1], [2, position]])
        with pytest.raises(IndexError, match=r"positions must be in 0\.\.9"):
            multi_axis_cos_sin(table, positions, (4, 4), solution="cpu")
        if not torch.cuda.is_available():
            pytest.importorskip("triton", reason="needs triton")
            got = multi_axis_cos_sin(table, positions, (4, 4), solution="triton")
            assert bool(got[1, 4:8].isnan().all())
            assert bool(got[1, :4].isfinite().all())
            assert bool(got[0].isfinite().all())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda t, p: multi_axis_cos_sin(t, p, (4, 3)), r"sections whose sum is rotary_dim / 2 = 8, got \(4, 3\)"),
        (lambda t, p: multi_axis_cos_sin(t, p, (9, -1)), "sections whose sum"),
        (lambda t, p: multi_axis_cos_sin(t, p, ()), "sections whose sum"),
        (lambda t, p: multi_axis_cos_sin(t, p, (4, 2, 2)), r"positions \[3, num_tokens\] int32 or int64"),
        (lambda t, p: multi_axis_cos_sin(t, p.float(), (4, 4)), r"positions \[2, num_tokens\] int32 or int64, .* float32"),
        (lambda t, p: multi_axis_cos_sin(t.t(), p, (4, 4)), r"cos_sin_cache \[max_position, rotary_dim\], contiguous"),
        (lambda t, p: multi_axis_cos_sin(t, p, (4, 4), out=torch.empty(3, 15)), r"out \[3, 16\] float32, contiguous"),
    ],
)
def test_bad_operands_are_refused(call: Callable[..., torch.Tensor], message: str) -> None:
    with pytest.raises(ShapeError, match=rf"rope\.multi_axis_cos_sin: .*{message}"):
        call(rope_cos_sin(RopeConfig(16, 16), 10), torch.zeros(2, 3, dtype=torch.int64))


def test_library_op_and_compiled() -> None:
    inputs = cases.axes_inputs(cases.AXES[2])
    arguments = (inputs["cos_sin_cache"], inputs["positions"], list(inputs["sections"]), True, None)
    torch.library.opcheck(torch.ops.tokenspeed.multi_axis_cos_sin.default, arguments)

    def model(table: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return multi_axis_cos_sin(table, positions, inputs["sections"], interleaved=True) * 2

    got = torch.compile(model, fullgraph=True, backend="aot_eager")(*arguments[:2])
    assert torch.equal(got, model(*arguments[:2]))


def test_eager_call_does_not_enter_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("the dispatcher was entered")

    monkeypatch.setattr(multi_axis, "_LIBRARY_OP", refuse)
    multi_axis_cos_sin(**cases.axes_inputs(cases.AXES[0]))


PROGRAM = """
import json, sys, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from tokenspeed_kernel.ops.rope.triton.multi_axis import _multi_axis_cos_sin_kernel as kernel
sizes = {}
for target in json.loads(sys.argv[1]):
    gpu = GPUTarget("cuda", int(target[3:]), 32) if target.startswith("sm") else GPUTarget("hip", target, 64)
    constants = {"ROTARY_DIM": 128, "BLOCK": 128}
    pointers = {"table_ptr": "*fp32", "positions_ptr": "*i64", "axes_ptr": "*i32", "out_ptr": "*fp32"}
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else pointers.get(name, "i32") for name in names}
    constexprs = {(names.index(name),): value for name, value in constants.items()}
    made = triton.compile(ASTSource(fn=kernel, signature=signature, constexprs=constexprs), target=gpu, options={"num_warps": 1})
    sizes[target] = len(made.asm["cubin" if target.startswith("sm") else "hsaco"])
print(json.dumps(sizes))
"""


def test_kernel_compiles_for_gpus_that_are_not_here(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="needs triton")
    targets = ["sm_80", "sm_90", "sm_100", "sm_120", "gfx942", "gfx950"]
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, str(program), json.dumps(targets)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    sizes = json.loads(done.stdout.splitlines()[-1])
    assert set(sizes) == set(targets)
    assert all(size > 0 for size in sizes.values())
