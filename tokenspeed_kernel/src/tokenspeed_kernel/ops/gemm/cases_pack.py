"""Cases of `pack_weight`: the packed weight's product is compared, with activations that rounding to 8 bits leaves as they are.

So a kernel that rounds activations where it is allowed to is held to the same tolerance as one that does not.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch

from tokenspeed_kernel.case import Case, Tolerance
from tokenspeed_kernel.ops.gemm.contract import PACK_WEIGHT
from tokenspeed_kernel.ops.gemm.packed import PackedWeight
from tokenspeed_kernel.ops.random_shapes import random_size
from tokenspeed_kernel.quantized import QuantizedTensor
from tokenspeed_kernel.signature import GGUF_BLOCKS

__all__ = ["PACK_CASES", "random_pack"]

_Build = Callable[[torch.Generator, torch.device, torch.dtype], dict[str, Any]]
_RUN = 32  # activations that share a scale
# Byte offsets of the 16-bit floats in a block, and their largest magnitude: weights then are about as large as unit normals.
_HALVES: dict[str, tuple[tuple[int, float], ...]] = {
    "gguf_q4_0": ((0, 0.2),),
    "gguf_q4_1": ((0, 0.2), (2, 1.0)),
    "gguf_q8_0": ((0, 0.01),),
    "gguf_q4_k": ((0, 0.005), (2, 0.02)),
    "gguf_q6_k": ((208, 0.0005),),
}
_GROUPED = ("int4@group_32", "int4@group_128", "uint4@group_64", "uint4@channel", "mxint4@block_32")


def _product(packed: PackedWeight) -> torch.Tensor:
    """Products of a few rows of whole numbers / 64, with a 127 in each run: rounding to 8 bits is exact for them."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(-127, 128, (5, packed.in_features), generator=generator)
    x[:, ::_RUN] = 127
    data = packed.data
    device = data.device if isinstance(data, torch.Tensor | QuantizedTensor) else torch.device("cpu")
    return packed((x / 64).to(device, packed.dtypes[0]))


def _plain(out_features: int, in_features: int, *, transposed: bool = False) -> _Build:
    def build(generator: torch.Generator, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
        weight = torch.randn(out_features, in_features, generator=generator).to(device, dtype)
        return {"weight": weight.t().contiguous().t() if transposed else weight}

    return build


def _gguf(name: str, out_features: int, in_features: int, allowed: bool) -> _Build:
    def build(generator: torch.Generator, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
        elements, size = GGUF_BLOCKS[name]
        blocks = torch.randint(0, 256, (out_features, in_features // elements, size), generator=generator, dtype=torch.uint8)
        for offset, largest in _HALVES[name]:
            halves = (torch.rand(*blocks.shape[:2], generator=generator) - 0.5) * 2 * largest
            blocks[:, :, offset : offset + 2] = halves.half().unsqueeze(-1).view(torch.uint8)
        shape = (out_features, in_features)
        weight = QuantizedTensor(blocks.reshape(out_features, in_features // elements * size).to(device), f"{name}@inline", shape)  # type: ignore[arg-type]
        return {"weight": weight, "round_activations": allowed}

    return build


def _grouped(fmt: str, out_features: int, in_features: int, allowed: bool) -> _Build:
    def build(generator: torch.Generator, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
        logical, _, layout = fmt.partition("@")
        group = in_features if layout == "channel" else int(layout.rpartition("_")[2])
        shape = (out_features, in_features)
        data = torch.randint(0, 256, (out_features, in_features // 2), generator=generator, dtype=torch.uint8)
        scale = (torch.rand(out_features, in_features // group, generator=generator) * 0.2).to(device, torch.bfloat16)
        zeros = torch.randint(0, 16, scale.shape, generator=generator, dtype=torch.uint8).to(device)
        zero = zeros if logical == "uint4" else None
        weight = QuantizedTensor(data.to(device), fmt, shape, scale=scale, zero_point=zero)  # type: ignore[arg-type]
        return {"weight": weight, "round_activations": allowed}

    return build


def _case(label: str, build: _Build, in_features: int, dtypes: tuple[torch.dtype, ...] = (), *, bench: bool = False) -> Case:
    # As for `mm`, with activations that are twice as large.
    root = max(in_features, 1) ** 0.5
    tolerance = {
        torch.float32: Tolerance(1e-5, 1e-5 * root),
        torch.float16: Tolerance(2e-3, 3 * 2**-11 * root),
        torch.bfloat16: Tolerance(1.6e-2, 3 * 2**-8 * root),
    }
    return Case(PACK_WEIGHT.name, label, build, outputs=(), tolerance=tolerance, bench=bench, dtypes=dtypes, comparable=_product)


def _label(name: str, rows: int, columns: int, allowed: bool) -> str:
    return f"{name} {rows}x{columns}{', rounding allowed' if allowed else ''}"


_QUANTIZED = (torch.float32,)  # the weight's format is the case's own


def random_pack(rng: random.Random) -> Case:
    """A case of `pack_weight`: a plain weight, or one of the formats that it keeps."""
    fmt, rows, allowed = rng.choice(("", *_HALVES, *_GROUPED)), random_size(rng, 70, low=0), rng.random() < 0.5
    columns = random_size(rng, 130) if not fmt else 256 * rng.randint(1, 3)
    label = f"random {_label(fmt, rows, columns, allowed and bool(fmt))} {rng.getrandbits(32):08x}"
    if not fmt:
        return _case(label, _plain(rows, columns, transposed=rng.random() < 0.5), columns)
    make = _gguf if fmt in _HALVES else _grouped
    return _case(label, make(fmt, rows, columns, allowed), columns, _QUANTIZED)


PACK_CASES = (
    _case("no features 0x16", _plain(0, 16), 16),
    _case("odd 37x53", _plain(37, 53), 53),
    _case("transposed 20x24", _plain(20, 24, transposed=True), 24),
    _case("1536x576", _plain(1536, 576), 576, bench=True),
    _case("gguf_q4_1 3072x576, rounding allowed", _gguf("gguf_q4_1", 3072, 576, True), 576, _QUANTIZED, bench=True),
    *(
        _case(_label(name, rows, columns, allowed), _gguf(name, rows, columns, allowed), columns, _QUANTIZED)
        for name in _HALVES
        for rows, columns in ((37, 512), (0, 256))
        for allowed in (False, True)
    ),
    *(
        _case(_label(fmt, 19, 384, allowed), _grouped(fmt, 19, 384, allowed), 384, _QUANTIZED)
        for fmt in _GROUPED
        for allowed in (False, True)
    ),
)
"""Every kernel of `pack_weight` meets these, unless its formats leave one out."""
