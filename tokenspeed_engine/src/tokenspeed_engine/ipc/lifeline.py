"""The core ends when its parent does: three independent ways to notice."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1
_POLL_S = 0.5


def die_with_parent(parent_pid: int) -> None:
    """Ask Linux to kill this process when the thread that started it ends; elsewhere do nothing.

    This works even while native code hangs with the interpreter's lock held.

    Raises:
        RuntimeError: the parent is gone already.
    """
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
            raise RuntimeError(f"prctl(PR_SET_PDEATHSIG): {os.strerror(ctypes.get_errno())}")
    # The parent may have ended before the call above; then no signal will come.
    if os.getppid() != parent_pid:
        raise RuntimeError(f"the front end (pid {parent_pid}) ended before its core started")


def watch_parent(parent_pid: int, pipe_fd: int, on_death: Callable[[], None]) -> None:
    """Call on_death once, from a thread, when the pipe from the parent closes or the parent's pid changes.

    Args:
        parent_pid: the expected parent.
        pipe_fd: descriptor of a pipe whose write end the parent alone holds, so that it closes with it. Read without a buffer:
            a thread that waits in a buffered reader would stop the interpreter from ending.
        on_death: must not return to normal work; it typically ends the process.
    """
    fired = threading.Lock()

    def fire() -> None:
        if fired.acquire(blocking=False):
            on_death()

    def read_pipe() -> None:
        while os.read(pipe_fd, 1):
            pass
        fire()

    def poll_parent() -> None:
        pause = threading.Event()
        while os.getppid() == parent_pid:
            pause.wait(_POLL_S)
        fire()

    for target in (read_pipe, poll_parent):
        threading.Thread(target=target, name=f"lifeline-{target.__name__}", daemon=True).start()
