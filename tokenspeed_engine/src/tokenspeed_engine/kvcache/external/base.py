"""What the third tier is to the engine, whatever keeps the pages."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from tokenspeed_engine.kvcache.pool import KVLayout

PageBytes = NDArray[np.uint8]
"""[page_bytes] uint8, contiguous: one page of the host's pool."""

KEY_BYTES = 32
"""Bytes of a key: the page's chained hash."""

FORMAT_VERSION = 1
"""Of what a page holds; another one finds nothing of this one's."""


class ExternalStoreError(Exception):
    """A store cannot be opened or used as configured; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class PageIdentity:
    """What makes pages of equal tokens equal: pages of another identity are never found.

    Attributes:
        model: a digest of the weights.
        dtype: element type of the cache.
        num_layers: layers that cache.
        num_kv_heads: KV heads of this rank.
        head_dim: elements of a head.
        page_size: tokens in a page.
        rank: which rank's heads these are.
        num_ranks: of so many.
        computed_as: how the weights were used; a quantized and a plain product differ in the last bits.
        version: see FORMAT_VERSION.
    """

    model: str
    dtype: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    rank: int = 0
    num_ranks: int = 1
    computed_as: str = ""
    version: int = FORMAT_VERSION

    @classmethod
    def of(cls, model: str, layout: KVLayout, *, rank: int = 0, num_ranks: int = 1, computed_as: str = "") -> PageIdentity:
        """Args: model: a digest of the weights; layout: of the pool; the rest as the attributes."""
        return cls(
            model=model,
            dtype=str(layout.dtype).removeprefix("torch."),
            num_layers=layout.num_layers,
            num_kv_heads=layout.num_kv_heads,
            head_dim=layout.head_dim,
            page_size=layout.page_size,
            rank=rank,
            num_ranks=num_ranks,
            computed_as=computed_as,
        )

    def as_json(self) -> str:
        """One text for one identity."""
        return json.dumps(asdict(self), sort_keys=True)

    @property
    def digest(self) -> str:
        """32 hexadecimal digits that stand for the identity in names of folders and keys."""
        return blake2b(self.as_json().encode(), digest_size=16).hexdigest()


def page_digest(key: bytes, page: PageBytes) -> bytes:
    """16 bytes that hold for this page under this key: a page in another's place does not pass either."""
    return blake2b(page.data, digest_size=16, key=key).digest()


class ExternalStore(ABC):
    """Pages by key, outside of the engine. One thread uses it.

    A store may forget any page at any time, and may refuse to take one. It never gives a page other than the one that was put under
    its key: what was damaged is dropped, and counted in `num_corrupted`.

    Attributes:
        num_corrupted: pages that were found damaged and dropped.
    """

    num_corrupted: int = 0

    @abstractmethod
    def contains_prefix(self, keys: Sequence[bytes]) -> int:
        """How many of the first keys are there, up to the first that is not. They count as used.

        Args:
            keys: 32 bytes each, in the order of the tokens.
        """

    @abstractmethod
    def get(self, keys: Sequence[bytes], pages: Sequence[PageBytes]) -> int:
        """Read pages.

        Args:
            keys: in the order of the tokens.
            pages: where each goes; written, also beyond the count that is returned.
        Returns:
            How many of the first pages are right.
        """

    @abstractmethod
    def put(self, keys: Sequence[bytes], pages: Sequence[PageBytes]) -> int:
        """Keep pages.

        Args:
            keys: in the order of the tokens.
            pages: their bytes; not read after the call.
        Returns:
            How many of them the store has now.
        """

    @abstractmethod
    def close(self) -> None:
        """Let go of files and connections. What was put stays, where the store is made to last."""
