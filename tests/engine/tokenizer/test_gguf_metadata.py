"""GGUF files come from strangers: every fault in one gives a clear error, whatever the bytes."""

from __future__ import annotations

import random
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizer_gguf_writer import gguf_bytes, write_gguf

from tokenspeed_engine.checkpoint.gguf_metadata import GgufError, GgufMetadata, is_gguf, read_gguf_metadata

FIELDS: dict[str, Any] = {
    "general.architecture": "llama",
    "general.alignment": 64,
    "a.bool": True,
    "a.int": -5,
    "a.float": 0.5,
    "a.strings": ["x", "", "é你"],
    "a.ints": [1, -2, 3],
    "a.floats": [0.25, -1.5],
    "a.bools": [True, False],
    "a.empty": [],
}


def read(tmp_path: Path, raw: bytes) -> GgufMetadata:
    path = tmp_path / "file.gguf"
    path.write_bytes(raw)
    return read_gguf_metadata(path)


def pair(key: str, kind: int, value: bytes) -> bytes:
    name = key.encode()
    return struct.pack("<Q", len(name)) + name + struct.pack("<I", kind) + value


def file_with(pairs: bytes, count: int = 1) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, 0, count) + pairs


def test_every_type_comes_back(tmp_path: Path) -> None:
    metadata = read_gguf_metadata(write_gguf(tmp_path / "x.gguf", FIELDS))
    assert dict(metadata) == FIELDS
    assert (metadata.version, metadata.tensor_count, metadata.alignment) == (3, 0, 64)
    assert metadata.tensor_directory_offset == (tmp_path / "x.gguf").stat().st_size
    assert metadata["a.bool"] is True
    assert len(metadata) == len(FIELDS)


@pytest.mark.parametrize(
    ("kind", "code", "value"),
    [(0, "B", 200), (1, "b", -3), (2, "H", 60_000), (3, "h", -9), (10, "Q", 2**63), (11, "q", -(2**62)), (12, "d", 0.1)],
)
def test_the_other_number_types(tmp_path: Path, kind: int, code: str, value: float) -> None:
    assert read(tmp_path, file_with(pair("k", kind, struct.pack("<" + code, value))))["k"] == value


def test_arrays_of_arrays(tmp_path: Path) -> None:
    inner = struct.pack("<IQ", 4, 2) + struct.pack("<II", 7, 8)
    assert read(tmp_path, file_with(pair("k", 9, struct.pack("<IQ", 9, 2) + inner + inner)))["k"] == [[7, 8], [7, 8]]
    deep = struct.pack("<IQ", 9, 1) * 50
    with pytest.raises(GgufError, match="nested deeper"):
        read(tmp_path, file_with(pair("k", 9, deep + b"\0" * 64)))


def test_the_default_model_agrees_with_the_gguf_package(smollm_path: Path) -> None:
    gguf = pytest.importorskip("gguf", reason="needs the gguf package")
    reader = gguf.GGUFReader(smollm_path)
    metadata = read_gguf_metadata(smollm_path)
    fields = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    assert dict(metadata) == fields
    assert metadata.tensor_count == len(reader.tensors)


def test_is_gguf(tmp_path: Path, smollm_path: Path) -> None:
    assert is_gguf(smollm_path)
    assert not is_gguf(tmp_path)
    assert not is_gguf(tmp_path / "missing")
    (tmp_path / "x").write_bytes(b"GG")
    assert not is_gguf(tmp_path / "x")


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "an empty file"),
        (b"GG", "magic"),
        (b"PK\x03\x04" + b"\0" * 40, "expected magic"),
        (gguf_bytes({}, version=1), "got 1"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**60), "kv_count is"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**60, 0), "tensor_count is"),
        (file_with(struct.pack("<Q", 2**63) + b"x" * 20), "a string of"),
        (file_with(pair("k", 8, struct.pack("<Q", 2**40) + b"x")), "'?k"),
        (file_with(pair("k", 99, b"\0" * 8)), "got 99"),
        (file_with(pair("k", 9, struct.pack("<IQ", 99, 1) + b"\0" * 8)), "element type"),
        (file_with(pair("k", 9, struct.pack("<IQ", 4, 2**61))), "expected at most"),
        (file_with(pair("k", 9, struct.pack("<IQ", 0, 2**24 + 1) + bytes(2**24 + 1))), "expected at most 16777216"),
        (file_with(pair("k", 9, struct.pack("<IQ", 4, 2**20))), "length of 'k' is"),
        (file_with(pair("k", 9, struct.pack("<IQ", 8, 2**20))), "length of 'k' is"),
        (file_with(pair("k", 9, struct.pack("<IQQ", 8, 1, 2**50))), "bytes are left"),
        (file_with(pair("k", 8, struct.pack("<Q", 2) + b"\xff\xfe")), "expected UTF-8"),
        (file_with(pair("k", 9, struct.pack("<IQQ", 8, 1, 1) + b"\xff")), "expected UTF-8"),
        (file_with(pair("k", 7, b"\1") * 2, 2), "appears twice"),
        (file_with(pair("general.alignment", 4, struct.pack("<I", 33))), "power of two"),
        (file_with(pair("general.alignment", 8, struct.pack("<Q", 0))), "power of two"),
    ],
    ids=lambda value: value if isinstance(value, str) else f"{len(value)} bytes",
)
def test_a_corrupt_file_says_what_is_wrong(tmp_path: Path, raw: bytes, message: str) -> None:
    with pytest.raises(GgufError, match=message) as caught:
        read(tmp_path, raw)
    assert "Fix:" in str(caught.value)
    assert "file.gguf" in str(caught.value)


def test_a_missing_file_is_not_called_corrupt(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_gguf_metadata(tmp_path / "missing.gguf")


def test_every_truncation_is_an_error(tmp_path: Path) -> None:
    raw = gguf_bytes(FIELDS)
    for size in range(len(raw)):
        with pytest.raises(GgufError):
            read(tmp_path, raw[:size])


@given(seed=st.integers(0, 2**32 - 1))
def test_random_damage_is_an_error_or_other_values_never_a_crash(tmp_path_factory: pytest.TempPathFactory, seed: int) -> None:
    generator = random.Random(seed)
    raw = bytearray(gguf_bytes(FIELDS))
    for _ in range(generator.randint(1, 6)):
        raw[generator.randrange(4, len(raw))] = generator.choice([0, 1, 8, 9, 127, 128, 255, generator.randrange(256)])
    path = tmp_path_factory.getbasetemp() / "damaged.gguf"
    path.write_bytes(bytes(raw))
    try:
        metadata = read_gguf_metadata(path)
    except GgufError:
        return
    assert metadata.tensor_directory_offset <= len(raw)
