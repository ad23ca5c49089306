"""Exceptions of the kernel package. Everything it raises on purpose derives from `TokenSpeedKernelError`.

Each message gives the operation, what was expected, what came, and the remedy.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

__all__ = [
    "ConfigError",
    "ConfigWarning",
    "FormatError",
    "GroupError",
    "KernelLoadError",
    "NoKernelError",
    "PlatformError",
    "PluginError",
    "PluginWarning",
    "RegistrationError",
    "ShapeError",
    "TokenSpeedKernelError",
    "UnknownOpError",
    "close_names",
]


class TokenSpeedKernelError(Exception):
    """Base class of every error that this package raises on purpose."""


class ShapeError(TokenSpeedKernelError, ValueError):
    """An operand's shape, dtype, stride or value does not fit the op's contract.

    Args:
        op: name of the op, `family.op`.
        expected: what the contract asks for.
        got: what came.
        fix: what the caller can do; without it the message ends after `got`.
    """

    def __init__(self, op: str, *, expected: str, got: str, fix: str | None = None) -> None:
        self.op, self.expected, self.got, self.fix = op, expected, got, fix
        text = f"{op}: expected {expected}, got {got}"
        super().__init__(f"{text}\nFix: {fix}." if fix else text)


class FormatError(TokenSpeedKernelError, ValueError):
    """An operand format is unknown or does not say all that it must (a bare "fp8")."""


class GroupError(TokenSpeedKernelError, RuntimeError):
    """A process group is not initialised, is unknown, does not hold this process, or has no back end for the device."""


class PlatformError(TokenSpeedKernelError, ValueError):
    """A platform or a build target is unknown, or the device has no platform here."""


class ConfigError(TokenSpeedKernelError, ValueError):
    """A configuration value or environment variable cannot be used."""


class UnknownOpError(TokenSpeedKernelError, LookupError):
    """No op has that name; the message suggests close ones."""


class NoKernelError(TokenSpeedKernelError, LookupError):
    """No kernel qualifies. The message lists every kernel that was considered with the exact reason.

    Args:
        request: the op, the platform, formats and traits that were asked for, on one line.
        rejections: (kernel name, reason) pairs in order of rank.
        fix: the remedy, without "Fix:" and without the full stop.
    """

    def __init__(self, request: str, rejections: Iterable[tuple[str, str]], fix: str) -> None:
        self.request, self.fix = request, fix
        self.rejections = tuple(rejections)
        lines = [request, *(f"  {name}: {reason}" for name, reason in self.rejections), f"Fix: {fix}."]
        super().__init__("\n".join(lines))


class KernelLoadError(TokenSpeedKernelError, ImportError):
    """The selected kernel's module cannot be imported, or the function in it does not fit the op."""


class RegistrationError(TokenSpeedKernelError, ValueError):
    """A spec contradicts its contract, clashes with another one's name, or ties with it."""


class PluginError(TokenSpeedKernelError, RuntimeError):
    """A plugin could not be loaded, or something of a plugin that failed to load was asked for by name."""


class PluginWarning(UserWarning):
    """A plugin was left out; the message gives its name and the exception."""


class ConfigWarning(UserWarning):
    """A setting names something that is not there; the message suggests close names."""


def close_names(name: str, known: Sequence[str]) -> str:
    """Say what may have been meant by a name that is not known, for the end of a message.

    Args:
        name: as it was given.
        known: the names that would do.
    Returns:
        `did you mean a or b?`, or all that is known where nothing is close.
    """
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    return f"did you mean {' or '.join(close)}?" if close else f"known: {', '.join(known) or 'none'}."
