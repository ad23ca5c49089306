"""A user's way: the kernel wheel, then plugin wheels, then without them again, in an environment of its own."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import clean_environment

MakeWheel = Callable[..., Path]

# One process for each stage: what the command line says, what the op returns, what is refused.
LOOK = """
import contextlib, io, json, sys, warnings, torch
from tokenspeed_kernel import PluginError, NoKernelError, dispatch
from tokenspeed_kernel.cli import main
from tokenspeed_kernel.ops.norm import rms_norm
from tokenspeed_kernel.ops.gemm import mm

def command(*arguments):
    out, err = io.StringIO(), io.StringIO()
    dispatch.reset()  # as a process of its own, which reads the plugins and says what is wrong with them
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(list(arguments))
    return {"status": status, "out": out.getvalue(), "err": err.getvalue()}

def asked(solution):
    try:
        return rms_norm(x, weight, eps=1e-5, solution=solution).flatten().tolist()
    except (PluginError, NoKernelError) as error:
        return f"{type(error).__name__}: {error}"

torch.set_num_threads(1)
generator = torch.Generator().manual_seed(0)
x, weight = torch.randn(5, 48, generator=generator), torch.randn(48, generator=generator)
seen = {
    "explain": command("explain", "norm.rms_norm", "--platform", "cpu", "--dtype", "fp32"),
    "pretended": command("explain", "norm.rms_norm", "--platform", "sm_90", "--dtype", "bf16"),
    "other": command("explain", "gemm.mm", "--platform", "cpu", "--dtype", "fp32"),
    "list": command("list", "norm.rms_norm"),
}
dispatch.reset()
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    seen["result"] = rms_norm(x, weight, eps=1e-5).flatten().tolist()
seen["warnings"] = [str(one.message) for one in caught if issubclass(one.category, UserWarning)]
warnings.simplefilter("ignore")
seen["asked"] = {name: asked(name) for name in sys.argv[1:]}
seen["mm"] = mm(x, x).flatten().tolist()
print(json.dumps(seen))
"""


def _look(environment: Any, *solutions: str) -> dict[str, Any]:
    seen: dict[str, Any] = json.loads(environment.run("-c", LOOK, *solutions).stdout)
    return seen


def _largest_difference(one: list[float], other: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


def test_plugins_come_and_go(kernel_environment: Any, make_wheel: MakeWheel, tmp_path: Path) -> None:
    environment = kernel_environment
    before = _look(environment, "acme_kernels")
    assert "1. cpu_rms_norm: chosen" in before["explain"]["out"]
    assert before["asked"]["acme_kernels"].startswith('NoKernelError: norm.rms_norm: no kernel or solution is named "acme_kernels"')

    # The plugin as a vendor makes it: a project, a wheel of it, pip.
    environment.run("-m", "tokenspeed_kernel.cli", "plugin", "new", "acme-kernels", "--directory", str(tmp_path / "project"))
    (tmp_path / "dist").mkdir()
    environment.pip("install", str(clean_environment.build_wheel(tmp_path / "project", tmp_path / "dist")))
    with_plugin = _look(environment, "acme_kernels", "cpu", "reference")
    out = with_plugin["explain"]["out"]
    assert "1. acme_kernels_rms_norm: chosen (PLUGIN, solution acme_kernels; not verified yet)" in out
    assert "2. cpu_rms_norm: eligible (PERFORMANT" in out
    assert "plugin acme_kernels (acme-kernels 0.1.0): loaded" in with_plugin["list"]["out"]
    assert "acme_kernels_rms_norm: rejected" in with_plugin["pretended"]["out"]
    assert "built for cpu, got sm_90" in with_plugin["pretended"]["out"]
    assert with_plugin["warnings"] == []
    assert with_plugin["result"] == with_plugin["asked"]["acme_kernels"], "it is what runs"
    assert with_plugin["asked"]["cpu"] == before["result"], "the built-in one is still there, and the same"
    assert _largest_difference(with_plugin["result"], with_plugin["asked"]["reference"]) < 1e-5
    assert with_plugin["other"]["out"].splitlines()[:-1] == before["other"]["out"].splitlines(), "other ops are left alone"

    # Another wheel with two plugins: one raises when it is imported, one is fine (for another op).
    fine = (
        "from tokenspeed_kernel import CPU, Band, KernelSpec, Plugin\n"
        "def mm(x, weight, bias, out, out_dtype):\n    return (x.double() @ weight.double().T).to(x.dtype)\n"
        "PLUGIN = Plugin((1, 0), (KernelSpec('gemm.mm', 'sad_mm', 'sad', Band.PLUGIN, 'sad_fine:mm', CPU),))\n"
    )
    wheel = make_wheel(
        "sad-kernels",
        add={"sad_broken.py": "import a_driver_that_is_missing\n", "sad_fine.py": fine},
        entry_points="[tokenspeed_kernel.plugins]\nsad = sad_broken:PLUGIN\nsad_fine = sad_fine:PLUGIN\n",
    )
    environment.pip("install", str(wheel))
    told = "plugin sad (sad-kernels 0.1.0) is left out: ModuleNotFoundError: No module named 'a_driver_that_is_missing'"
    with_both = _look(environment, "sad", "acme_kernels")
    assert with_both["warnings"] == [told]
    assert f"PluginWarning: {told}" in with_both["explain"]["err"]
    assert with_both["result"] == with_plugin["result"], "everything else is untouched"
    assert with_both["asked"]["acme_kernels"] == with_plugin["result"]
    assert with_both["asked"]["sad"].startswith('PluginError: norm.rms_norm: solution="sad" belongs to plugin sad (sad-kernels 0.1')
    assert "which failed: ModuleNotFoundError: No module named 'a_driver_that_is_missing'" in with_both["asked"]["sad"]
    assert "plugin sad (sad-kernels 0.1.0): failed: ModuleNotFoundError" in with_both["list"]["out"]
    assert "1. sad_mm: chosen" in with_both["other"]["out"], "the good one of the wheel is used"
    assert _largest_difference(with_both["mm"], before["mm"]) < 1e-4

    environment.pip("uninstall", "--yes", "acme-kernels", "sad-kernels")
    after = _look(environment, "acme_kernels")
    assert after == before, "back as before, to the last digit and word"
