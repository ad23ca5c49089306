"""A plugin that fails is reported, remembered, and never silently replaced; a setting that names nothing is told."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tokenspeed_kernel.config import KernelConfig
from tokenspeed_kernel.errors import ConfigWarning, KernelLoadError, NoKernelError, PluginWarning
from tokenspeed_kernel.ops.norm import rms_norm
from tokenspeed_kernel.plugins import load_registry

InstallWheel = Callable[..., Path]
PluginSource = Callable[..., str]


def _install(install_wheel: InstallWheel, name: str, source: str) -> None:
    sys.modules.pop(f"{name}_plugin", None)
    install_wheel(name, {name: f"{name}_plugin:PLUGIN"}, {f"{name}_plugin": source})


def _messages(config: KernelConfig | None, category: type[Warning]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        load_registry(config)
    return [str(one.message) for one in caught if issubclass(one.category, category)]


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("import acme_driver_that_is_missing", "ModuleNotFoundError: No module named 'acme_driver_that_is_missing'"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("class Panic(BaseException): pass\nraise Panic('from another language')", "Panic: from another language"),
        ("def PLUGIN(): raise OSError('libacme.so.1: cannot open shared object file')", "OSError: libacme.so.1: cannot open"),
        ("def broken(:", "SyntaxError: invalid syntax"),
        ("from tokenspeed_kernel import Plugin\nPLUGIN = Plugin(api_version='1.0', specs=())", "api_version as two numbers"),
        ("from tokenspeed_kernel import Plugin\nPLUGIN = Plugin((1, 0), specs=(1,))", "a tuple of KernelSpec, got int"),
        ("from tokenspeed_kernel import Plugin\nPLUGIN = Plugin((1, 0), specs=None)", "a tuple of KernelSpec, got NoneType"),
        ("from tokenspeed_kernel import Pluginn", "ImportError: cannot import name 'Pluginn'"),
    ],
)
def test_whatever_it_raises_everything_else_is_untouched(
    install_wheel: InstallWheel, plugin_source: PluginSource, source: str, told: str
) -> None:
    _install(install_wheel, "good", plugin_source("good", 7))
    _install(install_wheel, "broken", source)
    with pytest.warns(PluginWarning) as caught:
        result = rms_norm(torch.ones(1, 2), torch.ones(2))
    assert result.eq(7).all()
    assert len(caught) == 1
    assert str(caught[0].message).startswith("plugin broken (broken 1.0) is left out: ")
    assert told in str(caught[0].message)


def test_ctrl_c_during_the_import_of_a_plugin_is_no_failure_of_it(install_wheel: InstallWheel) -> None:
    _install(install_wheel, "slow", "raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        load_registry()


def test_a_missing_library_is_told_at_once_and_as_the_reason(install_wheel: InstallWheel, plugin_source: PluginSource) -> None:
    _install(install_wheel, "acme", plugin_source("acme", requires=("acme_runtime",)))
    assert _messages(None, PluginWarning) == [
        "plugin acme (acme 1.0): acme_rms_norm cannot be used: library acme_runtime is not installed (pip install 'acme_runtime')"
    ]
    with pytest.warns(PluginWarning), pytest.raises(NoKernelError, match="library acme_runtime does not import: ModuleNotFound"):
        rms_norm(torch.ones(1, 2), torch.ones(2), solution="acme")


def test_a_broken_library_is_told_when_another_kernel_is_taken_for_it(
    install_wheel: InstallWheel, plugin_source: PluginSource
) -> None:
    sys.modules.pop("acme_broken_runtime", None)
    site = install_wheel("runtime", {}, {"acme_broken_runtime": "raise OSError('no driver')"})
    assert site.exists()
    _install(install_wheel, "acme", plugin_source("acme", 9, requires=("acme_broken_runtime",)))
    assert _messages(None, PluginWarning) == [], "nothing is imported to find out, so nothing can be told yet"
    with pytest.warns(PluginWarning) as caught:
        assert not rms_norm(torch.ones(1, 2), torch.ones(2)).eq(9).any()
    message = str(caught[0].message)
    assert message.startswith("plugin acme (acme 1.0): acme_rms_norm is not used for norm.rms_norm, ")
    assert "library acme_broken_runtime does not import: OSError: no driver" in message
    assert message.endswith("Fix: repair the library, or set TOKENSPEED_KERNEL_DISABLE=acme_rms_norm.")


@pytest.mark.parametrize(
    ("parameters", "told"),
    [
        ("x, weight, *, epsilon=1e-6, out=None", r"must take \(x, weight, eps, out\), got \(x, weight, epsilon, out\)"),
        ("x, weight, *, eps=1e-6", r"must take \(x, weight, eps, out\), got \(x, weight, eps\)"),
        ("*args, **kwargs", r"got \(args, kwargs\)"),
    ],
)
def test_wrong_parameters_are_an_error_that_says_so(
    install_wheel: InstallWheel, plugin_source: PluginSource, parameters: str, told: str
) -> None:
    source = plugin_source("acme").replace("x, weight, *, eps=1e-6, out=None", parameters)
    _install(install_wheel, "acme", source)
    with pytest.raises(KernelLoadError, match=told) as caught:
        rms_norm(torch.ones(1, 2), torch.ones(2))
    assert "or set TOKENSPEED_KERNEL_DISABLE=acme_rms_norm to do without it" in str(caught.value)


def test_a_function_that_hides_its_parameters(install_wheel: InstallWheel, plugin_source: PluginSource) -> None:
    _install(install_wheel, "acme", plugin_source("acme") + "\nrms_norm = dict.fromkeys.__class__\nrms_norm = type\n")
    with pytest.raises(KernelLoadError, match="does not tell its parameters") as caught:
        rms_norm(torch.ones(1, 2), torch.ones(2))
    assert "put a Python function around it" in str(caught.value)


@pytest.mark.parametrize(
    ("variable", "value", "told"),
    [
        ("TOKENSPEED_KERNEL_DISABLE_PLUGINS", "acmee", "no plugin is named 'acmee', so it has no effect\nFix: did you mean acme?"),
        ("TOKENSPEED_KERNEL_DISABLE_PLUGINS", "xyzzy", "no plugin is named 'xyzzy', so it has no effect\nFix: installed: "),
        ("TOKENSPEED_KERNEL_PREFER", "akme", "no plugin is named 'akme', so it has no effect\nFix: did you mean acme?"),
        ("TOKENSPEED_KERNEL_DISABLE", "tritn", "is named 'tritn', so it has no effect\nFix: did you mean tri"),
        ("TOKENSPEED_KERNEL_DISABLE", "acme_rms_nrom", "Fix: did you mean acme_rms_norm"),
        ("TOKENSPEED_KERNEL_DISABLE", "xyzzy", "Fix: tokenspeed-kernel list shows them."),
    ],
)
def test_a_typo_in_a_setting_is_told_with_close_names(
    install_wheel: InstallWheel,
    plugin_source: PluginSource,
    monkeypatch: pytest.MonkeyPatch,
    variable: str,
    value: str,
    told: str,
) -> None:
    _install(install_wheel, "acme", plugin_source("acme"))
    monkeypatch.setenv(variable, value)
    messages = _messages(None, ConfigWarning)
    assert len(messages) == 1
    assert messages[0].startswith(f"{variable}: ")
    assert told in messages[0]


def test_a_plugin_in_the_setting_for_kernels(install_wheel: InstallWheel, plugin_source: PluginSource) -> None:
    sys.modules.pop("acme_plugin", None)
    install_wheel("acme", {"acme-kernels": "acme_plugin:PLUGIN"}, {"acme_plugin": plugin_source("acme")})
    messages = _messages(KernelConfig(disabled=frozenset({"acme-kernels"})), ConfigWarning)
    assert len(messages) == 1
    assert messages[0].endswith("Fix: it is a plugin, which TOKENSPEED_KERNEL_DISABLE_PLUGINS keeps out")


def test_settings_that_name_something_are_not_told(install_wheel: InstallWheel, plugin_source: PluginSource) -> None:
    _install(install_wheel, "acme", plugin_source("acme"))
    _install(install_wheel, "broken", "raise OSError")
    config = KernelConfig(
        disabled=frozenset({"triton", "acme_rms_norm", "cpu_rms_norm", "whatever.the.broken.one.has"}),
        disabled_plugins=frozenset({"broken"}),
        preferred_plugins=("acme",),
    )
    assert _messages(config, ConfigWarning) == []
    assert _messages(KernelConfig(disabled_plugins=frozenset({"all"})), ConfigWarning) == []
