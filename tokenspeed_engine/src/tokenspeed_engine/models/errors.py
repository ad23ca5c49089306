"""Models that are refused."""

from __future__ import annotations


class UnsupportedModelError(ValueError):
    """The architecture, or a feature that its configuration asks for, is not supported; the message names it."""
