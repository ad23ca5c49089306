"""Measured choices: what is stored, when a file is refused, and that selection and explanation follow it."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tokenspeed_kernel import dispatch, tuning
from tokenspeed_kernel.bench.measure import Measured
from tokenspeed_kernel.bench.timing import Timing
from tokenspeed_kernel.cli import main
from tokenspeed_kernel.commands.tune import decide
from tokenspeed_kernel.config import KernelConfig
from tokenspeed_kernel.errors import ConfigError
from tokenspeed_kernel.ops.norm import rms_norm
from tokenspeed_kernel.ops.norm.cpu import rms_norm as cpu_kernels
from tokenspeed_kernel.platform import parse_platform, platform_of
from tokenspeed_kernel.registry import Registry, collect_builtin
from tokenspeed_kernel.selection import Request, Verdict, evaluate, select
from tokenspeed_kernel.signature import Signature
from tokenspeed_kernel.spec import CPU, Band, KernelSpec
from tokenspeed_kernel.tuning import Choice, Table, TuningError, choice_for, machine_pins, read_tables, write_table

HERE = platform_of(torch.device("cpu"))
SIGNATURE = Signature.of(x="fp32", weight="fp32")


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    tuning.forget()
    yield
    tuning.forget()


@pytest.fixture
def registry() -> Registry:
    """The built-in kernels, and a second one for the CPU that ranks behind."""
    made = collect_builtin()
    implementation = "tokenspeed_kernel.ops.norm.reference:rms_norm"
    made.add([KernelSpec("norm.rms_norm", "slow_rms_norm", "slow", Band.PORTABLE, implementation, CPU)])
    return made.freeze()


def _choice(kernel: str = "slow_rms_norm", **changes: Any) -> Choice:
    return replace(Choice("norm.rms_norm", str(SIGNATURE), (), kernel, "cpu_rms_norm", 10.0, 20.0), **changes)


def _write(path: Path, *choices: Choice, kind: str = "cpu", **pins: str) -> str:
    write_table(path, kind, Table({**machine_pins(HERE, ("triton",)), **pins}, choices))
    return str(path)


def _request(path: str, **changes: Any) -> Request:
    return replace(Request("norm.rms_norm", HERE, SIGNATURE, config=KernelConfig(tuning=path)), **changes)


def test_a_file_comes_back_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "table.json"
    choices = (_choice(), _choice(op="gemm.mm", traits=(("max_rows", 16), ("wide", True))))
    _write(path, *choices)
    _write(path, kind="gpu")
    tables = read_tables(path)
    assert tables["cpu"].choices == choices
    assert tables["gpu"].choices == ()
    assert tables["cpu"].pins["torch"] == torch.__version__
    assert sorted(file.name for file in path.parent.iterdir()) == ["table.json"]


def test_selection_follows_the_table_and_says_so(registry: Registry, tmp_path: Path) -> None:
    path = _write(tmp_path / "t.json", _choice())
    assert select(registry, _request("")).name == "cpu_rms_norm"
    assert select(registry, _request(path)).name == "slow_rms_norm"
    first, *others = evaluate(registry, _request(path))
    assert (first.spec.name, first.verdict) == ("slow_rms_norm", Verdict.ELIGIBLE)
    assert first.tuned == "tuned: 10 us measured, cpu_rms_norm 20 us"
    assert [one.spec.name for one in others if one.verdict is Verdict.ELIGIBLE] == ["cpu_rms_norm"]
    assert not any(one.tuned for one in others)


@pytest.mark.parametrize(
    "changes",
    [
        {"solution": "cpu_rms_norm"},
        {"signature": Signature.of(x="bf16", weight="bf16")},
        {"platform": parse_platform("sm_90")},
        {"signature": None},
    ],
)
def test_other_calls_are_not_touched(registry: Registry, tmp_path: Path, changes: dict[str, Any]) -> None:
    path = _write(tmp_path / "t.json", _choice())
    assert not any(one.tuned for one in evaluate(registry, _request(path, **changes)))


def test_a_choice_that_is_disabled_is_not_taken(registry: Registry, tmp_path: Path) -> None:
    config = KernelConfig(tuning=_write(tmp_path / "t.json", _choice()), disabled=frozenset({"slow"}))
    assert select(registry, _request("", config=config)).name == "cpu_rms_norm"


def test_traits_belong_to_the_key(tmp_path: Path) -> None:
    path = _write(tmp_path / "t.json", _choice(traits=(("max_rows", 1),)))
    assert choice_for(path, "norm.rms_norm", str(SIGNATURE), {"max_rows": 1}, HERE) is not None
    assert choice_for(path, "norm.rms_norm", str(SIGNATURE), {"max_rows": 16}, HERE) is None
    assert choice_for(path, "norm.rms_norm", str(SIGNATURE), {}, HERE) is None


@pytest.mark.parametrize("pin", ["device", "arch", "features", "driver", "torch", "tokenspeed-kernel", "library triton"])
def test_a_table_of_another_machine_or_version_is_refused(registry: Registry, tmp_path: Path, pin: str) -> None:
    path = _write(tmp_path / "t.json", _choice(), **{pin: "another"})
    message = rf"is of another machine or version\n  {pin}: measured with another, here is .*\nFix: run"
    with pytest.raises(TuningError, match=message):
        select(registry, _request(path))


def test_a_library_that_came_later_is_a_difference(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    write_table(path, "cpu", Table(machine_pins(HERE, ("no-such-distribution",)), ()))
    assert choice_for(str(path), "a.b", "", {}, HERE) is None
    write_table(path, "cpu", Table({**machine_pins(HERE, ()), "library no-such-distribution": "1.0"}, ()))
    tuning.forget()
    with pytest.raises(TuningError, match=r"measured with 1\.0, here is none"):
        choice_for(str(path), "a.b", "", {}, HERE)


def test_a_table_for_the_other_kind_of_device_does_not_matter(registry: Registry, tmp_path: Path) -> None:
    path = _write(tmp_path / "t.json", _choice(), kind="gpu", device="another")
    assert select(registry, _request(path)).name == "cpu_rms_norm"


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"format": 2, "tables": {}}', '{"format": 1, "tables": {"cpu": {}}}'])
def test_a_file_that_is_none_is_refused(registry: Registry, tmp_path: Path, content: str) -> None:
    path = tmp_path / "t.json"
    path.write_text(content)
    with pytest.raises(TuningError, match="Fix: run `tokenspeed-kernel tune`"):
        select(registry, _request(str(path)))
    with pytest.raises(TuningError):
        write_table(path, "cpu", Table({}, ()))
    with pytest.raises(ConfigError, match="cannot be read"):
        select(registry, _request(str(tmp_path / "absent.json")))


def test_ops_use_the_file_of_the_environment(registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENSPEED_KERNEL_TUNING", _write(tmp_path / "t.json", _choice()))
    called = []
    monkeypatch.setattr(cpu_kernels, "rms_norm", lambda x, weight, *, eps=1e-6, out=None: called.append("cpu"))
    with dispatch.use_registry(registry):
        rms_norm(torch.ones(2, 4), torch.ones(4))
        assert called == []
        rms_norm(torch.ones(2, 4), torch.ones(4), solution="cpu")
        assert called == ["cpu"]


def test_processes_choose_alike(tmp_path: Path) -> None:
    """Each reads the file for itself; neither the time nor the order of its entries matters."""
    first, second = _choice(), _choice(op="norm.fused_add_rms_norm", kernel="cpu_fused_add_rms_norm")
    paths = [_write(tmp_path / "a.json", first, second), _write(tmp_path / "b.json", second, first)]
    code = (
        "import sys, torch\n"
        "from tokenspeed_kernel.platform import platform_of\n"
        "from tokenspeed_kernel.tuning import choice_for\n"
        "here = platform_of(torch.device('cpu'))\n"
        f"print(choice_for(sys.argv[1], 'norm.rms_norm', {str(SIGNATURE)!r}, {{}}, here))\n"
    )
    said = {
        subprocess.run([sys.executable, "-P", "-c", code, path], capture_output=True, text=True, check=True, timeout=120).stdout
        for path in (*paths, *paths)
    }
    assert said == {f"{first}\n"}


def _measured(**times: tuple[float, float, float]) -> Measured:
    timings: dict[str, Timing | Exception] = {name: Timing(*three, "cpu") for name, three in times.items()}
    return Measured(Request("norm.rms_norm", HERE, SIGNATURE), 1, None, True, timings)


def test_a_win_must_exceed_the_noise() -> None:
    default = (10.0, 11.0, 12.0)
    assert decide([_measured(default=default, other=(9.5, 9.8, 10.1))]) is None  # overlaps
    found = decide([_measured(default=default, other=(5.0, 6.0, 7.0), third=(6.0, 6.5, 7.0))])
    assert found is not None
    assert (found.kernel, found.instead_of) == ("other", "default")
    assert found.time_us == pytest.approx(6.0)
    assert found.instead_of_us == pytest.approx(11.0)
    assert decide([_measured(default=default, other=(12.5, 13.0, 14.0))]) is None
    assert decide([_measured(default=default)]) is None


def test_a_kernel_that_loses_on_one_size_is_not_chosen() -> None:
    fast, slow = _measured(default=(10, 11, 12), other=(1, 1, 1)), _measured(default=(10, 11, 12), other=(20, 21, 22))
    assert decide([fast, slow]) is None
    even = _measured(default=(10, 11, 12), other=(10, 11, 12))
    found = decide([fast, even])
    assert found is not None
    assert found.time_us == pytest.approx(math.sqrt(11))


def test_a_kernel_that_fails_is_not_chosen() -> None:
    case = _measured(default=(10, 11, 12), other=(1, 1, 1))
    broken = replace(case, timings={**case.timings, "other": RuntimeError("no")})
    assert decide([case, broken]) is None


@pytest.fixture
def two_kernels(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """The command's registry is the one with two CPU kernels for rms_norm; the first in rank is made slow."""

    def install() -> None:
        right = cpu_kernels.rms_norm

        def slow(x: torch.Tensor, weight: torch.Tensor, *, eps: float = 1e-6, out: torch.Tensor | None = None) -> torch.Tensor:
            for _ in range(200):
                x = x.clone()
            return right(x, weight, eps=eps, out=out)

        monkeypatch.setattr(cpu_kernels, "rms_norm", slow)
        monkeypatch.setattr("tokenspeed_kernel.dispatch.load_registry", lambda config: registry)
        dispatch.reset()

    return install


