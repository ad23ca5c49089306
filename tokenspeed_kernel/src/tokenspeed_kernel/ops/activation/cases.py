"""Cases of the activation ops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tokenspeed_kernel.case import Case
from tokenspeed_kernel.ops.activation.contract import GELU_AND_MUL, SILU_AND_MUL, SWIGLU_CLAMPED

__all__ = ["CASES"]

_Build = Callable[[torch.Generator, torch.device, torch.dtype], dict[str, Any]]


def _inputs(*shape: int, layout: str = "contiguous", scale: float = 1.0) -> _Build:
    def build(generator: torch.Generator, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
        def tensor(*size: int) -> torch.Tensor:
            return (torch.randn(*size, generator=generator) * scale).to(device, dtype)

        if layout == "transposed":  # the last dimension has the large stride
            return {"gate_up": tensor(*shape[:-2], shape[-1], shape[-2]).transpose(-1, -2)}
        if layout == "sliced":  # rows and columns with gaps
            return {"gate_up": tensor(*shape[:-1], 2 * shape[-1] + 1)[..., 1::2]}
        return {"gate_up": tensor(*shape)}

    return build


_LAYOUTS = (
    ("empty 0x64", _inputs(0, 64), False),
    ("empty inner", _inputs(3, 0), False),
    ("odd 3x74", _inputs(3, 74), False),
    ("one element", _inputs(2, 2), False),
    ("3d 2x3x64", _inputs(2, 3, 64), False),
    ("vector 40", _inputs(40), False),
    ("transposed 5x24", _inputs(5, 24, layout="transposed"), False),
    ("transposed 2x3x20", _inputs(2, 3, 20, layout="transposed"), False),
    ("sliced 4x34", _inputs(4, 34, layout="sliced"), False),
    ("large values 2x48", _inputs(2, 48, scale=100.0), False),
    ("wide 2x2100", _inputs(2, 2100), False),
    ("16x3072", _inputs(16, 3072), True),
    ("512x3072", _inputs(512, 3072), True),
)


def _with(build: _Build, **options: Any) -> _Build:
    return lambda generator, device, dtype: {**build(generator, device, dtype), **options}


CASES = (
    *(Case(SILU_AND_MUL.name, label, build, bench=bench) for label, build, bench in _LAYOUTS),
    *(
        Case(SWIGLU_CLAMPED.name, f"{label}{suffix}", _with(build, **options), bench=bench)
        for label, build, bench in _LAYOUTS
        for suffix, options in (
            ("", {"limit": 0.5}),
            (", steep, shifted, interleaved", {"limit": 7.0, "alpha": 1.702, "up_offset": 1.0, "interleaved": True}),
        )
    ),
    Case(SWIGLU_CLAMPED.name, "no limit 3x74", _with(_inputs(3, 74), limit=float("inf"))),
    *(
        Case(GELU_AND_MUL.name, f"{label}, {approximate}", _with(build, approximate=approximate), bench=bench)
        for label, build, bench in _LAYOUTS
        for approximate in ("none", "tanh")
    ),
)
"""Every kernel of the family meets these."""
