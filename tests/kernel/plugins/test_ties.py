"""Two plugins that were written apart: who wins, who is left out, and what is said (public report R1, the whole kind)."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tokenspeed_kernel import dispatch
from tokenspeed_kernel.config import KernelConfig
from tokenspeed_kernel.errors import ConfigError, NoKernelError, PluginError, PluginWarning
from tokenspeed_kernel.ops.norm import rms_norm
from tokenspeed_kernel.platform import parse_platform
from tokenspeed_kernel.plugins import load_registry
from tokenspeed_kernel.registry import Registry
from tokenspeed_kernel.selection import Request, evaluate, select

InstallWheel = Callable[..., Path]
PluginSource = Callable[..., str]


def _install(install_wheel: InstallWheel, name: str, source: str, version: str = "1.0") -> None:
    sys.modules.pop(f"{name}_plugin", None)
    install_wheel(name, {name: f"{name}_plugin:PLUGIN"}, {f"{name}_plugin": source}, version=version)


def _load(config: KernelConfig | None = None) -> tuple[Registry, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        registry = load_registry(config)
    return registry, [str(one.message) for one in caught if issubclass(one.category, PluginWarning)]


def _chosen(registry: Registry, platform: str = "cpu", solution: str | None = None) -> str:
    return select(registry, Request("norm.rms_norm", parse_platform(platform), solution=solution)).name


@pytest.fixture(params=[("alpha", "zeta"), ("zeta", "alpha")], ids=["alpha first on sys.path", "zeta first on sys.path"])
def tied(request: pytest.FixtureRequest, install_wheel: InstallWheel, plugin_source: PluginSource) -> tuple[str, str]:
    """Two plugins that tie, in both orders on sys.path."""
    for name in reversed(request.param):
        _install(install_wheel, name, plugin_source(name, {"alpha": 1, "zeta": 2}[name]))
    return ("alpha", "zeta")


def test_a_tie_disables_both_for_that_op_and_names_the_setting(tied: tuple[str, str]) -> None:
    registry, messages = _load()
    assert messages == [
        "plugins alpha (alpha 1.0) and zeta (zeta 1.0) tie, and neither is used for norm.rms_norm: "
        "some calls fit a kernel of each\n"
        "  norm.rms_norm: alpha_rms_norm and zeta_rms_norm in band PLUGIN, priority 0\n"
        "Fix: set TOKENSPEED_KERNEL_PREFER=alpha (or zeta) to say which one wins, or keep one out."
    ]
    chosen = _chosen(registry)
    assert registry.origin(chosen) == "tokenspeed_kernel" or "cpu_native" in chosen, "built-ins stay"
    reasons = {
        one.spec.name: [reason.text for reason in one.reasons]
        for one in evaluate(registry, Request("norm.rms_norm", parse_platform("cpu")))
    }
    why = "disabled: plugin {} ties with plugin {} on this op; TOKENSPEED_KERNEL_PREFER={} (or {}) decides"
    assert reasons["alpha_rms_norm"] == [why.format("alpha", "zeta", "alpha", "zeta")]
    assert reasons["zeta_rms_norm"] == [why.format("zeta", "alpha", "zeta", "alpha")]
    states = {record.name: record.status for record in registry.plugins}
    assert states["alpha"] == "loaded; not used for norm.rms_norm: it ties with plugin zeta, TOKENSPEED_KERNEL_PREFER decides"


def test_a_tied_kernel_asked_for_by_name_is_an_error_and_never_another(tied: tuple[str, str]) -> None:
    with pytest.warns(PluginWarning, match="tie"), pytest.raises(NoKernelError, match="ties with plugin zeta") as caught:
        rms_norm(torch.ones(1, 2), torch.ones(2), solution="alpha_rms_norm")
    assert "say which plugin wins with TOKENSPEED_KERNEL_PREFER" in str(caught.value)


@pytest.mark.parametrize(("prefer", "value"), [("alpha", 1.0), ("zeta", 2.0), ("zeta,alpha", 2.0), ("alpha,zeta", 1.0)])
def test_the_setting_decides(tied: tuple[str, str], monkeypatch: pytest.MonkeyPatch, prefer: str, value: float) -> None:
    monkeypatch.setenv("TOKENSPEED_KERNEL_PREFER", prefer)
    registry, messages = _load()
    assert not messages
    assert _chosen(registry) == f"{prefer.partition(',')[0]}_rms_norm"
    assert rms_norm(torch.ones(1, 2), torch.ones(2)).eq(value).all()
    loser = "zeta" if value == 1.0 else "alpha"
    assert _chosen(registry, solution=loser) == f"{loser}_rms_norm", "the other one can still be asked for"


def test_the_tie_is_only_where_both_have_a_kernel(install_wheel: InstallWheel, plugin_source: PluginSource) -> None:
    other = """
