"""Random weights in each quantized format, and what the kernels promise to compute from them."""

from __future__ import annotations

from typing import Final

import gguf
import numpy as np
import torch

from tokenspeed_kernel import QuantizedTensor

GGUF: Final = {
    "gguf_q4_0": (gguf.GGMLQuantizationType.Q4_0, 32, 18),
    "gguf_q4_1": (gguf.GGMLQuantizationType.Q4_1, 32, 20),
    "gguf_q8_0": (gguf.GGMLQuantizationType.Q8_0, 32, 34),
    "gguf_q4_k": (gguf.GGMLQuantizationType.Q4_K, 256, 144),
    "gguf_q6_k": (gguf.GGMLQuantizationType.Q6_K, 256, 210),
}
GROUPED: Final = ("int4@group_32", "int4@group_64", "uint4@group_32", "uint4@group_128", "mxint4@block_32")


def gguf_weight(name: str, rows: int, columns: int, seed: int = 0) -> tuple[QuantizedTensor, torch.Tensor]:
    """A weight of random bits, and its values in float64 as the `gguf` package dequantizes it."""
    rng = np.random.default_rng(seed)
    kind, elements, size = GGUF[name]
    blocks = rng.integers(0, 256, (rows, columns // elements, size), dtype=np.uint8)
    # Every bit of the values and of the inner scales is random; the outer ones are numbers of a sane size, of both signs.
    for place, largest in {"gguf_q6_k": ((208, 0.002),), "gguf_q8_0": ((0, 0.01),)}.get(name, ((0, 0.02), (2, 0.1))):
        if place == 2 and name == "gguf_q4_0":
            continue
        signs = rng.choice((-1.0, 1.0), blocks.shape[:2])
        halves = (rng.uniform(largest / 2, largest, blocks.shape[:2]) * signs).astype(np.float16)
        blocks[:, :, place : place + 2] = halves.view(np.uint8).reshape(*blocks.shape[:2], 2)
    data = blocks.reshape(rows, columns // elements * size)
    values = gguf.quants.dequantize(data, kind) if rows and columns else np.zeros((rows, columns))
    return QuantizedTensor(torch.from_numpy(data), f"{name}@inline", (rows, columns)), torch.from_numpy(values).double()


def grouped_weight(fmt: str, rows: int, columns: int, scale: torch.dtype, seed: int = 0) -> tuple[QuantizedTensor, torch.Tensor]:
    """A group-wise weight of random bits, and its values in float64."""
    generator = torch.Generator().manual_seed(seed)
    logical, _, layout = fmt.partition("@")
    group = int(layout.rpartition("_")[2])
    data = torch.randint(0, 256, (rows, columns // 2), generator=generator, dtype=torch.uint8)
    scales = (torch.rand(rows, columns // group, generator=generator) + 0.1).to(scale)
    zeros = torch.randint(0, 16, scales.shape, generator=generator, dtype=torch.uint8) if logical == "uint4" else None
    codes = torch.stack((data & 15, data >> 4), dim=-1).reshape(rows, columns).double()
    if logical == "mxint4":
        codes = codes - 16 * (codes >= 8)
    else:
        codes = codes - (8.0 if zeros is None else zeros.double().repeat_interleave(group, dim=1))
    values = codes * scales.double().repeat_interleave(group, dim=1)
    return QuantizedTensor(data, fmt, (rows, columns), scale=scales, zero_point=zeros), values


def rounded(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What the kernels make of activations: (values in float64 after rounding to 8 bits, step of each number)."""
    blocks = x.float().reshape(*x.shape[:-1], -1, 32)
    largest = blocks.abs().amax(dim=-1, keepdim=True)
    inverse = torch.where(largest > 0, torch.tensor(127.0) / largest, torch.tensor(0.0))
    step = (largest / 127).double()
    values = torch.round(blocks * inverse).double() * step
    return values.reshape(x.shape), step.expand(blocks.shape).reshape(x.shape)
