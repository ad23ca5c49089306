"""Cases of the matrix products."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tokenspeed_kernel.case import Case
from tokenspeed_kernel.ops.gemm.cases_pack import PACK_CASES
from tokenspeed_kernel.ops.gemm.cases_scaled import SCALED_CASES, product_tolerance
from tokenspeed_kernel.ops.gemm.cases_stacks import STACK_CASES
from tokenspeed_kernel.ops.gemm.contract import MM

__all__ = ["CASES", "DENSE_CASES"]

_Build = Callable[[torch.Generator, torch.device, torch.dtype], dict[str, Any]]


def _inputs(
    *shape: int, bias: bool = False, layout: str = "contiguous", wide_out: bool = False, wide_bias: bool = False
) -> _Build:
    """`shape` is x's leading dimensions, then out_features, then in_features."""
    *leading, out_features, in_features = shape

    def build(generator: torch.Generator, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
        x = torch.randn(*leading, in_features, generator=generator).to(device, dtype)
        weight = torch.randn(out_features, in_features, generator=generator).to(device, dtype)
        offset = torch.randn(out_features, generator=generator).to(device, torch.float32 if wide_bias else dtype)
        if layout == "transposed":  # the last dimensions have the large strides
            x = x.transpose(-1, -2).contiguous().transpose(-1, -2)
            weight = weight.t().contiguous().t()
        if layout == "sliced":
            x = torch.repeat_interleave(x, 2, dim=-1)[..., ::2]
            weight = torch.repeat_interleave(weight, 3, dim=0)[::3]
            offset = torch.repeat_interleave(offset, 2)[::2]
        inputs = {"x": x, "weight": weight, "bias": offset if bias else None}
        return {**inputs, "out_dtype": torch.float32} if wide_out else inputs

    return build


_SHAPES: tuple[tuple[str, tuple[int, ...], dict[str, Any], bool], ...] = (
    ("no rows 0x8x16", (0, 8, 16), {}, False),
    ("no features 3x0x16", (3, 0, 16), {}, False),
    ("no depth 3x5x0", (3, 5, 0), {}, False),
    ("no depth with bias 3x5x0", (3, 5, 0), {"bias": True}, False),
    ("one 1x1x1", (1, 1, 1), {}, False),
    ("one row 1x48x64", (1, 48, 64), {}, False),
    ("odd 3x37x53", (3, 37, 53), {}, False),
    ("odd with bias 5x33x17", (5, 33, 17), {"bias": True}, False),
    ("fp32 bias 5x33x17", (5, 33, 17), {"bias": True, "wide_bias": True}, False),
    ("many rows 70x66x40", (70, 66, 40), {}, False),
    ("3d 2x3x20x24", (2, 3, 20, 24), {"bias": True}, False),
    ("vector 20x24", (20, 24), {}, False),
    ("transposed 5x20x24", (5, 20, 24), {"layout": "transposed"}, False),
    ("transposed one row 1x20x24", (1, 20, 24), {"layout": "transposed"}, False),
    ("sliced 2x3x20x24", (2, 3, 20, 24), {"layout": "sliced", "bias": True}, False),
    ("fp32 out 4x24x32", (4, 24, 32), {"wide_out": True}, False),
    ("fp32 out with bias 20x24x32", (20, 24, 32), {"wide_out": True, "bias": True}, False),
    ("1x1536x576", (1, 1536, 576), {}, True),
    ("6x1536x576", (6, 1536, 576), {}, True),
    ("16x576x1536", (16, 576, 1536), {}, True),
    ("100x3072x576", (100, 3072, 576), {"bias": True}, True),
    ("1x49152x576", (1, 49152, 576), {}, True),
    ("16x49152x576", (16, 49152, 576), {}, True),
)

DENSE_CASES = tuple(
    Case(MM.name, label, _inputs(*shape, **options), tolerance=product_tolerance(shape[-1]), bench=bench)
    for label, shape, options, bench in _SHAPES
)
"""Those of `mm` with plain operands."""
CASES = (*DENSE_CASES, *SCALED_CASES, *STACK_CASES, *PACK_CASES)
"""Every kernel of the family meets these, unless its formats leave one out."""
