"""Tensors inside results and arguments: found, replaced, poisoned, and guarded on both sides."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

import torch

__all__ = ["Guarded", "map_tensors", "surroundings", "tensors_of"]

# Bytes on each side of a guarded output. A multiple of every alignment that a kernel may ask for.
_GUARD_BYTES: Final = 512
_GUARD_VALUE: Final = 0xA5
# NaN (or, of an integer or packed format, a value with all but the sign set) in each byte: an element that is not written shows.
_POISON: Final = {torch.float8_e4m3fnuz: 0x80, torch.float8_e5m2fnuz: 0x80, torch.bool: 0x01}


def tensors_of(value: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (path, tensor) for each tensor in nested tuples, lists, dictionaries and dataclasses, in order."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, tuple | list):
        for index, one in enumerate(value):
            yield from tensors_of(one, f"{name}[{index}]")
    elif isinstance(value, dict):
        for key, one in value.items():
            yield from tensors_of(one, f"{name}.{key}" if name else str(key))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_of(getattr(value, field.name), f"{name}.{field.name}" if name else field.name)


def map_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return `value` with each tensor in it replaced by what `change` makes of it; the rest is shared."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, tuple | list):
        items = [map_tensors(one, change) for one in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, dict):
        return {key: map_tensors(one, change) for key, one in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        held = {one.name: getattr(value, one.name) for one in dataclasses.fields(value) if one.init}
        changes = {key: map_tensors(one, change) for key, one in held.items() if any(True for _ in tensors_of(one))}
        return dataclasses.replace(value, **changes) if changes else value
    return value


def surroundings(views: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return, for each storage that the views lie in, a copy of those of its bytes that no view covers."""
    groups: dict[int, list[torch.Tensor]] = {}
    for view in views:
        groups.setdefault(view.untyped_storage().data_ptr(), []).append(view)
    around = []
    for group in groups.values():
        storage = torch.empty(0, dtype=torch.uint8, device=group[0].device).set_(group[0].untyped_storage())
        covered = torch.zeros(storage.numel(), dtype=torch.bool, device=storage.device)
        for view in group:
            size = view.element_size()
            strides = (*(stride * size for stride in view.stride()), 1)
            covered.as_strided((*view.shape, size), strides, view.storage_offset() * size).fill_(True)
        around.append(storage[~covered])
    return around


class Guarded:
    """A poisoned, contiguous tensor in the middle of a larger one, so that a write outside of it is noticed.

    Attributes:
        tensor: shape, dtype and device of `like`, filled with NaN (or the largest value).
    """

    def __init__(self, like: torch.Tensor) -> None:
        """Allocate it."""
        size = like.numel() * like.element_size()
        self._buffer = torch.full((size + 2 * _GUARD_BYTES,), _GUARD_VALUE, dtype=torch.uint8, device=like.device)
        inner = self._buffer[_GUARD_BYTES : _GUARD_BYTES + size]
        self._size = size
        # 0x7f in every byte is the largest integer but for the order of its bytes, and no float that a kernel would give.
        inner.fill_(_POISON.get(like.dtype, 0x7F))
        self.tensor = inner.view(like.dtype).view(like.shape) if size else torch.empty_like(like).contiguous()
        if like.is_floating_point() and like.element_size() > 1:
            self.tensor.fill_(float("nan"))

    @property
    def intact(self) -> bool:
        """Whether nothing was written beside the tensor."""
        before, after = self._buffer[:_GUARD_BYTES], self._buffer[_GUARD_BYTES + self._size :]
        return bool((before == _GUARD_VALUE).all()) and bool((after == _GUARD_VALUE).all())
