"""JSON that comes from outside: strict, and decoded without pauses of the garbage collector."""

from __future__ import annotations

import gc
from typing import Any

import msgspec


def decode(raw: bytes | bytearray | str) -> Any:
    """Decode strict JSON (UTF-8, no NaN) to Python's own types. Called from the event loop's thread alone.

    A body may hold millions of lists. The collector counts each one, runs again and again over all that were made, finds
    nothing, and makes decoding six times as long; all streams wait for that.

    Raises:
        msgspec.DecodeError, UnicodeDecodeError: no JSON.  RecursionError: nested too deeply.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return msgspec.json.decode(raw)
    finally:
        if was_enabled:
            gc.enable()
