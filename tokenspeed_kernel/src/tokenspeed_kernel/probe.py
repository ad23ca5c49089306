"""What a call asks selection for: its formats and traits, without running it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tokenspeed_kernel.selection import PROBE, Probed, Request

__all__ = ["request_of"]


def request_of(function: Callable[..., Any], arguments: Mapping[str, Any]) -> Request | None:
    """Return what a public op asks selection for when it is called with these arguments; no kernel runs.

    Args:
        function: a public op.
        arguments: by name.
    Returns:
        The request, or None where the op needs no kernel for these arguments (nothing to compute).
    Raises:
        ShapeError: the op refuses the arguments.
    """
    try:
        function(**arguments, solution=PROBE)
    except Probed as probed:
        return probed.request
    return None
