"""Finding the process group of a call, and what a kernel is chosen by."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Final

import torch
import torch.distributed as dist

from tokenspeed_kernel.errors import GroupError

__all__ = ["Group", "group_name", "resolve_group"]

if dist.is_available():
    from torch.distributed import ProcessGroup as _ProcessGroup
else:  # a build of torch without it: the ops import, and say so when they are called

    class _ProcessGroup:  # type: ignore[no-redef]
        """Stands in annotations alone."""


_c10d: Any = getattr(dist, "distributed_c10d", None)
Group = str | _ProcessGroup | None
"""A process group, its name as torch.distributed registers it (`group.group_name`), or None for all processes."""


def resolve_group(op: str, group: Group, device: torch.device) -> tuple[_ProcessGroup, str, int]:
    """Return the group, its back end for the device, and its size.

    Raises:
        GroupError: torch.distributed is not initialised, no group has that name, this process is not in it, or it has no back end
            for the device.
    """
    if group is None:
        found = _default_group(op)
    elif isinstance(group, str):
        found = _named_group(op, group)
    else:
        found = group
        if not isinstance(found, _ProcessGroup):
            got = f"{type(group).__name__} {group!r}"
            raise GroupError(
                f"{op}: expected a process group that this process belongs to, its name or None, got {got}\n"
                "Fix: call it only on the processes that the group was made of."
            )
    known, known_device, backend, world_size = _LAST[0]
    if known() is found and known_device == device:
        return found, backend, world_size
    try:
        backend = found._get_backend(device).name()
    except RuntimeError as error:
        raise GroupError(
            f"{op}: expected a group with a back end for {device.type} tensors, got {group or 'the default group'!s} without\n"
            f'Fix: make the group with one, such as init_process_group("cpu:gloo,cuda:nccl"): {str(error).splitlines()[0]}'
        ) from error
    _remember(found, device, backend)
    return found, backend, found.size()


_LAST: Final[list[tuple[Callable[[], object], torch.device | None, str, int]]] = [(lambda: None, None, "", 0)]
"""The group of the last call with its device, back end and size: asking it again costs as much as all other checks together. By a
weak reference, so that a group that was destroyed can go."""


def _remember(group: _ProcessGroup, device: torch.device, backend: str) -> None:
    _LAST[0] = weakref.ref(group), device, backend, group.size()


def group_name(op: str, group: Group) -> str:
    """Return the name under which torch.distributed knows the group: what a compiled graph can hold.

    Raises:
        GroupError: torch.distributed is not initialised.
    """
    if isinstance(group, str):
        return group
    found = _default_group(op) if group is None else group
    name: str = found.group_name
    return name


def _default_group(op: str) -> _ProcessGroup:
    found = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    if found is None:
        raise GroupError(
            f"{op}: expected an initialised process group, got none\nFix: call torch.distributed.init_process_group first."
        )
    return found


def _named_group(op: str, name: str) -> _ProcessGroup:
    if not dist.is_available():
        _default_group(op)
    try:
        found: _ProcessGroup = _c10d._resolve_process_group(name)
    except (RuntimeError, ValueError, LookupError) as error:
        raise GroupError(
            f"{op}: expected the name of a process group of this process, got {name!r}\n"
            "Fix: initialise torch.distributed, and pass the group itself or its group_name."
        ) from error
    return found
