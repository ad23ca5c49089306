"""`doctor`: what is missing, what it costs, and when the status says that something is broken."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tokenspeed_kernel.cli import main
from tokenspeed_kernel.platform import Vendor, current_platform
from tokenspeed_kernel.tuning import Choice, Table, forget, machine_pins, write_table

PLUGIN = """
from tokenspeed_kernel import CPU, Band, KernelSpec, Library, Plugin
SPEC = KernelSpec("norm.rms_norm", "acme_rms_norm", "acme", Band.PLUGIN, "math:sqrt", CPU, requires=({requires},))
PLUGIN = Plugin((1, 0), (SPEC,))
"""


@pytest.fixture
def doctor(capsys: pytest.CaptureFixture[str]) -> Callable[[], tuple[int, dict[str, Any]]]:
    """Run `doctor --json`, and return the status and what it says."""

    def run() -> tuple[int, dict[str, Any]]:
        capsys.readouterr()
        status = main(["doctor", "--json"])
        return status, json.loads(capsys.readouterr().out)

    return run


def test_a_healthy_machine(doctor: Callable[[], tuple[int, dict[str, Any]]], capsys: pytest.CaptureFixture[str]) -> None:
    status, facts = doctor()
    assert (status, facts["problems"]) == (0, [])
    assert facts["platform"]["arch"]
    assert facts["torch"]["version"].startswith("2.")
    libraries = {one["library"]: one for one in facts["libraries"]}
    assert "triton_rms_norm" in {**libraries["triton"]["kernels_here"], **libraries["triton"]["kernels_elsewhere"]}
    assert main(["doctor"]) == 0
    assert "No problem." in capsys.readouterr().out


def test_a_library_that_is_not_installed_costs_kernels_and_is_no_fault(
    doctor: Callable[[], tuple[int, dict[str, Any]]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Absent:
        def find_spec(self, name: str, *_: object) -> None:
            if name == "triton":
                raise ModuleNotFoundError("No module named 'triton'", name="triton")

    real = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *rest: None if name == "triton" else real(name, *rest))
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # otherwise its kernels are none for a CPU
    monkeypatch.setattr(sys, "meta_path", [Absent(), *sys.meta_path])
    for name in [name for name in sys.modules if name.partition(".")[0] == "triton"]:
        monkeypatch.delitem(sys.modules, name)
    status, facts = doctor()
    triton = next(one for one in facts["libraries"] if one["library"] == "triton")
    assert triton["problem"] == "library triton does not import: ModuleNotFoundError: No module named 'triton'"
    assert triton["remedy"] == "pip install 'triton'"
    assert not triton["installed"]
    assert triton["kernels_here"]["triton_rms_norm"] == "norm.rms_norm"
    assert status == 0
    main(["doctor"])
    out = capsys.readouterr().out
    assert "triton_rms_norm (norm.rms_norm)" in out
    assert "Fix: pip install 'triton'." in out


def test_a_library_that_is_there_but_broken_is_a_fault(
    doctor: Callable[[], tuple[int, dict[str, Any]]],
    install_wheel: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    (tmp_path / "acme_library.py").write_text("raise OSError('libacme.so.3: cannot open shared object file')")
    monkeypatch.syspath_prepend(str(tmp_path))
    install_wheel("acme_doctor", {"acme": "acme_doctor:PLUGIN"}, {"acme_doctor": PLUGIN.format(requires="'acme_library'")})
    status, facts = doctor()
    assert status == 1
    assert facts["problems"] == ["library acme_library does not import: OSError: libacme.so.3: cannot open shared object file"]


def test_a_plugin_that_fails_is_a_fault(
    doctor: Callable[[], tuple[int, dict[str, Any]]], install_wheel: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    install_wheel("acme_broken", {"broken": "acme_broken:PLUGIN"}, {"acme_broken": "raise RuntimeError('no driver')"})
    status, facts = doctor()
    assert status == 1
    assert len(facts["problems"]) == 1
    assert "broken" in facts["problems"][0]
    assert "RuntimeError: no driver" in facts["problems"][0]
    assert main(["doctor"]) == 1
    assert "1 problems." in capsys.readouterr().out


def test_a_setting_that_names_nothing_is_a_fault(
    doctor: Callable[[], tuple[int, dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKENSPEED_KERNEL_DISABLE", "triton_rms_nrom")
    status, facts = doctor()
    assert status == 1
    assert "did you mean triton_rms_norm" in facts["problems"][0]
    monkeypatch.setenv("TOKENSPEED_KERNEL_DISABLE", "triton,cpu_rms_norm")
    status, facts = doctor()
    assert (status, facts["disabled"]) == (0, ["cpu_rms_norm", "triton"])


def test_ops_that_only_the_reference_serves_are_told(
    doctor: Callable[[], tuple[int, dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKENSPEED_KERNEL_DISABLE_PLUGINS", "all")
    monkeypatch.setenv("TOKENSPEED_KERNEL_DISABLE", "triton,cpu_rms_norm")
    assert "norm.rms_norm" in doctor()[1]["reference_only"]


def test_the_file_of_measured_choices_is_told(
    doctor: Callable[[], tuple[int, dict[str, Any]]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert doctor()[1]["tuning"] is None
    platform = current_platform()
    kind = "cpu" if platform.vendor is Vendor.CPU else "gpu"
    choice = Choice("norm.rms_norm", "x=fp32, weight=fp32", (), "cpu_rms_norm", "other", 1.0, 2.0)
    path = tmp_path / "t.json"
    monkeypatch.setenv("TOKENSPEED_KERNEL_TUNING", str(path))
    write_table(path, kind, Table(machine_pins(platform, ()), (choice,)))
    status, facts = doctor()
    assert (status, facts["tuning"]) == (0, {"file": str(path), "choices": 1, "problem": ""})
    forget()
    write_table(path, kind, Table({**machine_pins(platform, ()), "torch": "1.0"}, (choice,)))
    status, facts = doctor()
    assert status == 1
    assert "torch: measured with 1.0, here is" in facts["problems"][0]
    forget()
