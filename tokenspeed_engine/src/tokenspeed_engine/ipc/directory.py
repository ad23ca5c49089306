"""The private directory of the sockets: mode 0700, a path short enough, removed at the end."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
import time
from pathlib import Path

from tokenspeed_engine.ipc.errors import SocketPathError

# sockaddr_un.sun_path is 108 bytes on Linux and 104 on macOS, the closing zero byte included.
MAX_SOCKET_PATH_BYTES = 107 if os.uname().sysname == "Linux" else 103
_PREFIX = "tokenspeed-"
_SOCKET_NAME = "core.sock"
_LOCK_NAME = "lock"
_MIN_STALE_AGE_S = 60.0


class PrivateDirectory:
    """A new directory that only this user can enter; a file lock in it says that its owner lives.

    A front end that was killed cannot remove its directory, so each new one removes those whose lock nobody holds.
    """

    def __init__(self, runtime_dir: str = "") -> None:
        """Create the directory.

        Args:
            runtime_dir: where to create it; empty means XDG_RUNTIME_DIR or the temporary directory.
        Raises:
            SocketPathError: no candidate exists, is writable and gives a path that is short enough.
        """
        reasons: list[str] = []
        for base in [Path(runtime_dir)] if runtime_dir else _default_bases():
            try:
                self.path = _create(base)
                break
            except (OSError, SocketPathError) as error:
                reasons.append(f"  {base}: {error}")
        else:
            raise SocketPathError(
                "ipc.directory: expected a writable directory for the private sockets, got\n"
                + "\n".join(reasons)
                + "\nFix: pass --runtime-dir with a short path that you can write, such as /tmp"
            )
        self._lock = os.open(self.path / _LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        _remove_stale(self.path.parent)

    @property
    def endpoint(self) -> str:
        """The address of the socket in it."""
        return f"ipc://{self.path / _SOCKET_NAME}"

    def close(self) -> None:
        """Remove the directory; a second call does nothing."""
        if self._lock < 0:
            return
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)
        self._lock = -1


def _default_bases() -> list[Path]:
    bases = [os.environ.get("XDG_RUNTIME_DIR", ""), tempfile.gettempdir(), "/tmp"]
    return [Path(base) for base in dict.fromkeys(bases) if base]


def _create(base: Path) -> Path:
    # mkdtemp adds eight characters; the check comes first so that a refused base is left as it was.
    length = len(os.fsencode(base.resolve() / f"{_PREFIX}{'x' * 8}" / _SOCKET_NAME))
    if length > MAX_SOCKET_PATH_BYTES:
        raise SocketPathError(f"the socket's path would have {length} bytes, more than {MAX_SOCKET_PATH_BYTES}")
    path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base.resolve()))
    status = path.stat()
    if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
        path.rmdir()
        raise SocketPathError("the file system does not keep a directory private (mode 0700)")
    return path


def _remove_stale(base: Path) -> None:
    """Remove directories of front ends that died without cleaning up."""
    for path in base.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            status = path.stat(follow_symlinks=False)
            # A young one may belong to a process between mkdtemp and flock.
            if status.st_uid != os.geteuid() or time.time() - status.st_mtime < _MIN_STALE_AGE_S:
                continue
            lock = os.open(path / _LOCK_NAME, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(lock)
