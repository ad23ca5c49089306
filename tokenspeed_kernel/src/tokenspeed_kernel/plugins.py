"""Plugins: wheels that bring kernels, found through the entry-point group `tokenspeed_kernel.plugins`.

The entry point names a `Plugin`, or a function without parameters that returns one. A plugin is taken whole or not at
all. One that fails is reported as a `PluginWarning` with its name and the exception, and remembered: whoever then asks
for something of it by name gets an error with the cause, never another kernel.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import warnings
from collections.abc import Iterable
from dataclasses import dataclass

from tokenspeed_kernel.config import KernelConfig
from tokenspeed_kernel.errors import PluginError, PluginWarning
from tokenspeed_kernel.registry import PluginRecord, Registry, collect_builtin
from tokenspeed_kernel.spec import KernelSpec

__all__ = ["API_VERSION", "ENTRY_POINT_GROUP", "Plugin", "load_plugins", "load_registry"]

ENTRY_POINT_GROUP = "tokenspeed_kernel.plugins"
"""Group in which a wheel declares its plugin."""

API_VERSION = (1, 0)
"""Version of the contract between plugins and this package: (major, minor). A minor step only adds."""


@dataclass(frozen=True, slots=True)
class Plugin:
    """What a plugin wheel offers.

    Args:
        api_version: `API_VERSION` of the package that the plugin was written against, written out as numbers.
        specs: its kernels, for ops that exist; any band but REFERENCE.
    """

    api_version: tuple[int, int]
    specs: tuple[KernelSpec, ...]


def load_registry(config: KernelConfig | None = None) -> Registry:
    """Return a frozen registry of the built-in kernels and those of every installed plugin.

    Args:
        config: settings; read from the environment where left out.
    Raises:
        RegistrationError: two built-in kernels clash (a plugin that clashes is only left out).
    """
    registry = collect_builtin()
    load_plugins(registry, config or KernelConfig.from_env())
    return registry.freeze()


def load_plugins(
    registry: Registry, config: KernelConfig, entry_points: Iterable[importlib.metadata.EntryPoint] | None = None
) -> None:
    """Add every installed plugin to `registry`, in order of name; report those that fail, and go on.

    Args:
        registry: still open.
        config: `disabled_plugins` are not even imported.
        entry_points: instead of those installed.
    """
    found = importlib.metadata.entry_points(group=ENTRY_POINT_GROUP) if entry_points is None else entry_points
    # The order decides which of two clashing plugins is left out: name and wheel, never the order of sys.path.
    for entry_point in sorted(found, key=lambda one: (one.name, one.value)):
        record = _load_one(registry, config, entry_point)
        registry.add_plugin(record)
        if record.error:
            warnings.warn(
                f"plugin {record.name} ({record.distribution}) is left out: {record.error}", PluginWarning, stacklevel=2
            )


def _load_one(registry: Registry, config: KernelConfig, entry_point: importlib.metadata.EntryPoint) -> PluginRecord:
    dist = entry_point.dist
    distribution = f"{dist.name} {dist.version}" if dist is not None else entry_point.value
    if config.disabled_plugins & {entry_point.name, "all"}:
        return PluginRecord(entry_point.name, distribution, disabled=True)
    provides: frozenset[str] = frozenset()
    try:
        if any(record.name == entry_point.name for record in registry.plugins):
            raise PluginError(f"a plugin named {entry_point.name!r} is already loaded")
        target = entry_point.load()
        plugin = target() if callable(target) else target
        if not isinstance(plugin, Plugin):
            raise PluginError(f"{entry_point.value} gave a {type(plugin).__name__}, expected a Plugin")
        provides = frozenset(name for spec in plugin.specs for name in (spec.solution, spec.name))
        _check(plugin)
        registry.add(plugin.specs, origin=distribution)
    except Exception as error:  # noqa: BLE001 - the boundary to someone else's code; the cause is kept and shown
        return PluginRecord(entry_point.name, distribution, f"{type(error).__name__}: {error}", provides, cause=error)
    return PluginRecord(entry_point.name, distribution, provides=provides)


def _check(plugin: Plugin) -> None:
    major, minor = plugin.api_version
    if major != API_VERSION[0] or minor > API_VERSION[1]:
        wanted, have = f"{major}.{minor}", f"{API_VERSION[0]}.{API_VERSION[1]}"
        older = major < API_VERSION[0]
        fix = "install a newer version of the plugin" if older else "install a newer tokenspeed-kernel"
        raise PluginError(f"it was written for plugin API {wanted}, this package has {have}\nFix: {fix}")
    for spec in plugin.specs:
        # The parent packages are imported by find_spec, so only the top one is looked up: kernels stay lazy.
        package = spec.implementation.partition(":")[0].partition(".")[0]
        if importlib.util.find_spec(package) is None:
            raise PluginError(f"kernel {spec.name!r}: package {package!r} of {spec.implementation} is not installed")
