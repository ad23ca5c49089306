"""Selection on pretended platforms is what the golden files say."""

from __future__ import annotations

import difflib
import importlib.util
import sys
from pathlib import Path

import pytest

from tokenspeed_kernel import selection
from tokenspeed_kernel.registry import collect_builtin

_spec = importlib.util.spec_from_file_location("selection_golden", Path(__file__).with_name("selection_golden.py"))
assert _spec is not None and _spec.loader is not None
selection_golden = importlib.util.module_from_spec(_spec)
sys.modules["selection_golden"] = selection_golden
_spec.loader.exec_module(selection_golden)
FAMILIES = selection_golden.families(collect_builtin())


@pytest.mark.parametrize("family", FAMILIES)
def test_selection_is_as_recorded(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "library_problem", lambda library: None)
    path = selection_golden.FOLDER / f"{family}.txt"
    recorded = path.read_text(encoding="utf-8") if path.exists() else ""
    found = selection_golden.golden(family)
    difference = "\n".join(difflib.unified_diff(recorded.splitlines(), found.splitlines(), "recorded", "found", n=1, lineterm=""))
    command = f"python tests/kernel/core/selection_golden.py {family}"
    assert not difference, f"{difference}\nIf that is meant: {command}"


def test_no_file_is_left_over() -> None:
    assert {path.stem for path in selection_golden.FOLDER.iterdir()} == set(FAMILIES)


def test_the_files_tell_platforms_apart() -> None:
    text = (selection_golden.FOLDER / "gemm.txt").read_text(encoding="utf-8")
    for part in ("gemm.mm\n", "\n    cpu", "sm_121", "gfx950", "triton_mm", "cublas_mm"):
        assert part in text
