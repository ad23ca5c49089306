"""Declares a configuration field and its command-line flag in one place."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tokenspeed_engine.config.errors import ConfigError

_METADATA_KEY = "tokenspeed_flag"
_DECIMAL_SUFFIXES = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY_SUFFIXES = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclass(frozen=True, slots=True)
class Flag:
    """One command-line flag of one configuration field.

    Attributes:
        names: the flag's spellings, the documented one first. A boolean field gets its `--no-` form as well.
        parse: from the command line's text to the field's value; raises ValueError saying what is expected.
        help: one line for `--help` and the documentation.
        choices: the accepted values, when there are few.
        repeated: the flag takes one or more values.
        environment: environment variable that is read when the flag is absent.
        secret: the value must never be printed.
        metavar: the placeholder in `--help`.
    """

    names: tuple[str, ...]
    parse: Callable[[str], Any]
    help: str
    choices: tuple[str, ...] = ()
    repeated: bool = False
    environment: str = ""
    secret: bool = False
    metavar: str = ""

    @property
    def is_switch(self) -> bool:
        """True for a boolean flag with a `--no-` form."""
        return self.parse is bool


def option(default: Any, *names: str, parse: Callable[[str], Any], help: str, **extra: Any) -> Any:
    """A dataclass field that is read from a flag.

    Args:
        default: value when neither flag nor environment gives one.
        names: the flag's spellings.
        parse: see Flag.
        help: see Flag.
        extra: further Flag attributes.
    Returns:
        a `dataclasses.field` that carries the Flag.
    """
    flag = Flag(names=names, parse=parse, help=help, **extra)
    return field(default=default, repr=not flag.secret, metadata={_METADATA_KEY: flag})


def flags_of(config_type: type) -> dict[str, Flag]:
    """The flags of a configuration class, by field name, in the order of declaration."""
    return {f.name: f.metadata[_METADATA_KEY] for f in dataclasses.fields(config_type) if _METADATA_KEY in f.metadata}


def check(config: object, name: str, holds: bool, *, expected: str, remedy: str) -> None:
    """Raise the ConfigError of field `name` unless `holds`.

    Raises:
        ConfigError: with the field's flag and value.
    """
    if holds:
        return
    flag = flags_of(type(config))[name]
    value = "(hidden)" if flag.secret else getattr(config, name)
    raise ConfigError(flag.names[0], value, expected=expected, remedy=remedy)


def parse_count(text: str) -> int:
    """A whole number, optionally with a suffix: `4k` is 4,000 and `4K` is 4,096 (m/M, g/G, t/T likewise).

    Raises:
        ValueError: the text is no such number, or is not whole after scaling.
    """
    body, scale = text.strip(), 1
    for suffixes in (_DECIMAL_SUFFIXES, _BINARY_SUFFIXES):
        if body and body[-1] in suffixes:
            body, scale = body[:-1], suffixes[body[-1]]
            break
    try:
        value = float(body) * scale if "." in body else int(body) * scale
    except ValueError:
        raise ValueError("a whole number such as 4096, 4k (4,000) or 4K (4,096)") from None
    if value != int(value):
        raise ValueError("a number that is whole after its suffix is applied")
    return int(value)


def parse_seconds(text: str) -> float:
    """A non-negative finite number of seconds.

    Raises:
        ValueError: the text is no such number.
    """
    try:
        value = float(text)
    except ValueError:
        raise ValueError("a number of seconds such as 30 or 0.5") from None
    if not 0 <= value < float("inf"):
        raise ValueError("a finite number of seconds, 0 or more")
    return value


def parse_fraction(text: str) -> float:
    """A number; its range is checked by the configuration.

    Raises:
        ValueError: the text is no number.
    """
    try:
        return float(text)
    except ValueError:
        raise ValueError("a number such as 0.9") from None
