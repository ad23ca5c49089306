"""The third tier in a Mooncake store: pages in the memory of many hosts.

The package is optional, and imported when a store is opened. It needs libraries that not every system has; the error names what is
missing.
"""

from __future__ import annotations

import importlib
import json
import logging
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from tokenspeed_engine.kvcache.external.base import ExternalStore, ExternalStoreError, PageBytes, PageIdentity, page_digest

logger = logging.getLogger(__name__)

_CONNECT_TIMEOUT_S = 5.0
_DIGEST_BYTES = 16
_STAGING_BYTES = 64 * 2**20
_INSTALL = (
    "pip install mooncake-transfer-engine-non-cuda (or mooncake-transfer-engine on a machine with CUDA); on Debian and Ubuntu it "
    "needs libibverbs1, libnl-3-200 and libnl-route-3-200"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MooncakeConfig:
    """How this engine joins a Mooncake store: the keys of Mooncake's own configuration file.

    Attributes:
        local_hostname: under which the other members reach this host.
        metadata_server: `http://HOST:PORT/metadata`, `etcd://...`, or P2PHANDSHAKE.
        master_server_address: HOST:PORT of the master.
        protocol: tcp or rdma.
        device_name: RDMA devices, separated by commas.
        global_segment_size: bytes of this host's memory that it lends to the store; 0 lends none.
        local_buffer_size: bytes for transfers of its own.
    """

    local_hostname: str
    metadata_server: str
    master_server_address: str
    protocol: str = "tcp"
    device_name: str = ""
    global_segment_size: int = 0
    local_buffer_size: int = 16 * 2**20

    @classmethod
    def read(cls, path: str | Path) -> MooncakeConfig:
        """Read a JSON file.

        Raises:
            ExternalStoreError: it is not there, no JSON object, or a key is missing, unknown or of a wrong type.
        """
        where = f"mooncake: {path}"
        try:
            given = json.loads(Path(path).expanduser().read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ExternalStoreError(f"{where}: {error}. Fix: name a JSON file with --mooncake-config") from error
        types = {field.name: int if field.name.endswith("_size") else str for field in fields(cls)}
        required = [field.name for field in fields(cls)][:3]
        if not isinstance(given, dict) or set(given) - set(types) or not set(required) <= set(given):
            got = ", ".join(sorted(given)) if isinstance(given, dict) else type(given).__name__
            optional = ", ".join(sorted(set(types) - set(required)))
            raise ExternalStoreError(f"{where}: expected {', '.join(required)}, and of {optional} what is wanted, got {got}")
        for name, value in given.items():
            if type(value) is not types[name] or (isinstance(value, int) and value < 0):
                wanted = "a number of bytes, 0 or more" if types[name] is int else "a text"
                raise ExternalStoreError(f"{where}: {name}: expected {wanted}, got {value!r}")
        return cls(**given)


class MooncakeStore(ExternalStore):
    """Pages in a Mooncake store. What is stored under a key is the page and 16 bytes of digest.

    Args:
        config: how to join.
        identity: whose pages: the beginning of each key.
        page_bytes: bytes of a page.
    Raises:
        ExternalStoreError: the package or a library is missing, or the store cannot be joined.
    """

    def __init__(self, config: MooncakeConfig, identity: PageIdentity, page_bytes: int) -> None:
        if page_bytes < 1:
            raise ValueError(f"mooncake: expected pages of 1 byte or more, got {page_bytes}")
        self._prefix = f"tokenspeed-kv/{identity.digest}/"
        self._page_bytes = page_bytes
        self._value_bytes = page_bytes + _DIGEST_BYTES
        self._client: Any = _client_class()()
        _check_reachable(config)
        joined = self._client.setup(
            {
                "local_hostname": config.local_hostname,
                "metadata_server": config.metadata_server,
                "global_segment_size": str(config.global_segment_size),
                "local_buffer_size": str(config.local_buffer_size),
                "protocol": config.protocol,
                "rdma_devices": config.device_name,
                "master_server_addr": config.master_server_address,
            }
        )
        if joined != 0:
            raise ExternalStoreError(
                f"mooncake: {config.local_hostname} cannot join master {config.master_server_address} with metadata at "
                f"{config.metadata_server} over {config.protocol} (code {joined}). "
                "Fix: start mooncake_master first, and check the addresses in --mooncake-config"
            )
        num_slots = max(1, _STAGING_BYTES // self._value_bytes)
        # Values lie here on their way: no page of the host's pool is in the hands of the library's threads, and none is written
        # that was not checked.
        self._staging = np.zeros((num_slots, self._value_bytes), dtype=np.uint8)
        code = self._client.register_buffer(self._staging.ctypes.data, self._staging.nbytes)
        if code != 0:
            self._client.close()
            raise ExternalStoreError(f"mooncake: {self._staging.nbytes:,} bytes cannot be registered for transfers (code {code})")

    def contains_prefix(self, keys: Sequence[bytes]) -> int:
        """See `ExternalStore.contains_prefix`."""
        count = 0
        for first in range(0, len(keys), 1024):
            found = self._client.batch_is_exist([self._name(key) for key in keys[first : first + 1024]])
            there = next((index for index, state in enumerate(found) if state != 1), len(found))
            count += there
            if there < len(found):
                break
        return count

    def get(self, keys: Sequence[bytes], pages: Sequence[PageBytes]) -> int:
        """See `ExternalStore.get`."""
        count = 0
        for part in self._parts(len(keys)):
            places, sizes = self._places(len(part))
            sizes_read = self._client.batch_get_into([self._name(keys[index]) for index in part], places, sizes)
            for slot, index in enumerate(part):
                if sizes_read[slot] < 0:
                    return count
                if not self._is_right(keys[index], slot, sizes_read[slot]):
                    logger.warning("mooncake: page %s is damaged and dropped; its tokens are computed anew", keys[index].hex())
                    self.num_corrupted += 1
                    self._client.remove(self._name(keys[index]), True)
                    return count
                pages[index][:] = self._staging[slot, : self._page_bytes]
                count += 1
        return count

    def put(self, keys: Sequence[bytes], pages: Sequence[PageBytes]) -> int:
        """See `ExternalStore.put`."""
        count = 0
        for part in self._parts(len(keys)):
            names = [self._name(keys[index]) for index in part]
            known = self._client.batch_is_exist(names)
            fresh = [slot for slot, state in enumerate(known) if state != 1]
            count += len(part) - len(fresh)
            if not fresh:
                continue
            for slot, place in enumerate(fresh):
                index = part[place]
                self._staging[slot, : self._page_bytes] = pages[index]
                digest = page_digest(keys[index], self._staging[slot, : self._page_bytes])
                self._staging[slot, self._page_bytes :] = np.frombuffer(digest, dtype=np.uint8)
            codes = self._client.batch_put_from([names[place] for place in fresh], *self._places(len(fresh)))
            count += sum(code == 0 for code in codes)
        return count

    def close(self) -> None:
        """See `ExternalStore.close`."""
        self._client.unregister_buffer(self._staging.ctypes.data)
        self._client.close()

    def _name(self, key: bytes) -> str:
        return self._prefix + key.hex()

    def _parts(self, count: int) -> Iterator[range]:
        step = len(self._staging)
        return (range(first, min(first + step, count)) for first in range(0, count, step))

    def _places(self, count: int) -> tuple[list[int], list[int]]:
        return [self._staging[slot].ctypes.data for slot in range(count)], [self._value_bytes] * count

    def _is_right(self, key: bytes, slot: int, size: int) -> bool:
        value = self._staging[slot]
        return size == self._value_bytes and page_digest(key, value[: self._page_bytes]) == value[self._page_bytes :].tobytes()


def _check_reachable(config: MooncakeConfig) -> None:
    """Mooncake itself tries for a minute and a half before it says that nobody answers."""
    host, _, port = config.master_server_address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=_CONNECT_TIMEOUT_S).close()
    except (OSError, ValueError, OverflowError) as error:
        raise ExternalStoreError(
            f"mooncake: no master answers at {config.master_server_address} ({error}). "
            "Fix: start mooncake_master first, and check master_server_address in --mooncake-config"
        ) from error


def _client_class() -> Any:
    try:
        return importlib.import_module("mooncake.store").MooncakeDistributedStore
    except (ImportError, AttributeError) as error:
        raise ExternalStoreError(f"mooncake: the package cannot be used ({error}). Fix: {_INSTALL}") from error