PLUGIN = Plugin(
    api_version=(1, 0),
    specs=(
        *PLUGIN.specs,
        KernelSpec(
            op="norm.fused_add_rms_norm", name="zeta_fused", solution="zeta", band=Band.PLUGIN,
            implementation="zeta_plugin:rms_norm", capability=Capability(("cpu",)),
        ),
    ),
)
"""
    _install(install_wheel, "alpha", plugin_source("alpha"))
    _install(install_wheel, "zeta", plugin_source("zeta") + other)
    registry, messages = _load()
    assert len(messages) == 1
    fused = select(registry, Request("norm.fused_add_rms_norm", parse_platform("cpu"))).name
    assert fused == "zeta_fused", "the tie is on the other op alone"


def test_three_plugins_and_one_preferred(install_wheel: InstallWheel, plugin_source: PluginSource) -> None:
    for name in ("alpha", "beta", "zeta"):
        _install(install_wheel, name, plugin_source(name))
    registry, messages = _load(KernelConfig(preferred_plugins=("beta",)))
    assert [message.partition(" tie")[0] for message in messages] == ["plugins alpha (alpha 1.0) and zeta (zeta 1.0)"]
    assert _chosen(registry) == "beta_rms_norm"


@pytest.mark.parametrize(
    "apart",
    [
        {"targets": ("sm_90a",)},
        {"formats": ("bf16",)},
        {"band": "PORTABLE"},
    ],
)
def test_plugins_that_cannot_meet_do_not_tie(
    install_wheel: InstallWheel, plugin_source: PluginSource, apart: dict[str, object]
) -> None:
    _install(install_wheel, "alpha", plugin_source("alpha"))
    _install(install_wheel, "zeta", plugin_source("zeta", **apart))
    registry, messages = _load()
    assert not messages
    assert registry.ties == ()
    assert _chosen(registry) == "alpha_rms_norm"


def test_a_tie_with_a_built_in_leaves_the_plugin_out(install_wheel: InstallWheel, plugin_source: PluginSource) -> None:
    _install(install_wheel, "alpha", plugin_source("alpha", band="PERFORMANT"))
    registry, messages = _load()
    assert len(messages) == 1
    assert "alpha_rms_norm and cpu_rms_norm tie" in messages[0]
    assert "alpha_rms_norm" not in [spec.name for spec in registry]


@pytest.mark.parametrize("first", ["alpha", "zeta"])
def test_a_kernel_name_that_two_plugins_have_is_refused_with_both(
    install_wheel: InstallWheel, plugin_source: PluginSource, first: str
) -> None:
    order = ("alpha", "zeta") if first == "zeta" else ("zeta", "alpha")
    for name in order:
        source = plugin_source(name).replace(f'name="{name}_rms_norm"', 'name="turbo_rms_norm"')
        _install(install_wheel, name, source.replace('("cpu",)', '("cpu",)' if name == "alpha" else '("sm_90a",)'))
    registry, messages = _load()
    assert messages == [
        "plugin zeta (zeta 1.0) is left out: RegistrationError: registry: kernel name 'turbo_rms_norm' is used twice: "
        "alpha_plugin:rms_norm (alpha 1.0) and zeta_plugin:rms_norm (zeta 1.0)\n"
        "Fix: rename one; a name is unique over all packages."
    ]
    assert registry.origin("turbo_rms_norm") == "alpha 1.0", "whatever the order of sys.path"
    registry, _ = _load(KernelConfig(preferred_plugins=("zeta",)))
    assert registry.origin("turbo_rms_norm") == "zeta 1.0", "and the preferred one has it"


def test_a_solution_belongs_to_one_distribution(install_wheel: InstallWheel, plugin_source: PluginSource) -> None:
    _install(install_wheel, "alpha", plugin_source("alpha").replace('solution="alpha"', 'solution="cpu"'))
    registry, messages = _load()
    assert len(messages) == 1
    assert "the solution name 'cpu' of alpha 1.0 is taken by tokenspeed_kernel" in messages[0]
    assert _chosen(registry, solution="cpu") == "cpu_rms_norm", "who asks for the built-in's name gets the built-in"
    with pytest.warns(PluginWarning), pytest.raises(PluginError, match="belongs to plugin alpha"):
        rms_norm(torch.ones(1, 2), torch.ones(2), solution="alpha_rms_norm")


def test_a_plugin_may_not_be_called_like_a_solution(install_wheel: InstallWheel, plugin_source: PluginSource) -> None:
    source = plugin_source("alpha")
    install_wheel("alpha", {"triton": "alpha_plugin:PLUGIN"}, {"alpha_plugin": source})
    sys.modules.pop("alpha_plugin", None)
    _, messages = _load()
    assert len(messages) == 1
    assert "the plugin name 'triton' of alpha 1.0 is taken by tokenspeed_kernel" in messages[0]


def test_two_wheels_with_one_plugin_name(install_wheel: InstallWheel, plugin_source: PluginSource) -> None:
    for name in ("zeta", "alpha"):
        sys.modules.pop(f"{name}_plugin", None)
        install_wheel(name, {"same": f"{name}_plugin:PLUGIN"}, {f"{name}_plugin": plugin_source(name)})
    registry, messages = _load()
    assert messages == [
        "plugin same (zeta 1.0) is left out: PluginError: a plugin named 'same' is already loaded, from alpha 1.0"
    ]
    assert _chosen(registry) == "alpha_rms_norm"


def test_a_preference_that_contradicts_itself_is_refused() -> None:
    with pytest.raises(ConfigError, match="alpha stands twice"):
        KernelConfig.from_env({"TOKENSPEED_KERNEL_PREFER": "alpha,zeta,alpha"})


def test_settings_by_name_instead_of_the_environment(tied: tuple[str, str]) -> None:
    x, weight = torch.ones(1, 2), torch.ones(2)
    dispatch.configure(KernelConfig(preferred_plugins=("zeta",)))
    assert rms_norm(x, weight).eq(2).all()
    dispatch.configure(KernelConfig(disabled_plugins=frozenset({"zeta"})))
    assert rms_norm(x, weight).eq(1).all()
    with pytest.raises(PluginError, match="is disabled"):
        rms_norm(x, weight, solution="zeta")
    dispatch.configure(KernelConfig(disabled_plugins=frozenset({"all"})))
    assert rms_norm(x, weight).sub(1).abs().max() < 1e-3
