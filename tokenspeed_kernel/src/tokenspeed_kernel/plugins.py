"""Plugins: wheels that bring kernels, found through the entry-point group `tokenspeed_kernel.plugins`.

The entry point names a `Plugin`, or a function without parameters that returns one. A plugin is taken whole or not at
all. One that fails is reported as a `PluginWarning` with its name and the exception, and remembered: whoever then asks
for something of it by name gets an error with the cause, never another kernel.
"""

from __future__ import annotations

import difflib
import importlib.metadata
import importlib.util
import warnings
from collections.abc import Iterable
from dataclasses import dataclass

from tokenspeed_kernel.config import DISABLE, DISABLE_PLUGINS, PREFER, KernelConfig
from tokenspeed_kernel.errors import ConfigWarning, PluginError, PluginWarning
from tokenspeed_kernel.registry import PluginRecord, Registry, collect_builtin
from tokenspeed_kernel.spec import KernelSpec, Library

__all__ = ["API_VERSION", "ENTRY_POINT_GROUP", "Plugin", "load_plugins", "load_registry", "make_plugin", "missing_libraries"]

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
    Raises:
        PluginError: one of them is of another type.
    """

    api_version: tuple[int, int]
    specs: tuple[KernelSpec, ...]

    def __post_init__(self) -> None:
        version = self.api_version
        if not (isinstance(version, tuple) and len(version) == 2 and all(type(part) is int for part in version)):
            raise PluginError(f"plugin: expected api_version as two numbers, (1, 0), got {version!r}")
        specs: tuple[object, ...] = self.specs if isinstance(self.specs, tuple) else (self.specs,)
        strange = next((spec for spec in specs if not isinstance(spec, KernelSpec)), None)
        if strange is not None or not isinstance(self.specs, tuple):
            raise PluginError(f"plugin: expected specs as a tuple of KernelSpec, got {type(strange).__name__}")


def load_registry(config: KernelConfig | None = None) -> Registry:
    """Return a frozen registry of the built-in kernels and those of every installed plugin.

    Two plugins that tie on an op are both disabled for it, unless the settings prefer one: a `PluginWarning` names them.
    A setting that names nothing known is a `ConfigWarning` with close names.

    Args:
        config: settings; read from the environment where left out.
    Raises:
        RegistrationError: two built-in kernels clash (a plugin that clashes is only left out).
    """
    config = config or KernelConfig.from_env()
    registry = collect_builtin()
    load_plugins(registry, config)
    registry.freeze(config.preferred_plugins)
    for message in registry.ties:
        warnings.warn(message, PluginWarning, stacklevel=2)
    for message in _unknown_names(registry, config):
        warnings.warn(message, ConfigWarning, stacklevel=2)
    return registry


def load_plugins(
    registry: Registry, config: KernelConfig, entry_points: Iterable[importlib.metadata.EntryPoint] | None = None
) -> None:
    """Add every installed plugin to `registry`, in order of preference and name; report those that fail, and go on.

    Args:
        registry: still open.
        config: `disabled_plugins` are not even imported; of two plugins with one name for something, a preferred one has it.
        entry_points: instead of those installed.
    """
    found = importlib.metadata.entry_points(group=ENTRY_POINT_GROUP) if entry_points is None else entry_points
    preferred = {name: rank for rank, name in enumerate(config.preferred_plugins)}
    # The order decides which of two plugins with one name is left out: setting, name and wheel, never the order of sys.path.
    for entry_point in sorted(found, key=lambda one: (preferred.get(one.name, len(preferred)), one.name, one.value, _wheel(one))):
        record = _load_one(registry, config, entry_point)
        registry.add_plugin(record)
        if record.error:
            warnings.warn(f"plugin {record.label} is left out: {record.error}", PluginWarning, stacklevel=2)
        for note in record.notes:
            warnings.warn(f"plugin {record.label}: {note}", PluginWarning, stacklevel=2)


def make_plugin(entry_point: importlib.metadata.EntryPoint) -> Plugin:
    """Import what the entry point names, and return the plugin.

    Raises:
        PluginError: it is no plugin, or it was written for another version of the contract.
    """
    target = entry_point.load()
    plugin = target() if callable(target) else target
    if not isinstance(plugin, Plugin):
        raise PluginError(f"{entry_point.value} gave a {type(plugin).__name__}, expected a Plugin")
    major, minor = plugin.api_version
    if major != API_VERSION[0] or minor > API_VERSION[1]:
        wanted, have = f"{major}.{minor}", f"{API_VERSION[0]}.{API_VERSION[1]}"
        older = major < API_VERSION[0]
        fix = "install a newer version of the plugin" if older else "install a newer tokenspeed-kernel"
        raise PluginError(f"it was written for plugin API {wanted}, this package has {have}\nFix: {fix}")
    return plugin


def missing_libraries(specs: Iterable[KernelSpec]) -> dict[Library, list[str]]:
    """Libraries that kernels need and whose top-level package is not installed, each with those kernels. Imports nothing."""
    missing: dict[Library, list[str]] = {}
    for spec in specs:
        for library in spec.libraries:
            if not _is_installed(library.module.partition(".")[0]):
                missing.setdefault(library, []).append(spec.name)
    return missing


def _load_one(registry: Registry, config: KernelConfig, entry_point: importlib.metadata.EntryPoint) -> PluginRecord:
    name, distribution = entry_point.name, _wheel(entry_point)
    if config.disabled_plugins & {name, "all"}:
        return PluginRecord(name, distribution, disabled=True)
    provides: frozenset[str] = frozenset()
    try:
        other = next((record for record in registry.plugins if record.name == name), None)
        if other is not None:
            raise PluginError(f"a plugin named {name!r} is already loaded, from {other.distribution}")
        plugin = make_plugin(entry_point)
        provides = frozenset(one for spec in plugin.specs for one in (spec.solution, spec.name))
        for spec in plugin.specs:
            # The parent packages are imported by find_spec, so only the top one is looked up: kernels stay lazy.
            package = spec.implementation.partition(":")[0].partition(".")[0]
            if not _is_installed(package):
                raise PluginError(f"kernel {spec.name!r}: package {package!r} of {spec.implementation} is not installed")
        registry.add(plugin.specs, origin=distribution, plugin=name)
    except KeyboardInterrupt:
        raise
    # The boundary to someone else's code, which may even exit or panic (neither is an Exception); the cause is kept and shown.
    except BaseException as error:  # noqa: BLE001
        return PluginRecord(name, distribution, f"{type(error).__name__}: {error}", provides, cause=error)
    notes = tuple(
        f"{', '.join(kernels)} cannot be used: library {library.module} is not installed (pip install '{library.requirement}')"
        for library, kernels in missing_libraries(plugin.specs).items()
    )
    return PluginRecord(name, distribution, provides=provides, notes=notes)


def _wheel(entry_point: importlib.metadata.EntryPoint) -> str:
    dist = entry_point.dist
    return f"{dist.name} {dist.version}" if dist is not None else entry_point.value


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):  # in sys.modules without a spec: it is there
        return True


def _unknown_names(registry: Registry, config: KernelConfig) -> Iterable[str]:
    """One message for each name in a setting that nothing has: most likely a typo."""
    installed = [record.name for record in registry.plugins]
    # What a plugin that was not loaded would have brought is not known: a name may be one of its kernels.
    opaque = any(not record.loaded and not record.provides for record in registry.plugins)
    provided = {name for record in registry.plugins for name in record.provides}
    kernels = sorted({*registry.names(), *provided} - set(installed))
    for variable, names, known, what in (
        (DISABLE_PLUGINS, config.disabled_plugins - {"all"}, installed, "no plugin"),
        (PREFER, config.preferred_plugins, installed, "no plugin"),
        (DISABLE, config.disabled, kernels, "no kernel or solution"),
    ):
        for name in sorted(set(names) - set(known)):
            close = difflib.get_close_matches(name, known, n=3, cutoff=0.6)
            if variable == DISABLE and name in installed:
                hint = f"it is a plugin, which {DISABLE_PLUGINS} keeps out"
            elif close:
                hint = f"did you mean {' or '.join(close)}?"
            elif variable == DISABLE and opaque:
                continue
            elif variable == DISABLE:
                hint = "tokenspeed-kernel list shows them."
            else:
                hint = f"installed: {', '.join(installed) or 'none'}."
            yield f"{variable}: {what} is named {name!r}, so it has no effect\nFix: {hint}"
