"""The Mooncake store: its configuration everywhere, the rest against a real master where the package and its libraries are.

A real one binds to all interfaces, so the test runs in a network namespace of its own (it needs `unshare` and the right to use it).
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tokenspeed_engine.kvcache.external import ExternalStoreError, MooncakeConfig, MooncakeStore, PageIdentity

GOOD = {
    "local_hostname": "127.0.0.1",
    "metadata_server": "http://127.0.0.1:8080/metadata",
    "master_server_address": "127.0.0.1:50051",
}


def written(folder: Path, content: object) -> Path:
    path = folder / "mooncake.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_the_configuration_is_read(tmp_path: Path) -> None:
    config = MooncakeConfig.read(written(tmp_path, {**GOOD, "global_segment_size": 2**26, "protocol": "rdma"}))
    assert (config.master_server_address, config.global_segment_size, config.protocol) == ("127.0.0.1:50051", 2**26, "rdma")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "--mooncake-config"),
        ([], "expected local_hostname, metadata_server, master_server_address, and of .* got list"),
        ({}, "expected local_hostname"),
        ({**GOOD, "no_such_key": 1}, "got .*no_such_key"),
        ({**GOOD, "global_segment_size": "1G"}, "global_segment_size: expected a number of bytes, 0 or more, got '1G'"),
        ({**GOOD, "global_segment_size": -1}, "expected a number of bytes, 0 or more, got -1"),
        ({**GOOD, "protocol": 5}, "protocol: expected a text, got 5"),
    ],
)
def test_a_wrong_configuration_says_what_is_wrong(tmp_path: Path, content: object, message: str) -> None:
    with pytest.raises(ExternalStoreError, match=message):
        MooncakeConfig.read(written(tmp_path, content))


def test_without_the_package_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mooncake.store", None)
    with pytest.raises(ExternalStoreError, match=r"Fix: pip install mooncake-transfer-engine-non-cuda .*libibverbs1"):
        MooncakeStore(MooncakeConfig(**GOOD), PageIdentity("w", "float32", 1, 1, 8, 16), 512)


REAL = textwrap.dedent(
    """
    import fcntl, socket, struct, subprocess, sys, time
    from hashlib import sha256
    from pathlib import Path
    import numpy as np

    # Loopback, and a second address on it: Mooncake wants one that is not 127.0.0.1.
    control = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    fcntl.ioctl(control, 0x8914, struct.pack("16sh14x", b"lo", 0x41))
    fcntl.ioctl(control, 0x8916, struct.pack("16s", b"lo:1") + struct.pack("HH4s8x", 2, 0, socket.inet_aton("10.9.9.9")))
    fcntl.ioctl(control, 0x8914, struct.pack("16sh14x", b"lo:1", 0x41))
    import mooncake
    from tokenspeed_engine.kvcache.external import ExternalStoreError, MooncakeConfig, MooncakeStore, PageIdentity

    PAGE = 30_000_000 // 8
    config = MooncakeConfig(local_hostname="127.0.0.1", metadata_server="http://127.0.0.1:8080/metadata",
                            master_server_address="127.0.0.1:50051", global_segment_size=192 * 2**20)
    identity = PageIdentity("weights", "float32", 2, 3, 64, 16)
    key = lambda n: sha256(str(n).encode()).digest()
    page = lambda n: np.random.default_rng(n).integers(0, 256, PAGE, dtype=np.uint8)
    try:
        MooncakeStore(config, identity, PAGE)
        raise SystemExit("joined a master that does not run")
    except ExternalStoreError as error:
        assert "start mooncake_master first" in str(error), error
    master = subprocess.Popen([str(Path(mooncake.__file__).with_name("mooncake_master")), "-rpc_port", "50051",
        "-enable_http_metadata_server", "-http_metadata_server_host", "127.0.0.1", "-http_metadata_server_port", "8080",
        "-metrics_port", "9003"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        time.sleep(2)
        store = MooncakeStore(config, identity, PAGE)
        numbers = list(range(24))  # more than the staging memory has room for at once
        assert store.contains_prefix([key(n) for n in numbers]) == 0
        assert store.put([key(n) for n in numbers], [page(n) for n in numbers]) == 24
        assert store.put([key(3)], [page(3)]) == 1
        assert store.contains_prefix([key(n) for n in [*numbers, 99, 0]]) == 24
        buffers = [np.zeros(PAGE, dtype=np.uint8) for _ in range(26)]
        assert store.get([key(n) for n in [*numbers, 99, 0]], buffers) == 24
        assert all(np.array_equal(buffers[n], page(n)) for n in numbers)
        other = MooncakeStore(config, PageIdentity("others", "float32", 2, 3, 64, 16), PAGE)
        assert other.contains_prefix([key(0)]) == 0
        # Damage: a value with a byte changed, and one cut short.
        value = np.concatenate((page(0), np.zeros(16, dtype=np.uint8)))
        for number, damaged in ((50, value.tobytes()), (51, value[:100].tobytes())):
            assert store._client.put(store._name(key(number)), damaged) == 0
            assert store.contains_prefix([key(number)]) == 1
            assert store.get([key(number)], buffers[:1]) == 0
            assert store.contains_prefix([key(number)]) == 0, "a damaged page was not dropped"
        assert store.num_corrupted == 2
        other.close()
        store.close()
        print("MOONCAKE OK")
    finally:
        master.kill()
        master.wait()
    """
)


@pytest.mark.slow
def test_against_a_real_master(tmp_path: Path) -> None:
    if importlib.util.find_spec("mooncake") is None:
        pytest.skip("mooncake is not installed: pip install mooncake-transfer-engine-non-cuda")
    if subprocess.run(["unshare", "--net", "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("needs the right to make a network namespace: Mooncake binds to all interfaces")
    done = subprocess.run(
        ["unshare", "--net", sys.executable, "-c", REAL],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=dict(os.environ),
    )
    assert "MOONCAKE OK" in done.stdout, done.stdout[-2000:] + done.stderr[-4000:]
