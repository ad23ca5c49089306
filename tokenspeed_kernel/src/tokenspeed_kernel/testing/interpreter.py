"""Triton's interpreter with numbers as devices have them.

As it comes, the interpreter multiplies bf16 operands of a dot as if they were integers, and truncates where devices round. With
that no kernel could be held against the reference in bf16 or fp8. Inside `device_numbers` conversions are done by PyTorch, to
nearest even (to fp8 saturating, as NVIDIA's `cvt.rn.satfinite`), and a dot converts its operands to float32 first.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch

from tokenspeed_kernel.errors import ConfigError

__all__ = ["device_numbers", "use_interpreter"]

_VARIABLE: Final = "TRITON_INTERPRET"
_FP8: Final = (torch.float8_e4m3fn, torch.float8_e5m2)


def use_interpreter() -> None:
    """Let Triton interpret its kernels from now on in this process.

    Raises:
        ConfigError: Triton was imported before, and compiles.
    """
    if os.environ.get(_VARIABLE, "0").lower() in ("1", "true", "yes", "on", "y"):
        return
    if "triton" in sys.modules:
        raise ConfigError(f"interpreter: Triton was imported before\nFix: set {_VARIABLE}=1 before the process starts.")
    os.environ[_VARIABLE] = "1"


@contextmanager
def device_numbers() -> Iterator[None]:
    """Let the interpreter convert and multiply numbers as devices do, inside the block; nothing happens without Triton."""
    try:
        import triton.language as tl
        from triton.runtime import interpreter
    except ImportError:
        yield
        return
    builder: Any = interpreter.InterpreterBuilder
    dtypes = {
        tl.float64: torch.float64,
        tl.float32: torch.float32,
        tl.float16: torch.float16,
        tl.bfloat16: torch.bfloat16,
        tl.float8e4nv: torch.float8_e4m3fn,
        tl.float8e5: torch.float8_e5m2,
    }
    names = ("create_dot", "create_fp_trunc", "create_fp_ext", "create_fp_to_fp")
    saved = {name: builder.__dict__[name] for name in names}

    def tensor(handle: Any) -> torch.Tensor:
        data = handle.data if handle.data.flags.writeable else handle.data.copy()
        return torch.from_numpy(data).contiguous().view(dtypes[handle.dtype.scalar])

    def cast(self: Any, handle: Any, target: Any, *rest: Any) -> Any:
        to = target.scalar
        if handle.dtype.scalar not in dtypes or to not in dtypes:
            return saved["create_fp_to_fp" if rest else "create_fp_trunc"](self, handle, target, *rest)
        values = tensor(handle)
        if dtypes[to] in _FP8:
            largest = torch.finfo(dtypes[to]).max
            values = values.float().clamp(-largest, largest)
        bits = values.to(dtypes[to])
        stored = bits.view(torch.uint8) if dtypes[to] in _FP8 else bits.view(torch.uint16) if to == tl.bfloat16 else bits
        return interpreter.TensorHandle(stored.numpy(), to)

    def dot(self: Any, a: Any, b: Any, d: Any, *rest: Any) -> Any:
        narrow = [one.dtype.scalar in dtypes and one.dtype.scalar not in (tl.float32, tl.float64) for one in (a, b)]
        wide = [cast(self, one, tl.float32) if small else one for one, small in zip((a, b), narrow, strict=True)]
        return saved["create_dot"](self, *wide, d, *rest)

    try:
        for name, function in zip(names, (dot, cast, cast, cast), strict=True):
            setattr(builder, name, function)
        yield
    finally:
        for name, function in saved.items():
            setattr(builder, name, function)
