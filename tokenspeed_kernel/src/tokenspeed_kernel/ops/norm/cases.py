"""Cases of the norm ops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tokenspeed_kernel.case import Case
from tokenspeed_kernel.ops.norm.contract import FUSED_ADD_RMS_NORM, RMS_NORM

__all__ = ["CASES"]

_Build = Callable[[torch.Generator, torch.device, torch.dtype], dict[str, Any]]


def _inputs(*shape: int, layout: str = "contiguous", fused: bool = False, scale: float = 1.0) -> _Build:
    def build(generator: torch.Generator, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
        def tensor(*size: int) -> torch.Tensor:
            return (torch.randn(*size, generator=generator) * scale).to(device, dtype)

        if layout == "transposed":  # the last dimension has the large stride
            x = tensor(*shape[:-2], shape[-1], shape[-2]).transpose(-1, -2)
        elif layout == "sliced":  # rows and columns with gaps
            x = tensor(*shape[:-1], 2 * shape[-1] + 1)[..., 1::2]
        else:
            x = tensor(*shape)
        weight = (torch.randn(shape[-1], generator=generator) + 1).to(device, dtype)
        inputs = {"x": x, "weight": weight, "eps": 1e-5}
        return {"x": x, "residual": tensor(*shape), "weight": weight, "eps": 1e-5} if fused else inputs

    return build


_SHAPES: tuple[tuple[str, _Build, _Build, bool], ...] = tuple(
    (label, _inputs(*shape, layout=layout, scale=scale), _inputs(*shape, layout=layout, scale=scale, fused=True), bench)
    for label, shape, layout, scale, bench in (
        ("empty 0x64", (0, 64), "contiguous", 1.0, False),
        ("odd 3x37", (3, 37), "contiguous", 1.0, False),
        ("one element", (2, 1), "contiguous", 1.0, False),
        ("3d 2x3x64", (2, 3, 64), "contiguous", 1.0, False),
        ("vector 40", (40,), "contiguous", 1.0, False),
        ("transposed 5x24", (5, 24), "transposed", 1.0, False),
        ("transposed 2x3x20", (2, 3, 20), "transposed", 1.0, False),
        ("sliced 4x33", (4, 33), "sliced", 1.0, False),
        ("tiny values 2x48", (2, 48), "contiguous", 1e-4, False),
        ("long row 2x8200", (2, 8200), "contiguous", 1.0, False),
        ("16x576", (16, 576), "contiguous", 1.0, True),
        ("512x4096", (512, 4096), "contiguous", 1.0, True),
    )
)

CASES = (
    *(Case(RMS_NORM.name, label, build, bench=bench) for label, build, _, bench in _SHAPES),
    *(
        Case(FUSED_ADD_RMS_NORM.name, label, build, outputs=("out", "residual_out"), bench=bench)
        for label, _, build, bench in _SHAPES
    ),
)
"""Every kernel of the family meets these."""
