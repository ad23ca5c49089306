"""Plugins: wheels on sys.path with real metadata (public report R1)."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tokenspeed_kernel import dispatch
from tokenspeed_kernel.config import KernelConfig
from tokenspeed_kernel.errors import NoKernelError, PluginError, PluginWarning, RegistrationError
from tokenspeed_kernel.ops.norm import rms_norm
from tokenspeed_kernel.plugins import API_VERSION, load_registry

InstallWheel = Callable[..., Path]

GOOD = """
from tokenspeed_kernel import CPU, Band, KernelSpec, Plugin, Signature


def rms_norm(x, weight, *, eps=1e-6, out=None):
    result = x * 0 + 42
    return result if out is None else out.copy_(result)


PLUGIN = Plugin(
    api_version=(1, 0),
    specs=(
        KernelSpec(
            op="norm.rms_norm", name="{name}_rms_norm", solution="{name}", band=Band.PLUGIN,
            implementation="{module}:rms_norm", capability=CPU, formats=Signature.product(x=("fp32",), weight=("fp32",)),
        ),
    ),
)
"""


def _good(name: str = "vendor", module: str = "vendor_plugin") -> str:
    return GOOD.replace("{name}", name).replace("{module}", module)


def _load(config: KernelConfig | None = None) -> tuple[object, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        registry = load_registry(config)
    return registry, [str(one.message) for one in caught if issubclass(one.category, PluginWarning)]


def test_r1_failing_plugin_is_reported_the_good_one_loads_and_nothing_falls_back(install_wheel: InstallWheel) -> None:
    install_wheel(
        "acme-kernels",
        {"acme-bad": "acme_bad:PLUGIN", "acme-good": "acme_good:PLUGIN"},
        {"acme_bad": "import acme_driver_that_is_missing\n", "acme_good": _good("acme", "acme_good")},
        version="2.5",
    )
    x, weight = torch.ones(2, 4), torch.ones(4)
    with pytest.warns(PluginWarning) as caught:
        result = rms_norm(x, weight)
    assert [str(one.message) for one in caught] == [
        "plugin acme-bad (acme-kernels 2.5) is left out: ModuleNotFoundError: No module named 'acme_driver_that_is_missing'"
    ]
    assert torch.equal(result, torch.full((2, 4), 42.0)), "the good plugin's kernel is the one that is used"
    assert not torch.equal(rms_norm(x, weight, solution="cpu"), result), "the package itself stays usable"
    with pytest.raises(PluginError, match=r"belongs to plugin acme-bad .*failed: ModuleNotFoundError") as failed:
        rms_norm(x, weight, solution="acme-bad")
    assert isinstance(failed.value.__cause__, ModuleNotFoundError)
    # What a plugin that does not even import would have provided is not known: an unknown name lists the failed plugins.
    with pytest.raises(NoKernelError, match=r'named "acme_turbo"\n  plugin acme-bad: failed: ModuleNotFoundError') as unknown:
        rms_norm(x, weight, solution="acme_turbo")
    assert isinstance(unknown.value.__cause__, ModuleNotFoundError)


def test_all_or_nothing_and_its_solutions_are_remembered(install_wheel: InstallWheel) -> None:
    two = _good("half", "half_plugin").replace("    ),\n)\n", "        BAD,\n    ),\n)\n")
    bad = "\nBAD = KernelSpec('norm.rms_nrom', 'half_other', 'half', Band.PLUGIN, 'half_plugin:rms_norm', CPU)\n\n\ndef rms"
    install_wheel("half", {"half": "half_plugin:PLUGIN"}, {"half_plugin": two.replace("\n\ndef rms", bad, 1)})
    registry, messages = _load()
    (message,) = messages
    refused = "plugin half (half 1.0) is left out: RegistrationError: kernel 'half_other': unknown op 'norm.rms_nrom'\nFix: known: "
    assert message.startswith(f"{refused}norm.rms_norm")
    assert not [spec.name for spec in registry if spec.name.startswith("half")]  # type: ignore[attr-defined]
    with pytest.warns(PluginWarning), pytest.raises(PluginError, match='solution="half_rms_norm" belongs to plugin half') as caught:
        rms_norm(torch.ones(1, 2), torch.ones(2), solution="half_rms_norm")
    assert isinstance(caught.value.__cause__, RegistrationError)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (_good().replace("(1, 0)", "(2, 0)"), "it was written for plugin API 2.0, this package has 1.0"),
        (_good().replace("(1, 0)", "(1, 7)"), "plugin API 1.7, this package has 1.0\nFix: install a newer tokenspeed-kernel"),
        (_good().replace("(1, 0)", "(0, 9)"), "plugin API 0.9, this package has 1.0\nFix: install a newer version of the plugin"),
        ("PLUGIN = 3\n", "gave a int, expected a Plugin"),
        ("def PLUGIN():\n    raise RuntimeError('no licence file')\n", "RuntimeError: no licence file"),
        ("PLUGIN = undefined\n", "NameError: name 'undefined' is not defined"),
        ("OTHER = 3\n", "AttributeError: module 'vendor_plugin' has no attribute 'PLUGIN'"),
        (
            _good().replace("vendor_plugin:rms_norm", "absent_package.kernels:rms_norm"),
            "package 'absent_package' of absent_package",
        ),
        (_good().replace("vendor_rms_norm", "cpu_rms_norm"), "kernel name 'cpu_rms_norm' is used twice"),
        (_good().replace("band=Band.PLUGIN", "band=Band.PERFORMANT"), "cpu_rms_norm and vendor_rms_norm tie"),
    ],
)
def test_faulty_plugin(install_wheel: InstallWheel, source: str, message: str) -> None:
    install_wheel("vendor", {"vendor": "vendor_plugin:PLUGIN"}, {"vendor_plugin": source})
    sys.modules.pop("vendor_plugin", None)
    registry, messages = _load()
    assert len(messages) == 1
    assert message in messages[0]
    assert messages[0].startswith("plugin vendor (vendor 1.0) is left out: ")
    assert "vendor_rms_norm" not in [spec.name for spec in registry]  # type: ignore[attr-defined]


def test_api_version_is_the_documented_one() -> None:
    assert API_VERSION == (1, 0), "a new version needs new cases above and a line in docs/plugins.md"


def test_function_that_makes_the_plugin(install_wheel: InstallWheel) -> None:
    source = _good("made", "made_plugin") + "\n\ndef make():\n    return PLUGIN\n"
    install_wheel("made", {"made": "made_plugin:make"}, {"made_plugin": source})
    registry, messages = _load()
    assert not messages
    assert registry.specs("norm.rms_norm")[0].name == "made_rms_norm"  # type: ignore[attr-defined]
    assert registry.origin("made_rms_norm") == "made 1.0"  # type: ignore[attr-defined]


def test_kernel_with_a_wrong_signature_is_refused_when_bound(install_wheel: InstallWheel) -> None:
    source = _good("bent", "bent_plugin").replace("def rms_norm(x, weight, *, eps", "def rms_norm(x, w, *, eps")
    install_wheel("bent", {"bent": "bent_plugin:PLUGIN"}, {"bent_plugin": source})
    with pytest.raises(ImportError, match=r"must take \(x, weight, eps, out\), got \(x, w, eps, out\)"):
        rms_norm(torch.ones(1, 2), torch.ones(2))


@pytest.mark.parametrize("value", ["off-plugin", "all"])
def test_disabled_by_environment(install_wheel: InstallWheel, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    install_wheel("off", {"off-plugin": "off_plugin:PLUGIN"}, {"off_plugin": "raise SystemExit('imported')\n"})
    monkeypatch.setenv("TOKENSPEED_KERNEL_DISABLE_PLUGINS", value)
    registry, messages = _load()
    assert not messages
    records = [one for one in registry.plugins if one.name == "off-plugin"]  # type: ignore[attr-defined]
    assert [(one.disabled, one.loaded) for one in records] == [(True, False)]
    with pytest.raises(PluginError, match="which is disabled by TOKENSPEED_KERNEL_DISABLE_PLUGINS"):
        rms_norm(torch.ones(1, 2), torch.ones(2), solution="off-plugin")


def test_plugin_is_listed_by_the_command_line(install_wheel: InstallWheel, monkeypatch: pytest.MonkeyPatch) -> None:
    site = install_wheel(
        "shown",
        {"shown": "shown_plugin:PLUGIN", "broken": "no_such_plugin_module:PLUGIN"},
        {"shown_plugin": _good("shown", "shown_plugin")},
    )
    program = (
        f"import sys; sys.path.insert(0, {str(site)!r}); from tokenspeed_kernel.cli import main; sys.exit(main(['list', 'norm']))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "shown_rms_norm" in done.stdout
    assert "plugin shown (shown 1.0): loaded" in done.stdout
    assert "plugin broken (shown 1.0): failed: ModuleNotFoundError: No module named 'no_such_plugin_module'" in done.stdout
    assert "PluginWarning: plugin broken" in done.stderr


def test_reset_reads_plugins_again(install_wheel: InstallWheel) -> None:
    x, weight = torch.ones(1, 2), torch.ones(2)
    before = rms_norm(x, weight)
    install_wheel("later", {"later": "later_plugin:PLUGIN"}, {"later_plugin": _good("later", "later_plugin")})
    assert torch.equal(rms_norm(x, weight), before)
    dispatch.reset()
    assert torch.equal(rms_norm(x, weight), torch.full((1, 2), 42.0))
