"""`plugin check`: what passes, and each thing that does not, with its reason."""

from __future__ import annotations

import json
import platform
import re
import sys
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import clean_environment
import pytest

from tokenspeed_kernel.cli import main
from tokenspeed_kernel.errors import PluginError
from tokenspeed_kernel.plugin_kit import Outcome, Report, check_wheel, numerics, probe
from tokenspeed_kernel.plugin_kit.metadata import check_metadata
from tokenspeed_kernel.plugin_kit.report import Finding
from tokenspeed_kernel.plugin_kit.source import check_imports
from tokenspeed_kernel.plugin_kit.wheel import read_wheel
from tokenspeed_kernel.testing import family_cases

MakeWheel = Callable[..., Path]
NUM_SMALL = sum(case.op == "norm.rms_norm" and not case.bench for case in family_cases("norm"))
NUM_CASES = sum(case.op == "norm.rms_norm" for case in family_cases("norm"))
Run = Callable[[Path, str], list[Finding]]


def _replace(old: str, new: str) -> Callable[[str], str]:
    return lambda text: text.replace(old, new)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Do one step of the suite in this process (the suite itself starts a fresh one, which takes seconds)."""

    def step(wheel: Path, name: str) -> list[Finding]:
        site = tmp_path / "site"
        read_wheel(wheel).unpack(site)
        monkeypatch.syspath_prepend(str(site))
        answer = tmp_path / "answer.json"
        probe.main({"step": name, "site": str(site), "wheel": str(wheel), "answer": str(answer)})
        return [Finding.from_facts(one) for one in json.loads(answer.read_text())["findings"]]

    return step


def _failures(findings: list[Finding]) -> list[str]:
    return [f"{one.area}: {one.text}" for one in findings if one.outcome is Outcome.FAILED]


def test_a_new_project_passes_and_nothing_stays_behind(make_wheel: MakeWheel, capsys: pytest.CaptureFixture[str]) -> None:
    wheel = make_wheel("fresh-kernels")
    before = list(sys.path)
    assert main(["plugin", "check", str(wheel)]) == 0
    told = capsys.readouterr().out
    assert "passed: " in told
    assert "0 failed, 0 notes" in told
    for area in ("wheel", "metadata", "contract", "import cost", "capability", "numerics", "fake tensors"):
        assert f"  ok    {area}" in told
    calls = re.search(r"fresh_kernels_rms_norm: (\d+) calls on cpu agree with the reference", told)
    assert calls is not None and int(calls[1]) >= 3 * NUM_SMALL, "every case in every dtype"
    assert "fresh_kernels" not in sys.modules
    assert sys.path == before


def test_what_the_import_does_is_seen_from_outside(make_wheel: MakeWheel, capsys: pytest.CaptureFixture[str]) -> None:
    mischief = (
        "\nimport os, sys, threading, time, torch\n"
        "os.environ['ACME_MODE'] = 'fast'\ntorch.set_default_dtype(torch.bfloat16)\nsys.path.append('/acme')\n"
        "threading.Thread(target=time.sleep, args=(30,), daemon=True, name='acme-worker').start()\n"
        "from mischief import scipy\n"
        "end = time.process_time() + 0.2\nwhile time.process_time() < end: pass\n"
    )
    wheel = make_wheel(
        "mischief",
        source={"plugin.py": lambda text: text.replace("PLUGIN = Plugin", mischief + "\nPLUGIN = Plugin")},
        add={"mischief/scipy.py": "import sys\nsys.modules['scipy'] = sys.modules[__name__]\n"},
    )
    assert main(["plugin", "check", str(wheel), "--static", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["passed"] is False
    told = "\n".join(one["text"] for one in found["findings"] if one["outcome"] == "FAIL")
    assert "environment variable ACME_MODE: None before, fast after" in told
    assert "torch.get_default_dtype(): torch.float32 before, torch.bfloat16 after" in told
    assert "sys.path" in told
    assert "acme-worker" in told
    assert "reading the plugin imports scipy" in told
    assert "ms of processor time of a budget of 50 ms; it imports mischief" in told


@pytest.mark.parametrize(
    ("step", "code", "told"),
    [
        ("plugin.py", "import os\nos.abort()\n", "the interpreter that imported the plugin was ended by SIGABRT"),
        ("norm.py", "import os\nos._exit(7)\n", "the interpreter that ran its kernels ended with status 7"),
    ],
)
def test_a_crash_is_a_finding(make_wheel: MakeWheel, step: str, code: str, told: str) -> None:
    change = _replace("from __future__ import annotations\n", code)
    report = check_wheel(make_wheel("crashing", source={step: change}))
    assert not report.passed
    assert told in "\n".join(report.lines())


def test_a_step_without_end_is_given_up(make_wheel: MakeWheel) -> None:
    wheel = make_wheel("endless", source={"plugin.py": _replace("PLUGIN = Plugin", "while True: pass\nPLUGIN = Plugin")})
    report = check_wheel(wheel, timeout_s=6)
    assert [one.text for one in report.failures()] == ["no end after 6 s"]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"metadata": {"License-Expression": None}}, "no licence"),
        ({"metadata": {"License-Expression": "My own"}}, "License-Expression 'My own'"),
        ({"licence": None}, "it says Apache-2.0, and holds no text of that licence"),
        ({"licence": " \n"}, "holds no text of that licence"),
        ({"metadata": {"License-File": "LICENCE.txt"}}, "LICENCE.txt is not in the wheel"),
        ({"metadata": {"Summary": None}}, "no Summary"),
        ({"metadata": {"Description": ""}}, "no Description"),
        ({"metadata": {"Requires-Python": None}}, "no Requires-Python"),
        ({"metadata": {"Requires-Python": "<3"}}, "Requires-Python <3 does not admit this Python"),
        ({"metadata": {"Requires-Python": "three"}}, "is no version specifier"),
        ({"metadata": {"Name": "other"}}, "METADATA says other 0.1.0, the file's name"),
        ({"requires": ("torch<2",)}, "requires torch<2: installing it would replace the torch"),
        ({"requires": ("torch ==",)}, "Requires-Dist 'torch =='"),
        ({"add": {"tests/test_it.py": ""}}, "it installs tests into site-packages"),
        ({"add": {"tokenspeed_kernel/ops/norm/fast.py": ""}}, "it installs tokenspeed_kernel into site-packages"),
        ({"add": {"flawed/_native.so": "ELF"}}, "it holds machine code, yet its name says that it fits any platform"),
        ({"tag": "cp27-cp27m-win32"}, "it is built for cp27-cp27m-win32, and this is Python"),
    ],
)
def test_the_wheel_as_a_package(make_wheel: MakeWheel, changes: dict[str, object], told: str) -> None:
    report = Report("")
    check_metadata(read_wheel(make_wheel("flawed", **changes)), report)
    assert len(report.failures()) == 1, _failures(report.findings)
    assert told in report.failures()[0].text
    assert report.failures()[0].fix


def test_notes_are_no_failures(make_wheel: MakeWheel) -> None:
    report = Report("")
    check_metadata(read_wheel(make_wheel("noted", requires=("tokenspeed-kernel>=0.1", 'acme; extra == "gpu"'))), report)
    assert report.passed
    assert ["which is another project" in one.text for one in report.findings if one.outcome is Outcome.NOTE] == [True]


def test_an_edited_wheel(make_wheel: MakeWheel) -> None:
    wheel = make_wheel("edited")
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.writestr("edited/late.py", "x = 1\n")
    report = Report("")
    check_metadata(read_wheel(wheel), report)
    assert _failures(report.findings) == ["wheel: edited/late.py is not in RECORD with a digest"]


@pytest.mark.parametrize(
    ("name", "told"),
    [("a.txt", "is no wheel"), ("a-1-py3-none-any.whl", "is no wheel"), ("gone-1.0-py3-none-any.whl", "is not a file")],
)
def test_no_wheel(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, told: str) -> None:
    if not name.startswith("gone"):
        (tmp_path / name).write_text("not a zip file")
    assert main(["plugin", "check", str(tmp_path / name)]) == 2
    assert told in capsys.readouterr().err


def test_a_folder_gets_the_command_that_builds(tmp_path: Path) -> None:
    with pytest.raises(PluginError, match=r"is not a file\nFix: build one with: pip wheel --no-deps"):
        read_wheel(tmp_path)


def test_a_wheel_that_would_write_elsewhere(make_wheel: MakeWheel) -> None:
    with pytest.raises(PluginError, match="would write outside of its folder"):
        read_wheel(make_wheel("escaping", add={"../evil.py": ""}))


def test_private_parts_of_the_kernel_package(make_wheel: MakeWheel) -> None:
    code = (
        "import tokenspeed_kernel.registry\nfrom tokenspeed_kernel.dispatch import reset\nfrom tokenspeed_kernel import selection\n"
        "from tokenspeed_kernel import Band\nfrom tokenspeed_kernel.ops.norm import rms_norm\n"
        "from tokenspeed_kernel.testing import x\n"
    )
    report = Report("")
    check_imports(read_wheel(make_wheel("nosy", add={"nosy/extra.py": code})), report)
    assert [one.partition(" imports ")[2].partition(",")[0] for one in _failures(report.findings)] == [
        "tokenspeed_kernel.dispatch",
        "tokenspeed_kernel.registry",
        "tokenspeed_kernel.selection",
    ]


def test_no_entry_point(make_wheel: MakeWheel) -> None:
    report = check_wheel(make_wheel("mute", entry_points="[console_scripts]\nmute = mute:main\n"))
    assert "no entry point in the group tokenspeed_kernel.plugins" in report.failures()[0].text


@pytest.mark.parametrize(
    ("file", "old", "new", "told"),
    [
        ("plugin.py", "(1, 0)", "(2, 0)", "it was written for plugin API 2.0"),
        ("plugin.py", '"norm.rms_norm"', '"norm.rms_nrom"', "unknown op 'norm.rms_nrom'"),
        ("plugin.py", '_rms_norm",', '_rms_norm" and "cpu_rms_norm",', "is used twice"),
        ("plugin.py", "Band.PLUGIN", "Band.PERFORMANT", "tie: both serve norm.rms_norm"),
        ("plugin.py", "Band.PLUGIN", "Band.REFERENCE", "a plugin cannot register a reference"),
        ("plugin.py", "    specs=(", "    specs=() and (", "it has no kernels"),
        ("plugin.py", "CPU,  #", "Capability(('any',)), requires=('acme_gpu',),  #", 'claims "any" platform, and needs acme_gpu'),
        ("plugin.py", "CPU,  #", "CPU, graph_safe=True,  #", "claims to be safe in a GPU graph, and runs on no GPU"),
        ("plugin.py", "CPU,  #", "Capability(('cpu',), interpreter=True),  #", "does not require triton"),
        ("plugin.py", "CPU,  #", "Capability(('sm_90a',), frozenset({'avx2'})),  #", "no known platform is covered"),
        (
            "plugin.py",
            "CPU,  #",
            "Capability(('sm_90a',)), verified=(Verified(VerifiedBy.SILICON, 'B200 (sm_100)'),),  #",
            "says that it was verified on sm_100, and is built for sm_90a",
        ),
        ("norm.py", "eps: float", "epsilon: float", "takes (x, weight, epsilon, out), expected (x, weight, eps, out)"),
    ],
    ids=str,
)
def test_contract_and_capability(
    make_wheel: MakeWheel, run: Run, request: pytest.FixtureRequest, file: str, old: str, new: str, told: str
) -> None:
    # A name of its own each time: what one of them imported must not be found by the next.
    name = f"loading-{zlib.crc32(request.node.name.encode())}"
    names = "CPU, Band, Capability, KernelSpec, Plugin, Signature, Verified, VerifiedBy"
    changes: dict[str, Callable[[str], str]] = {file: _replace(old, new)}
    if file == "plugin.py":
        changes[file] = lambda text: text.replace(old, new).replace("CPU, Band, KernelSpec, Plugin, Signature", names)
    failures = _failures(run(make_wheel(name, source=changes), "load"))
    assert len(failures) == 1, failures
    assert told in failures[0]


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("+ eps", "+ 2 * eps + 1e-3", "elements differ"),
        ("if out is None else out.copy_(normed)", "", "another tensor"),
        ("    wide = x.float()\n", "    wide = x.double().float()\n    x.add_(1) if x.numel() else None\n", "input x was changed"),
        ("normed.to(x.dtype).contiguous() if", "normed if", "expected dtype torch.bfloat16, got torch.float32"),
        ("    wide = x.float()\n", "    wide = x.float()\n    assert x.is_contiguous(), 'no'\n", "AssertionError: no"),
        ("eps: float = 1e-6", "epsilon: float = 1e-6", "must take (x, weight, eps, out), got (x, weight, epsilon, out)"),
    ],
)
def test_numerics(make_wheel: MakeWheel, run: Run, request: pytest.FixtureRequest, old: str, new: str, told: str) -> None:
    name = f"wrong-{zlib.crc32(request.node.name.encode())}"
    failures = _failures(run(make_wheel(name, source={"norm.py": _replace(old, new)}), "run"))
    assert failures
    assert told in "\n".join(failures)


def test_strides_that_the_fake_implementation_does_not_promise(make_wheel: MakeWheel, run: Run) -> None:
    new = "normed.to(x.dtype).mT.contiguous().mT if out is None and x.dim() > 1 else normed.to(x.dtype) if out is None else"
    wheel = make_wheel("strided", source={"norm.py": _replace("normed.to(x.dtype).contiguous() if out is None else", new)})
    failures = _failures(run(wheel, "run"))
    assert failures
    assert all(one.startswith("fake tensors: strided_rms_norm: ") for one in failures)


def test_nothing_that_runs_here_is_a_failure(make_wheel: MakeWheel, run: Run) -> None:
    change = lambda text: text.replace("CPU, Band", "Band, Capability").replace("CPU,  #", "Capability(('gfx90a',)),  #")  # noqa: E731
    findings = run(make_wheel("elsewhere", source={"plugin.py": change}), "run")
    assert _failures(findings) == ["numerics: no case ran: nothing shows that any kernel of this wheel is right"]
    assert "elsewhere_rms_norm was not run here: built for gfx90a, got cpu" in findings[0].text


def test_no_case_fits(make_wheel: MakeWheel, run: Run) -> None:
    change = _replace('Signature.same(("x", "weight"), ("fp32", "bf16", "fp16"))', '(Signature.of(x="int8", weight="int8"),)')
    failures = _failures(run(make_wheel("narrow", source={"plugin.py": change}), "run"))
    assert f"none of the {NUM_CASES} cases of norm.rms_norm fits it on cpu: x in {{int8}}, got" in failures[0]


def test_an_op_without_cases_is_noted_and_shows_nothing(
    make_wheel: MakeWheel, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(numerics, "cases_of", lambda op: ())
    findings = run(make_wheel("caseless"), "run")
    assert "norm.rms_norm has no cases" in findings[0].text
    assert _failures(findings) == ["numerics: no case ran: nothing shows that any kernel of this wheel is right"]


def test_a_claim_that_no_case_shows_is_noted(make_wheel: MakeWheel, run: Run) -> None:
    change = _replace(
        'Signature.same(("x", "weight"), ("fp32", "bf16", "fp16"))',
        '(Signature.of(x="fp32", weight="fp32"), Signature.of(x="bf16", weight="fp16"))',
    )
    findings = run(make_wheel("boasting", source={"plugin.py": change}), "run")
    assert not _failures(findings)
    assert ["it claims bf16, and no case showed that" in one.text for one in findings if one.outcome is Outcome.NOTE] == [True]


@pytest.mark.slow
def test_the_plugin_of_this_repository_passes(repository: Path, tmp_path: Path) -> None:
    """It is compiled, and every kernel of it meets every case."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        pytest.skip("the plugin is for x86-64 processors")
    wheel = clean_environment.build_wheel(repository / "plugins" / "tokenspeed_kernel_cpu", tmp_path)
    report = check_wheel(wheel)
    assert report.passed, "\n".join(report.lines())
