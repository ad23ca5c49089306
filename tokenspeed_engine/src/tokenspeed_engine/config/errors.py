"""The error of every configuration mistake: names the flag, the value and the remedy."""

from __future__ import annotations


class ConfigError(ValueError):
    """A flag, environment variable or field holds a value that cannot work.

    Attributes:
        flag: the command-line flag (or environment variable) to change.
        value: what was given, as text.
        expected: what would have been accepted.
        remedy: what to do.
    """

    def __init__(self, flag: str, value: object, *, expected: str, remedy: str) -> None:
        self.flag = flag
        self.value = str(value)
        self.expected = expected
        self.remedy = remedy
        super().__init__(f"{flag}: expected {expected}, got {value!r}\nFix: {remedy}")