def test_tune_then_explain(
    two_kernels: Callable[[], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    two_kernels()
    path = tmp_path / "tuned.json"
    arguments = ["norm.rms_norm", "--case", "16x576", "--device", "cpu", "--output", str(path)]
    assert main(["tune", *arguments, "--quick"]) == 0
    assert "Nothing was written" in capsys.readouterr().out
    assert not path.exists()
    assert main(["tune", *arguments]) == 0
    assert f"TOKENSPEED_KERNEL_TUNING={path}" in capsys.readouterr().out
    (choice,) = read_tables(path)["cpu"].choices
    assert (choice.op, choice.kernel, choice.instead_of) == ("norm.rms_norm", "slow_rms_norm", "cpu_rms_norm")
    assert choice.time_us < choice.instead_of_us
    monkeypatch.setenv("TOKENSPEED_KERNEL_TUNING", str(path))
    assert main(["explain", "norm.rms_norm", "--dtype", "fp32", "--platform", "cpu"]) == 0
    assert "tuned: " not in capsys.readouterr().out  # a pretended machine without this one's features
    assert main(["explain", "norm.rms_norm", "--dtype", "fp32", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    if not torch.cuda.is_available():
        assert facts["chosen"] == "slow_rms_norm"
        assert facts["candidates"][0]["tuned"].startswith("tuned: ")
        assert main(["explain", "norm.rms_norm", "--dtype", "fp32"]) == 0
        assert "       tuned: " in capsys.readouterr().out


def test_nothing_to_tune_is_status_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", "norm.rms_norm", "--kernel", "cpu_rms_norm", "--device", "cpu", "--quick"]) == 1
    assert "Nothing was measured" in capsys.readouterr().err
