"""Cases of the norm ops."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from tokenspeed_kernel.case import Case, Tolerance
from tokenspeed_kernel.ops.norm.contract import (
    FUSED_ADD_GEMMA_RMS_NORM,
    FUSED_ADD_RMS_NORM,
    GATED_RMS_NORM,
    GEMMA_RMS_NORM,
    LAYER_NORM,
    RMS_NORM,
)

__all__ = ["CASES"]

_Build = Callable[[torch.Generator, torch.device, torch.dtype], dict[str, Any]]


def _tensor(generator: torch.Generator, *shape: int, layout: str, scale: float = 1.0) -> torch.Tensor:
    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator) * scale

    if layout == "transposed":  # the last dimension has the large stride
        return normal(*shape[:-2], shape[-1], shape[-2]).transpose(-1, -2)
    if layout == "sliced":  # rows and columns with gaps
        return normal(*shape[:-1], 2 * shape[-1] + 1)[..., 1::2]
    if layout == "heads":  # some heads of a projection, as query and key norms meet them
        return normal(*shape[:-2], shape[-2] + 3, shape[-1])[..., 2:-1, :]
    return normal(*shape)


def _to(tensor: torch.Tensor, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Moved with the gaps that it has."""
    storage = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage()).to(device, dtype)
    return storage.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def _inputs(
    *shape: int,
    layout: str = "contiguous",
    second: str = "",
    mean: float = 1.0,
    scale: float = 1.0,
    wide: bool = False,
    **options: Any,
) -> _Build:
    """x, weight and eps; `second` is another operand like x; `wide` keeps the weight in fp32; `bias=True` adds one."""

    def build(generator: torch.Generator, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
        x = _to(_tensor(generator, *shape, layout=layout, scale=scale), device, dtype)
        small = torch.float32 if wide else dtype
        weight = (torch.randn(shape[-1], generator=generator) + mean).to(device, small)
        inputs: dict[str, Any] = {"x": x}
        if second:
            other = "contiguous" if second == "residual" else layout
            inputs[second] = _to(_tensor(generator, *shape, layout=other, scale=scale), device, dtype)
        inputs |= {"weight": weight, "eps": 1e-5}
        given = dict(options)
        if given.pop("bias", False):
            inputs["bias"] = torch.randn(shape[-1], generator=generator).to(device, small)
        return inputs | given

    return build


def _shifted(*shape: int) -> _Build:
    """A mean that is large beside the spread: a variance from a mean of squares would have no digits left."""
    plain = _inputs(*shape, bias=True)

    def build(generator: torch.Generator, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
        inputs = plain(generator, device, torch.float32)
        inputs["x"] = inputs["x"] + 100.0
        return {name: one.to(dtype) if isinstance(one, torch.Tensor) else one for name, one in inputs.items()}

    return build


_SHAPES: tuple[tuple[str, _Build, _Build, bool], ...] = tuple(
    (label, _inputs(*shape, layout=layout, scale=scale), _inputs(*shape, layout=layout, scale=scale, second="residual"), bench)
    for label, shape, layout, scale, bench in (
        ("empty 0x64", (0, 64), "contiguous", 1.0, False),
        ("odd 3x37", (3, 37), "contiguous", 1.0, False),
        ("one element", (2, 1), "contiguous", 1.0, False),
        ("3d 2x3x64", (2, 3, 64), "contiguous", 1.0, False),
        ("vector 40", (40,), "contiguous", 1.0, False),
        ("transposed 5x24", (5, 24), "transposed", 1.0, False),
        ("transposed 2x3x20", (2, 3, 20), "transposed", 1.0, False),
        ("sliced 4x33", (4, 33), "sliced", 1.0, False),
        ("heads 5x3x16", (5, 3, 16), "heads", 1.0, False),
        ("heads 2x5x3x20", (2, 5, 3, 20), "heads", 1.0, False),
        ("tiny values 2x48", (2, 48), "contiguous", 1e-4, False),
        ("long row 2x8200", (2, 8200), "contiguous", 1.0, False),
        ("16x576", (16, 576), "contiguous", 1.0, True),
        ("512x4096", (512, 4096), "contiguous", 1.0, True),
    )
)

_LAYOUTS: tuple[tuple[str, tuple[int, ...], str, bool], ...] = (
    ("empty 0x64", (0, 64), "contiguous", False),
    ("odd 3x37", (3, 37), "contiguous", False),
    ("one element", (2, 1), "contiguous", False),
    ("3d 2x3x64", (2, 3, 64), "contiguous", False),
    ("vector 40", (40,), "contiguous", False),
    ("transposed 5x24", (5, 24), "transposed", False),
    ("transposed 2x3x20", (2, 3, 20), "transposed", False),
    ("sliced 4x33", (4, 33), "sliced", False),
    ("heads 5x3x16", (5, 3, 16), "heads", False),
    ("heads 2x5x3x20", (2, 5, 3, 20), "heads", False),
    ("long row 2x8200", (2, 8200), "contiguous", False),
    ("16x576", (16, 576), "contiguous", True),
    ("512x4096", (512, 4096), "contiguous", True),
    ("heads 512x32x128", (512, 32, 128), "heads", True),
)


def _variants(op: str, *, outputs: tuple[str, ...] = ("out",), **inputs: Any) -> Iterator[Case]:
    for label, shape, layout, bench in _LAYOUTS:
        yield Case(op, label, _inputs(*shape, layout=layout, **inputs), outputs, bench=bench)
    yield Case(op, "fp32 weight 3x40", _inputs(3, 40, wide=True, **inputs), outputs)
    yield Case(op, "tiny values 2x48", _inputs(2, 48, scale=1e-4, **inputs), outputs)


def _gated() -> Iterator[Case]:
    op, second = GATED_RMS_NORM.name, "gate"
    yield from _variants(op, second=second)
    for before in (True, False):
        for shape, group, layout in (
            ((3, 48), 16, "contiguous"),
            ((4, 36), 12, "sliced"),
            ((5, 24), 8, "transposed"),
            ((5, 3, 40), 20, "heads"),
            ((2, 2, 33), 11, "contiguous"),
            ((3, 20), 1, "contiguous"),
            ((2, 16400), 8200, "contiguous"),
            ((0, 48), 16, "contiguous"),
        ):
            label = f"{'before' if before else 'after'} the gate, {'x'.join(map(str, shape))} {layout} in groups of {group}"
            yield Case(op, label, _inputs(*shape, layout=layout, second=second, norm_before_gate=before, group_size=group))
        yield Case(
            op, f"512x8192 {'before' if before else 'after'} the gate",
            _inputs(512, 8192, second=second, norm_before_gate=before, group_size=1024), bench=True,
        )  # fmt: skip
    yield Case(op, "after the gate 3x40", _inputs(3, 40, second=second, norm_before_gate=False))


CASES = (
    *(Case(RMS_NORM.name, label, build, bench=bench) for label, build, _, bench in _SHAPES),
    *(
        Case(FUSED_ADD_RMS_NORM.name, label, build, outputs=("out", "residual_out"), bench=bench)
        for label, _, build, bench in _SHAPES
    ),
    *_variants(GEMMA_RMS_NORM.name, mean=0.0),
    *_variants(FUSED_ADD_GEMMA_RMS_NORM.name, mean=0.0, second="residual", outputs=("out", "residual_out")),
    *_variants(LAYER_NORM.name, bias=True),
    Case(LAYER_NORM.name, "without bias 3x40", _inputs(3, 40)),
    # The mean of float32 numbers around 100 is itself rounded by 4e-6.
    Case(LAYER_NORM.name, "far from 0, 4x200", _shifted(4, 200), tolerance={torch.float32: Tolerance(1e-5, 5e-5)}),
    *_gated(),
)
"""Every kernel of the family meets these."""
