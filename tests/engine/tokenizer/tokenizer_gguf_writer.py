"""Small GGUF files for tests: metadata only, no tensors."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

UINT32, INT32, FLOAT32, BOOL, STRING, ARRAY = 4, 5, 6, 7, 8, 9


def _string(text: str | bytes) -> bytes:
    raw = text if isinstance(text, bytes) else text.encode("utf-8")
    return struct.pack("<Q", len(raw)) + raw


def _scalar(value: Any) -> tuple[int, bytes]:
    if isinstance(value, bool):
        return BOOL, struct.pack("<B", value)
    if isinstance(value, int):
        return (INT32, struct.pack("<i", value)) if value < 0 else (UINT32, struct.pack("<I", value))
    if isinstance(value, float):
        return FLOAT32, struct.pack("<f", value)
    return STRING, _string(value)


def _value(value: Any) -> bytes:
    if not isinstance(value, list):
        kind, raw = _scalar(value)
        return struct.pack("<I", kind) + raw
    if value and isinstance(value[0], int) and not isinstance(value[0], bool):
        items = [struct.pack("<i", item) for item in value]
        kind = INT32
    else:
        pairs = [_scalar(item) for item in value]
        kind, items = (pairs[0][0] if pairs else UINT32), [raw for _, raw in pairs]
    return struct.pack("<IIQ", ARRAY, kind, len(value)) + b"".join(items)


def gguf_bytes(fields: Mapping[str, Any], *, version: int = 3, magic: bytes = b"GGUF", num_tensors: int = 0) -> bytes:
    """The bytes of a GGUF file with these fields; arrays of int become int32, non-negative ints uint32."""
    body = b"".join(_string(key) + _value(value) for key, value in fields.items())
    return magic + struct.pack("<IQQ", version, num_tensors, len(fields)) + body


def write_gguf(path: Path, fields: Mapping[str, Any]) -> Path:
    """Write such a file."""
    path.write_bytes(gguf_bytes(fields))
    return path
