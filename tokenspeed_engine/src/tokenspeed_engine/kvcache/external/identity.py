"""Which weights a page of keys and values comes from."""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path

_SUFFIXES = (".gguf", ".safetensors", ".json")
_SAMPLE_BYTES = 65536
_NUM_SAMPLES = 64


def weights_digest(checkpoint: str | Path) -> str:
    """A digest of a checkpoint that another set of weights does not have.

    Reading hundreds of gigabytes at each start would cost more than the cache gains: of each file count its name, its size, and 64
    samples of 64 KiB, evenly spread, the first and the last bytes among them. Files of up to 4 MiB are read whole. Fine-tuned
    weights differ in every tensor and so in nearly every sample; who edits single numbers in a file by hand must empty the store.

    Args:
        checkpoint: a file, or the folder of the files.
    Returns:
        32 hexadecimal digits.
    """
    path = Path(checkpoint)
    files = sorted(one for one in path.iterdir() if one.suffix in _SUFFIXES) if path.is_dir() else [path]
    digest = blake2b(digest_size=16)
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name}\0{size}\0".encode())
        with open(file, "rb") as opened:
            for index in range(_NUM_SAMPLES):
                if size <= _SAMPLE_BYTES * _NUM_SAMPLES:
                    digest.update(opened.read())
                    break
                opened.seek((size - _SAMPLE_BYTES) * index // (_NUM_SAMPLES - 1))
                digest.update(opened.read(_SAMPLE_BYTES))
    return digest.hexdigest()
