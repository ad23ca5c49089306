"""Settings of the kernel package. This is its only reader of environment variables."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from tokenspeed_kernel.errors import ConfigError

__all__ = ["DISABLE", "DISABLE_PLUGINS", "PREFER", "TUNING", "KernelConfig"]

DISABLE = "TOKENSPEED_KERNEL_DISABLE"
DISABLE_PLUGINS = "TOKENSPEED_KERNEL_DISABLE_PLUGINS"
PREFER = "TOKENSPEED_KERNEL_PREFER"
TUNING = "TOKENSPEED_KERNEL_TUNING"
_INTERPRET = "TRITON_INTERPRET"


@dataclass(frozen=True, slots=True)
class KernelConfig:
    """What a user can set from outside.

    Args:
        disabled: solutions and kernel names that must not be chosen (TOKENSPEED_KERNEL_DISABLE, comma-separated).
        disabled_plugins: names of plugins that must not be loaded, or `all` (TOKENSPEED_KERNEL_DISABLE_PLUGINS).
        preferred_plugins: names of plugins, the first choice first, that win where two installed plugins tie
            (TOKENSPEED_KERNEL_PREFER).
        triton_interpreter: Triton interprets its kernels on the CPU (TRITON_INTERPRET=1).
        tuning: file of measured choices, as `tokenspeed-kernel tune` writes it; empty for none (TOKENSPEED_KERNEL_TUNING).
    """

    disabled: frozenset[str] = field(default_factory=frozenset)
    disabled_plugins: frozenset[str] = field(default_factory=frozenset)
    triton_interpreter: bool = False
    preferred_plugins: tuple[str, ...] = ()
    tuning: str = ""

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> KernelConfig:
        """Read the settings from the environment.

        Raises:
            ConfigError: an entry of a list is empty, holds white space, or (TOKENSPEED_KERNEL_PREFER) stands twice.
        """
        env = os.environ if environ is None else environ
        return cls(
            disabled=frozenset(_names(env, DISABLE)),
            disabled_plugins=frozenset(_names(env, DISABLE_PLUGINS)),
            preferred_plugins=_ranked(env, PREFER),
            triton_interpreter=env.get(_INTERPRET, "0").lower() in ("1", "true", "yes", "on", "y"),
            tuning=env.get(TUNING, "").strip(),
        )


def _names(env: Mapping[str, str], variable: str) -> tuple[str, ...]:
    text = env.get(variable, "").strip()
    if not text:
        return ()
    names = tuple(name.strip() for name in text.split(","))
    if any(not name or " " in name for name in names):
        raise ConfigError(f"{variable}: expected names separated by commas, got {text!r}\nFix: write a,b,c.")
    return names


def _ranked(env: Mapping[str, str], variable: str) -> tuple[str, ...]:
    names = _names(env, variable)
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(f"{variable}: the order is unclear, {', '.join(twice)} stands twice\nFix: name each plugin once.")
    return names
