"""`python -m perf hopper`: goals, saved results, comparison and plots; the kernels themselves are timed on a GPU only."""

from __future__ import annotations

import copy
import importlib
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

_RATES = {"read_bytes_per_s": 4.5e12, "bf16_flops_per_s": 780e12, "fp8_flops_per_s": 1400e12}


@pytest.fixture
def hopper(repository: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports a module of perf/hopper."""
    monkeypatch.syspath_prepend(str(repository))
    return lambda name: importlib.import_module(f"perf.hopper.{name}")


@pytest.fixture
def report(hopper: Any) -> dict[str, Any]:
    """A result of two families, made of the objects that a run makes."""
    rows, as_json = hopper("rows"), hopper("report").as_json
    rates = rows.Rates(**_RATES)
    work = rows.Work("b1 kv65536", 75_000_000, 2e9, (rows.Goal(2.0, ("FlashMLA", "FlashInfer")), rows.Goal(0.5, (rows.LIMIT,))))
    fast = rows.Result(work, 25.0, 0.1, "ours", {"FlashMLA": 60.0, "FlashInfer": 55.0}, {}, rows.Error(0.999999, 0.01, 1e-4))
    small = rows.Work("b1 kv1024", 1_200_000, 3e7, (rows.Goal(1.7, ("FlashMLA", "FlashInfer")),))
    slow = rows.Result(small, 10.0, 0.0, "ours", {"FlashMLA": 15.0}, {"FlashInfer": "not installed"}, rows.Error(0.999999, 0.01))
    alone = rows.Result(rows.Work("merge", 10_000_000, 0.0, (rows.Goal(1.2, ("FlashInfer",)),)), 4.0, absent={"FlashInfer": "no"})
    return {
        "command": "python -m perf hopper",
        "date": "2026-12-01",
        "quick": False,
        "machine": {"gpu": "NVIDIA H200"},
        "versions": {"torch": "2.11.0", "triton": "3.6.0"},
        "rates": _RATES,
        "families": {"mla": [as_json(fast, rates), as_json(slow, rates)], "merge": [as_json(alone, rates)]},
    }


def _perf(repository: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "perf", "hopper", *arguments]
    return subprocess.run(command, cwd=repository, capture_output=True, text=True, check=False)


def test_a_goal_is_over_the_fastest_peer_and_a_share_over_the_measured_limit(report: dict[str, Any]) -> None:
    row = report["families"]["mla"][0]
    assert (row["goal"], row["ratio"], row["met"]) == (2.0, 55.0 / 25.0, True)
    assert [goal["met"] for goal in row["goals"]] == [True, True]
    assert row["goals"][1]["ratio"] == row["share_of_limit"] == pytest.approx(75e6 / 4.5e12 * 1e6 / 25.0)
    assert row["tflops_per_s"] == pytest.approx(80.0)
    assert row["tbytes_per_s"] == pytest.approx(3.0)
    assert report["families"]["mla"][1]["met"] is False
    assert report["families"]["mla"][1]["absent"] == {"FlashInfer": "not installed"}
    assert report["families"]["merge"][0]["met"] is None, "without a peer a goal is neither met nor missed"


def test_a_wrong_result_has_no_time_and_meets_nothing(hopper: Any) -> None:
    rows, bench = hopper("rows"), hopper("bench")
    work = rows.Work("x", 100, 0.0, (rows.Goal(1.0, ("peer",)),))
    want = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    error = rows.Error.of(want.roll(1, 0), want)
    problem = error.problem()
    assert "cosine" in problem
    result = bench.Bench(rows.Rates(1.0, 1.0, 1.0)).measured(work, [], {}, error=error, problem=problem)
    assert result.ours_us is None
    row = hopper("report").as_json(result, rows.Rates(1.0, 1.0, 1.0))
    assert row["met"] is False
    assert row["note"] == problem


def test_a_peer_that_is_absent_says_why(hopper: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock, which needs a GPU, is replaced: it counts calls."""
    rows, bench = hopper("rows"), hopper("bench")
    monkeypatch.setattr(bench, "timed_us", lambda calls, _: (None, calls) if isinstance(calls, str) else (float(len(calls)), ""))

    def missing() -> str:
        raise ImportError("No module named 'flash_mla'")

    peers = {
        "FlashMLA": missing,
        "FlashInfer": "its decode takes no sinks",
        "torch": lambda: [lambda: None] * 4,
        "slow": lambda: pytest.fail("it was to be left out"),
    }
    work = rows.Work("x", 100, 0.0, (rows.Goal(1.5, ("FlashMLA", "torch")),))
    tool = bench.Bench(rows.Rates(1.0, 1.0, 1.0), without=frozenset({"slow"}))
    result = tool.measured(work, [lambda: None] * 2, peers, error=rows.Error(1.0, 0.0))
    assert result.peers_us == {"torch": 4.0}
    assert result.absent == {
        "FlashMLA": "ImportError: No module named 'flash_mla'",
        "FlashInfer": "its decode takes no sinks",
        "slow": "left out by --without",
    }
    assert (result.ours_us, result.spread_us) == (2.0, 0.0)
    assert result.met(work.goals[0], tool.rates) is True


def test_errors_are_seen_where_a_cosine_hides_them(hopper: Any) -> None:
    rows = hopper("rows")
    want = torch.ones(1000)
    assert rows.Error.of(want, want).problem() == ""
    nan = want.clone()
    nan[7] = math.nan
    assert "cosine" in rows.Error.of(nan, want).problem()
    one_off = want.clone()
    one_off[7] += 0.1
    assert rows.Error.of(one_off, want).problem() == ""
    assert "off by 0.1" in rows.Error.of(one_off, want).problem(max_abs=0.05)
    empty = torch.tensor([-math.inf, 1.0])
    assert rows.Error.of(want, want, empty, empty).lse == 0.0
    assert "LSE" in rows.Error.of(want, want, torch.tensor([0.0, 1.0]), empty).problem()
    worst = rows.Error(1.0, 0.1, 1e-4).worst(rows.Error(0.9, 0.01))
    assert (worst.cosine, worst.max_abs, worst.lse) == (0.9, 0.1, 1e-4)
    assert math.isnan(rows.Error(1.0, 0.1).worst(rows.Error(math.nan, 0.1)).cosine)


def test_rows_slower_than_noise_are_named_and_the_status_says_so(repository: Path, tmp_path: Path, report: dict[str, Any]) -> None:
    baseline, now = tmp_path / "baseline.json", tmp_path / "now.json"
    baseline.write_text(json.dumps(report))
    same = _perf(repository, "--from", str(baseline), "--baseline", str(baseline))
    assert same.returncode == 0, same.stdout + same.stderr
    assert "3 rows with the baseline: 0 regressed" in same.stdout
    assert "missed: mla: b1 kv1024: 1.50 times FlashMLA or FlashInfer, goal 1.7" in same.stdout

    slower = copy.deepcopy(report)
    slower["families"]["mla"][0]["ours_us"] = 25.9  # 3.6%
    slower["families"]["mla"][1]["ours_us"] = 10.7  # 7%
    slower["families"]["merge"][0]["ours_us"] = 3.0
    now.write_text(json.dumps(slower))
    result = _perf(repository, "--from", str(now), "--baseline", str(baseline))
    assert result.returncode == 1
    assert "REGRESSED: mla: b1 kv1024: 10.00 us -> 10.70 us (+7.0%, noise 0.50 us)" in result.stdout
    assert "improved: merge" in result.stdout
    assert "kv65536: 25.00" not in result.stdout
    assert _perf(repository, "--from", str(now), "--baseline", str(baseline), "--noise", "0.1").returncode == 0


def test_a_row_that_lost_its_time_or_is_gone_regressed(hopper: Any, report: dict[str, Any]) -> None:
    compare = hopper("compare").compare
    now = copy.deepcopy(report)
    now["families"]["mla"][0].update(ours_us=None, note="wrong: cosine 0.5")
    del now["families"]["mla"][1], now["families"]["merge"]
    regressed = [str(change) for change in compare(now, report, 0.05) if change.regressed]
    assert len(regressed) == 2
    assert "25.00 us -> no time; wrong: cosine 0.5" in regressed[0]
    assert "kv1024" in regressed[1]


def test_times_of_another_gpu_or_file_are_refused(repository: Path, tmp_path: Path, report: dict[str, Any]) -> None:
    saved, other, strange = (tmp_path / name for name in ("saved.json", "other.json", "strange.json"))
    saved.write_text(json.dumps(report))
    other.write_text(json.dumps({**report, "machine": {"gpu": "NVIDIA H20"}}))
    strange.write_text("{}")
    result = _perf(repository, "--from", str(saved), "--baseline", str(other))
    assert result.returncode == 1
    assert "measured on NVIDIA H20, this run on NVIDIA H200" in result.stderr
    for path in (strange, tmp_path / "absent.json"):
        result = _perf(repository, "--from", str(path))
        assert result.returncode == 1
        assert str(path) in result.stderr
        assert "Traceback" not in result.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU, where it would run for minutes")
def test_without_a_hopper_gpu_it_is_refused(repository: Path) -> None:
    result = _perf(repository)
    assert result.returncode == 2
    assert "compute capability 9.0" in result.stderr
    assert "--from FILE" in result.stderr


def test_an_unknown_family_is_refused_with_the_known_ones(repository: Path) -> None:
    result = _perf(repository, "gqa")
    assert result.returncode == 1
    assert "gqa_decode" in result.stderr


def test_plots_without_matplotlib_say_what_to_install(
    hopper: Any, report: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit, match="pip install matplotlib"):
        hopper("plots").plot(report, tmp_path)


def test_plots_of_a_saved_result(hopper: Any, report: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="plots need matplotlib")
    written = hopper("plots").plot(report, tmp_path)
    assert [path.name for path in written] == ["roofline.png", "speedup_mla.png", "speedup_merge.png"]
    for path in written:
        assert path.read_bytes().startswith(b"\x89PNG")
        assert path.stat().st_size > 10_000


def test_every_family_names_its_rows_and_goals_without_a_gpu(hopper: Any) -> None:
    rows = hopper("rows")
    rates = rows.Rates(**_RATES)
    found = hopper("command").families()
    assert found
    for name, family in found.items():
        assert importlib.import_module(f"perf.hopper.{name}").BENCHMARK.name == f"hopper.{name}"
        works = [family.work(shape) for shape in family.shapes]
        assert len({work.case for work in works}) == len(works) > 0
        assert any(work.goals for work in works), f"{name} has no goal"
        for work in works:
            assert work.size_bytes > 0, work.case
            assert work.limit_us(rates) > 0
