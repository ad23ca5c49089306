"""The command line."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tokenspeed_kernel.cli import main


def test_explain_text(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("triton", reason="needs triton")
    assert main(["explain", "norm.rms_norm", "--platform", "sm_103", "--dtype", "bf16"]) == 0
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert lines[0] == "norm.rms_norm on sm_103, x=bf16, weight=bf16 (pretended)"
    assert any(". cpu_rms_norm: rejected (PERFORMANT" in line for line in lines)
    assert "       built for cpu, got sm_103" in lines
    assert any(". triton_rms_norm: chosen (PORTABLE" in line for line in lines)
    assert "       never chosen unless asked for" in lines


def test_explain_json(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("triton", reason="needs triton")
    assert main(["explain", "gemm.mm", "--platform", "gfx950", "--dtype", "x=bf16", "--dtype", "weight=fp32", "--json"]) == 1
    facts = json.loads(capsys.readouterr().out)
    assert facts["chosen"] is None
    assert facts["platform"] == {"arch": "gfx950", "vendor": "amd", "features": []}
    by_name = {one["kernel"]: one for one in facts["candidates"]}
    assert by_name["cublas_mm"]["reasons"][0] == "built for nvidia, got gfx950"
    assert by_name["triton_mm"]["verdict"] == "rejected"
    assert by_name["triton_mm"]["reasons"][0].startswith("formats in {x=fp32, weight=fp32")
    assert by_name["reference_mm"]["reasons"] == ["never chosen unless asked for"]


def test_explain_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "embedding.embedding", "--dtype", "int64", "--dtype", "fp32"]) == 0
    assert "token_ids=int64, weight=fp32" in capsys.readouterr().out


def test_the_module_is_the_command() -> None:
    command = [sys.executable, "-P", "-m", "tokenspeed_kernel.cli", "list", "norm.rms_norm"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert "reference_rms_norm" in done.stdout


def test_a_reader_that_has_seen_enough() -> None:
    command = f"{sys.executable} -P -m tokenspeed_kernel.cli list | head -c 1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "o"
    assert done.stderr == ""
    # 0 where all of it fitted into the pipe before the reader left.
    assert done.returncode in {0, 141}


def test_explain_solution(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "norm.rms_norm", "--platform", "cpu", "--solution", "reference", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["chosen"] == "reference_rms_norm"
    assert 'not asked for (solution="reference")' in facts["candidates"][0]["reasons"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["explain", "gemm.m"], "did you mean gemm.mm"),
        (["explain", "rms_norm"], "did you mean norm.rms_norm"),
        (["explain", "gemm.mm", "--platform", "sm90"], "did you mean sm_90"),
        (["explain", "gemm.mm", "--dtype", "fp8"], "neither an encoding nor a scale layout"),
        (["explain", "gemm.mm", "--dtype", "y=bf16"], "unknown operand 'y'"),
        (["explain", "norm.rms_norm", "--trait", "page_size=3"], "unknown trait 'page_size'\nFix: known: none."),
        (["explain", "attention.mha_decode", "--trait", "page_sise=3"], "unknown trait 'page_sise'\nFix: did you mean page_size?"),
        (["explain", "attention.mha_decode", "--trait", "page_size=abc"], "trait page_size: expected a whole number, got 'abc'"),
        (["explain", "attention.mha_decode", "--trait", "page_size=1.5"], "trait page_size: expected a whole number, got '1.5'"),
        (["explain", "attention.mha_decode", "--trait", "sinks=1"], "trait sinks: expected true or false, got '1'"),
        (["explain", "gemm.mm", "--dtype", "weigth=bf16"], "unknown operand 'weigth'\nFix: did you mean weight?"),
        (["explain", "gemm.mm", "--trait", "page_size"], "expected NAME=VALUE, got 'page_size'"),
        (["list", "nrom"], "unknown op 'nrom'"),
    ],
)
def test_mistake_gets_an_answer_and_status_2(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert not captured.out


def test_bad_environment_is_status_2(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("TOKENSPEED_KERNEL_DISABLE", "a,,b")
    assert main(["list"]) == 2
    assert "expected names separated by commas" in capsys.readouterr().err


def test_typo_in_a_setting_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("TOKENSPEED_KERNEL_DISABLE", "cpu_rms_nrom")
    assert main(["explain", "norm.rms_norm", "--platform", "cpu"]) == 0
    captured = capsys.readouterr()
    assert "no kernel or solution is named 'cpu_rms_nrom'" in captured.err
    assert "did you mean cpu_rms_norm" in captured.err
    assert "site-packages" not in captured.err


def test_none_eligible_is_status_1_with_a_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "norm.rms_norm", "--platform", "sm_75", "--dtype", "fp32"]) == 1
    out = capsys.readouterr().out
    assert "built for nvidia>=sm_80, amd>=gfx90a, got sm_75" in out
    assert 'Fix: pass solution="reference".' in out


def test_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[0].split() == ["op", "kernel", "solution", "band", "platforms", "formats", "verified"]
    for name in ("cpu_mm", "triton_mm", "cublas_mm", "reference_mm", "cpu_embedding", "triton_silu_and_mul"):
        assert name in out
    assert main(["list", "gemm.mm"]) == 0
    assert "rms_norm" not in capsys.readouterr().out


def test_list_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "norm", "--json"]) == 0
    kernels = json.loads(capsys.readouterr().out)["kernels"]
    assert {"norm.rms_norm", "norm.fused_add_rms_norm"} <= {one["op"] for one in kernels}
    assert {one["op"].partition(".")[0] for one in kernels} == {"norm"}
    triton = next(one for one in kernels if one["kernel"] == "triton_rms_norm")
    assert triton["targets"] == ["nvidia>=sm_80", "amd>=gfx90a"]
    assert {"x": "bf16", "weight": "fp32"} in triton["formats"]
    assert triton["verified"], "the listing says how a kernel was verified"
    assert triton["origin"] == "tokenspeed_kernel"


def test_explain_a_call_by_its_shapes(capsys: pytest.CaptureFixture[str]) -> None:
    shapes = {"q": "4x8x64", "k_cache": "10x16x2x64", "v_cache": "10x16x2x64", "page_table": "4x9", "seq_lens": "4"}
    arguments = ["explain", "attention.mha_decode", "--arg", "max_seqlen_k=100", "--arg", "sliding_window=12", "--dtype", "bf16"]
    for name, shape in shapes.items():
        arguments += ["--shape", f"{name}={shape}"]
    assert main([*arguments, "--platform", "sm_90", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["request"] == (
        "attention.mha_decode on sm_90, q=bf16, k_cache=bf16, v_cache=bf16, head_dim=64, page_size=16, sliding_window=True, "
        "logit_cap=False, sinks=False, return_lse=False"
    )


def test_explain_a_scaled_weight_by_its_shape(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["explain", "gemm.mm", "--shape", "x=16x256", "--shape", "weight=64x256", "--dtype", "x=bf16"]
    main([*arguments, "--dtype", "weight=nvfp4@block_16", "--platform", "sm_100", "--json"])
    assert "weight=nvfp4@block_16" in json.loads(capsys.readouterr().out)["request"]


def test_explain_a_case(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "attention.mha_decode", "--case", "sinks", "--dtype", "bf16", "--platform", "cpu", "--json"]) == 0
    assert "q=bf16" in (request := json.loads(capsys.readouterr().out)["request"])
    assert "sinks=True" in request


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shape", "x=16x64", "--shape", "weight=8x63", "--dtype", "fp32"], "expected x [..., in_features]"),
        (["--shape", "x=16x64", "--dtype", "fp32"], "gemm.mm: no weight\nFix: add --shape weight=..."),
        (["--shape", "weigth=16x64", "--dtype", "fp32"], "unknown parameter 'weigth'\nFix: did you mean weight?"),
        (["--shape", "x=16*64", "--dtype", "fp32"], "expected sizes such as 16x4096, got '16*64'"),
        (["--shape", "x=16x64", "--shape", "weight=8x64"], "no format for x"),
        (["--case", "odd 3x37x5"], "no case is named 'odd 3x37x5'\nFix: did you mean odd 3x37x53"),
        (["--case", "odd 3x37x53", "--shape", "x=1x1"], "--case beside --shape"),
        (["--case", "odd 3x37x53", "--trait", "a=1"], "--trait beside --shape"),
        (["--case", "odd 3x37x53", "--dtype", "x=bf16"], "--case takes one --dtype"),
        (["--arg", "solution=cpu"], "unknown parameter 'solution'"),
        (["--solution", "tritn"], 'no kernel or solution is named "tritn"\nFix: use one of'),
    ],
)
def test_mistake_in_a_call_is_status_2(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "gemm.mm", *arguments]) == 2
    assert message in capsys.readouterr().err
