"""`verify`: what is run and counted, and that it fails when something is wrong or nothing matched."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tokenspeed_kernel import dispatch
from tokenspeed_kernel.cli import main
from tokenspeed_kernel.ops.norm import rms_norm
from tokenspeed_kernel.ops.norm.cpu import rms_norm as cpu_kernels
from tokenspeed_kernel.probe import request_of
from tokenspeed_kernel.registry import collect_builtin
from tokenspeed_kernel.selection import PROBE, Probed
from tokenspeed_kernel.testing.verify import Report, VerifyOptions, cases_of, verify


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, dict[str, Any]]]:
    """Run `verify --json`, and return the status and what it says."""

    def run(*arguments: str) -> tuple[int, dict[str, Any]]:
        status = main(["verify", *arguments, "--device", "cpu", "--json"])
        return status, json.loads(capsys.readouterr().out)

    return run


def _kernel(reports: list[Report], name: str) -> Report:
    return next(one for one in reports if one.kernel == name)


def test_every_dtype_of_every_small_case_is_run() -> None:
    report = _kernel(list(verify(VerifyOptions(ops=("norm.rms_norm",), num_random=0))), "cpu_rms_norm")
    small = [case for case in cases_of("norm.rms_norm") if not case.bench]
    assert (report.how, report.passed, report.failures, report.refused) == ("native", 3 * len(small), [], {})
    assert 0 < report.difference.absolute < 0.02
    assert 0.999 < report.difference.cosine <= 1


def test_large_cases_and_seeds_are_asked_for() -> None:
    options = VerifyOptions(ops=("norm.rms_norm",), kernels=("cpu_rms_norm",), dtypes=(torch.float32,), num_random=0)
    (plain,) = verify(options)
    (more,) = verify(VerifyOptions(**{**_fields(options), "large": True, "seeds": (1, 2)}))
    assert more.passed == 2 * len(cases_of("norm.rms_norm")) > 2 * plain.passed


def _fields(options: VerifyOptions) -> dict[str, Any]:
    return {name: getattr(options, name) for name in VerifyOptions.__dataclass_fields__}


def test_a_wrong_kernel_fails(monkeypatch: pytest.MonkeyPatch, command: Callable[..., tuple[int, dict[str, Any]]]) -> None:
    right = cpu_kernels.rms_norm

    def wrong(
        x: torch.Tensor, weight: torch.Tensor, *, eps: float = 1e-6, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        result = right(x, weight, eps=eps, out=out)
        if x.shape == (3, 37):
            result[2, 36] += 0.5
        if x.shape == (40,):
            raise RuntimeError("a vector is too much")
        return result

    monkeypatch.setattr(cpu_kernels, "rms_norm", wrong)
    status, facts = command("norm.rms_norm", "--kernel", "cpu_rms_norm", "--dtype", "fp32", "--random", "0", "--seed", "5")
    assert status == 1
    (kernel,) = facts["kernels"]
    assert [one["case"] for one in kernel["failures"]][:2] == ["odd 3x37", "vector 40"]
    assert len(kernel["failures"]) < 5
    assert "1 of 111 elements differ" in kernel["failures"][0]["message"]
    assert "first at [2, 36]" in kernel["failures"][0]["message"]
    assert kernel["failures"][1]["message"] == "RuntimeError: a vector is too much"
    assert {one["seed"] for one in kernel["failures"]} == {5}
    assert kernel["passed"] >= 8


def test_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "norm.rms_norm", "--device", "cpu", "--solution", "cpu", "--dtype", "fp32", "--random", "2"]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[0].split()[:5] == ["op", "kernel", "how", "passed", "failed"]
    assert "cpu_rms_norm" in out
    small = [case for case in cases_of("norm.rms_norm") if not case.bench]
    assert f"{len(small) + 2} calls of 1 kernels of 1 ops agree with the reference, 0 do not." in out


@pytest.mark.parametrize("arguments", [["norm", "--solution", "cublas"], ["gemm.mm", "--kernel", "cublas_mm", "--device", "cpu"]])
def test_nothing_matched_is_a_failure(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", *arguments]) == 1
    assert "Nothing was verified" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nrom"], "unknown op 'nrom'"),
        (["norm", "--solution", "tritn"], "solution: unknown 'tritn'\nFix: did you mean triton"),
        (["norm", "--kernel", "cpu_rms"], "or cpu_rms_norm"),
        (["norm", "--dtype", "fp8"], "neither an encoding nor a scale layout"),
        (["norm", "--device", "xpu"], "expected cpu or cuda"),
        (["norm", "--device", "nonsense"], "unknown 'nonsense'"),
        (["norm", "--device", "cuda:99"], "cuda:99 is not there"),
        (["norm", "--random", "-1"], "expected 0 or more"),
    ],
)
def test_mistake_is_status_2(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_kernel_that_no_case_reaches_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokenspeed_kernel.testing.verify.cases_of", lambda op: ())
    (report,) = verify(VerifyOptions(ops=("norm.rms_norm",), kernels=("cpu_rms_norm",), num_random=0))
    assert [one.message for one in report.failures] == ["norm.rms_norm has no cases"]


def test_interpreter_in_a_process_of_its_own() -> None:
    """--interpret sets the variable before Triton is imported; bf16 products are right there, other than as Triton comes."""
    pytest.importorskip("triton", reason="needs triton")
    if torch.cuda.is_available():
        pytest.skip("the interpreter is for machines without a GPU")
    arguments = ["verify", "gemm.mm", "--kernel", "triton_mm", "--interpret", "--random", "1", "--dtype", "bf16", "--json"]
    command = [sys.executable, "-P", "-m", "tokenspeed_kernel.cli", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (kernel,) = json.loads(done.stdout)["kernels"]
    assert kernel["how"] == "interpreter"
    assert kernel["passed"] >= 10


def test_probe_tells_what_a_call_asks_for() -> None:
    x, weight = torch.empty(3, 8, dtype=torch.bfloat16), torch.empty(8)
    request = request_of(rms_norm, {"x": x, "weight": weight})
    assert request is not None
    assert (request.op, str(request.signature), request.solution) == ("norm.rms_norm", "x=bf16, weight=fp32", None)
    with pytest.raises(Probed):
        rms_norm(x, weight, solution=PROBE)
    assert all(not op.table for op in dispatch.bound_ops() if op.contract.name == "norm.rms_norm")


@pytest.mark.gpu
@pytest.mark.parametrize("family", sorted({op.partition(".")[0] for op in collect_builtin().ops()}))
def test_all_kernels_on_the_gpu(family: str) -> None:
    """In one dtype and on small shapes, to be quick: the whole is `tokenspeed-kernel verify`, and each family's own tests."""
    ops = tuple(op for op in collect_builtin().ops() if op.startswith(f"{family}."))
    options = VerifyOptions(ops=ops, device=torch.device("cuda"), dtypes=(torch.bfloat16,), num_random=3)
    reports = list(verify(options))
    failures = [f"{one.kernel} [{bad.case}] {bad.dtype}: {bad.message}" for one in reports for bad in one.failures]
    assert not failures, "\n".join(failures)
    assert any(one.ran for one in reports)
