"""`bench`: figures that hang together, work that is counted right, and clear answers. Times themselves are not judged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest
import torch

from tokenspeed_kernel.bench import BenchOptions, Limits, Row, bench, measure_limits
from tokenspeed_kernel.bench.measure import work_of
from tokenspeed_kernel.bench.plot import plot_svg
from tokenspeed_kernel.bench.timing import cache_bytes, rotating_copies, size_of, time_calls
from tokenspeed_kernel.case import Case
from tokenspeed_kernel.cli import main
from tokenspeed_kernel.dispatch import default_registry
from tokenspeed_kernel.ops.attention.cases import Batch, decode_inputs, ragged_inputs
from tokenspeed_kernel.testing.verify import cases_of

CPU = torch.device("cpu")


def test_json_figures_hang_together(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    plot = tmp_path / "p.svg"
    arguments = ["bench", "norm.rms_norm", "--case", "16x576", "--device", "cpu", "--quick", "--json", "--plot", str(plot)]
    assert main(arguments) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["limits"]["bytes_per_s"] > 1e8
    assert facts["limits"]["flops_per_s"]["fp32"] > 1e8
    assert facts["quick"]
    assert facts["machine"]["torch"] == torch.__version__
    rows = {row["kernel"]: row for row in facts["rows"]}
    ours = rows["cpu_rms_norm"]
    assert ours["moved_bytes"] == 4 * (2 * 16 * 576 + 576)
    assert ours["limit_us"] == pytest.approx(ours["moved_bytes"] / facts["limits"]["bytes_per_s"] * 1e6)
    assert ours["share"] == pytest.approx(ours["limit_us"] / ours["time_us"])
    assert (ours["how"], ours["bound"], ours["flops"]) == ("cpu", "memory", None)
    assert sum(row["chosen"] for row in facts["rows"]) == 1
    assert rows["torch: rms_norm"]["time_us"] > 0
    assert ET.parse(plot).getroot().tag.endswith("svg")
    assert "cpu_rms_norm" in plot.read_text()


def test_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "norm.rms_norm", "--case", "odd 3x37", "--device", "cpu", "--quick", "--dtype", "bf16"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("measured on ")
    assert "bfloat16  cpu_rms_norm *" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nrom"], "unknown op 'nrom'"),
        (["norm.rms_norm", "--case", "16x57"], "case: unknown '16x57'\nFix: did you mean 16x576"),
        (["norm", "--plot", "picture.png"], "expected a name ending in .svg"),
        (["norm", "--threads", "0"], "expected 1 or more"),
        (["norm", "--kernel", "nothing"], "kernel: unknown 'nothing'"),
        (["norm", "--device", "cuda:99"], "is not there"),
    ],
)
def test_mistake_is_status_2(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *arguments, "--quick"]) == 2
    assert message in capsys.readouterr().err


def test_nothing_timed_is_status_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "gemm.mm", "--kernel", "cublas_mm", "--device", "cpu", "--quick"]) == 1
    assert "Nothing was timed" in capsys.readouterr().out


def test_a_kernel_that_raises_is_a_row_with_the_reason() -> None:
    def broken(_: int) -> None:
        raise RuntimeError("no such instruction")

    timed = time_calls({"good": lambda number: number, "bad": broken}, 2, CPU, samples=3)
    assert isinstance(timed["bad"], RuntimeError)
    good = timed["good"]
    assert not isinstance(good, Exception)
    assert 0 < good.best_us <= good.median_us <= good.worst_us


def test_copies_together_pass_the_cache() -> None:
    arguments = {"x": torch.ones(1 << 20), "eps": 1e-5}
    copies, cold = rotating_copies(arguments, CPU, size_of(arguments))
    assert cold or len(copies) == 64
    assert len(copies) == min(64, -(-2 * cache_bytes(CPU) // (4 << 20)), (1 << 30) // (4 << 20))
    assert len({copy["x"].data_ptr() for copy in copies}) == len(copies)
    # A table of which little is read needs as many copies as the rows that are read, and says so where they do not fit.
    _, cold = rotating_copies({"x": torch.empty(200 << 20, dtype=torch.uint8)}, CPU, 1000, most=2)
    assert not cold


def _work(op: str, inputs: dict[str, Any], result: Any) -> tuple[int, int | None]:
    return work_of(Case(op, "by hand", lambda *_: inputs), inputs, result)


def test_work_is_counted_by_hand() -> None:
    x, weight, out = torch.empty(3, 8), torch.empty(5, 8), torch.empty(3, 5)
    assert _work("gemm.mm", {"x": x, "weight": weight}, out) == (4 * (24 + 40 + 15), 2 * 3 * 5 * 8)
    ids, table = torch.zeros(2, dtype=torch.int64), torch.empty(100, 8, dtype=torch.float16)
    rows = _work("embedding.embedding", {"token_ids": ids, "weight": table}, torch.empty(2, 8).half())
    assert rows == (2 * 8 + 2 * 16 + 32, None)
    # Decode: two requests of 5 and 3 keys, window 4: 4 + 3 keys are seen; 2 KV heads of 16 elements, 4 query heads.
    inputs = decode_inputs(Batch("b", (1, 1), (5, 3), sliding_window=4))
    moved, flops = _work("attention.mha_decode", inputs, torch.empty(2, 4, 16))
    assert moved == 4 * (2 * 7 * 2 * 16 + 2 * 2 * 4 * 16)
    assert flops == 4 * 7 * 4 * 16
    # Prefill, causal, 3 queries over 3 keys: 6 pairs.
    inputs = ragged_inputs(Batch("b", (3,), (3,)))
    assert _work("attention.mha_prefill", inputs, torch.empty(3, 4, 16))[1] == 4 * 6 * 4 * 16
    # Without costs of its own: every tensor once, and twice where it is written in place.
    cache = {"k_cache": torch.empty(4)}
    case = Case("kvcache.other", "c", lambda *_: cache, mutated=("k_cache",))
    assert work_of(case, cache, None) == (32, None)


def test_the_limit_is_the_larger_of_memory_and_products() -> None:
    limits = Limits(1e9, {"fp32": 1e9})
    assert limits.time_us(2000, 1000, "fp32") == (2.0, "memory")
    assert limits.time_us(1000, 3000, "fp32") == (3.0, "compute")
    assert limits.time_us(1000, 3000, "fp8") == (1.0, "memory")
    assert limits.time_us(1000, None, "fp32") == (1.0, "memory")


def test_picture_of_a_kernel_without_a_time() -> None:
    row = Row("norm.rms_norm", "a<b", "float32", "k", None, None, "", 1, None, 1.0, "memory", None, False, "RuntimeError: <no>")
    root = ET.fromstring(plot_svg([row], "title & more"))
    texts = [one.text for one in root.iter() if one.text]
    assert any("RuntimeError: <no>" in text for text in texts)
    assert any("a<b" in text for text in texts)


def test_every_case_for_timing_builds_and_has_work() -> None:
    """What `bench` counts is positive for every op that has a case meant for timing; only its arguments are needed."""
    counted = 0
    for op in default_registry().ops():
        case = next((case for case in cases_of(op) if case.bench), None)
        if case is None or case.moved_bytes is not None or case.flops is not None:
            continue
        small = next(one for one in cases_of(op) if not one.bench)
        inputs = small.build(torch.Generator().manual_seed(0), CPU, (small.dtypes or (torch.float32,))[0])
        result = torch.zeros(1)
        moved, flops = work_of(small, inputs, result)
        assert moved > 0
        assert flops is None or flops >= 0
        counted += 1
    assert counted >= 5


@pytest.mark.gpu
def test_on_the_gpu_kernels_are_timed_in_graphs() -> None:
    device = torch.device("cuda")
    limits = measure_limits(device, quick=True)
    assert limits.bytes_per_s > 1e11
    assert limits.launch_us > 0
    options = BenchOptions(("norm.rms_norm", "gemm.mm"), cases=("512x4096", "16x576x1536"), device=device, samples=5)
    rows = list(bench(options, limits, default_registry()))
    assert {row.kernel for row in rows} >= {"triton_rms_norm", "cublas_mm", "triton_mm", "torch: linear"}
    for row in rows:
        assert row.how == "graph", row
        assert row.time_us is not None
        assert row.share is not None
        assert 0 < row.share < 1.5, row
