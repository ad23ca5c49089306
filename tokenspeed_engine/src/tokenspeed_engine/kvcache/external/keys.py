"""The chained hash of a page: its name in events and in external stores."""

from __future__ import annotations

from hashlib import sha256

import numpy as np
from numpy.typing import NDArray

_ROOT = b"tokenspeed-kv/1\0"


def root_hash(page_size: int, salt: str) -> bytes:
    """What the first page of a prompt is chained to: SHA-256 of `tokenspeed-kv/1`, a zero byte, page_size as 4 bytes, the salt."""
    return sha256(_ROOT + page_size.to_bytes(4, "little") + salt.encode()).digest()


def page_hashes(token_ids: NDArray[np.int32], page_size: int, salt: str = "") -> list[bytes]:
    """The hashes of the full pages of a prompt, 32 bytes each.

    A hash is SHA-256 of the hash before and the page's tokens, each int32, little-endian. The scheduler computes the same where it
    needs them; this is for the parts that run beside it, and for readers of events.

    Args:
        token_ids: [n] int32.
        page_size: tokens in a page.
        salt: of the tenant; empty for none.
    """
    num_pages = len(token_ids) // page_size
    data = np.ascontiguousarray(token_ids[: num_pages * page_size], dtype="<i4").tobytes()
    last, hashes, step = root_hash(page_size, salt), [], 4 * page_size
    for start in range(0, len(data), step):
        last = sha256(last + data[start : start + step]).digest()
        hashes.append(last)
    return hashes
