"""An out-of-memory error that says how much of what is used."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tokenspeed_engine.kvcache import available_bytes

_CPU_MARK = "DefaultCPUAllocator"


class OutOfMemoryError(MemoryError):
    """The device has no room for something; the message gives sizes and the remedy."""


@contextmanager
def memory_guard(what: str, device: torch.device, held: dict[str, int], remedy: str) -> Iterator[None]:
    """Turn the allocator's error into one that says what was being made, what is held, and what is free.

    Args:
        what: what the block makes.
        device: where.
        held: name to bytes of the large things that are there already.
        remedy: what the user can do.
    Raises:
        OutOfMemoryError: memory ran out inside the block.
    """
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise _explained(what, device, held, remedy, error) from error
    except RuntimeError as error:
        if _CPU_MARK not in str(error):  # the CPU allocator raises a plain RuntimeError
            raise
        raise _explained(what, device, held, remedy, error) from error


def _explained(what: str, device: torch.device, held: dict[str, int], remedy: str, error: BaseException) -> OutOfMemoryError:
    usage = ", ".join(f"{name} {_gib(size)}" for name, size in held.items()) or "nothing yet"
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        state = f"{_gib(free)} of {_gib(total)} free"
    else:
        state = f"{_gib(available_bytes())} available"
    cause = str(error).splitlines()[0] if str(error) else type(error).__name__
    return OutOfMemoryError(f"out of memory on {device} while making {what}: {state}; held: {usage}. Fix: {remedy}. ({cause})")


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.2f} GiB"
