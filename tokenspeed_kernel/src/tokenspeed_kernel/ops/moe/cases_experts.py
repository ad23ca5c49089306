"""Cases of the experts: every option, every format, and the batches that go wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tokenspeed_kernel.case import Case, Tolerance
from tokenspeed_kernel.ops.moe.contract import ACTIVATION_FORMATS, FUSED_EXPERTS, WEIGHT_FORMATS
from tokenspeed_kernel.ops.moe.gate import GatedActivation
from tokenspeed_kernel.ops.quantization.cases import random_quantized
from tokenspeed_kernel.quantized import QuantizedTensor, data_shape, scale_shape
from tokenspeed_kernel.signature import GGUF_BLOCKS, Format

__all__ = ["CLAMPED", "EXPERT_CASES", "ROUNDED", "random_experts"]

_Build = Callable[[torch.Generator, torch.device, torch.dtype], dict[str, Any]]
CLAMPED = GatedActivation(limit=7.0, alpha=1.702, up_offset=1.0)


def random_experts(
    generator: torch.Generator, shape: tuple[int, int, int], fmt: str, device: torch.device, dtype: torch.dtype
) -> torch.Tensor | QuantizedTensor:
    """Random matrices [num_experts, rows, columns] with numbers of about 1 / sqrt(columns).

    Args:
        generator: of the numbers; on `device`, or on the CPU.
        shape: logical shape.
        fmt: text form of a scaled format, or empty for a plain tensor.
        device: where they go.
        dtype: of a plain tensor.
    """
    where = generator.device
    size = float(max(shape[-1], 1) ** -0.5)
    if not fmt:
        return (torch.randn(shape, generator=generator, device=where) * size).to(device, dtype)
    form = Format.parse(fmt)
    if form.logical in GGUF_BLOCKS:
        return random_quantized(form, shape, generator, device, magnitude=size)
    stored = data_shape(form, shape)
    scales = scale_shape(form, shape)
    assert scales is not None
    if form.storage is torch.uint8:
        data = torch.randint(0, 256, stored, generator=generator, dtype=torch.uint8, device=where)
        size /= 4  # of codes up to 8
    else:
        data = torch.randn(stored, generator=generator, device=where).to(form.storage)
    spread = 0.5 + torch.rand(scales, generator=generator, device=where)
    total = zero = None
    if form.logical == "nvfp4":
        scale = spread.to(torch.float8_e4m3fn)
        total = torch.full(shape[:1], size, device=where) * (1 + torch.arange(shape[0], device=where) % 2)
    elif form.logical in ("mxfp4", "mxfp8_e4m3", "mxfp8_e5m2"):
        scale = (spread * size).log2().round().add(127).to(torch.uint8)
    else:
        scale = (spread * size).to(torch.bfloat16 if form.logical == "mxint4" else torch.float32)
    if form.logical == "uint4":
        zero = torch.randint(4, 12, scales, generator=generator, dtype=torch.uint8, device=where)
    parts = (None if part is None else part.to(device) for part in (scale, total, zero))
    return QuantizedTensor(data.to(device), form, shape, *parts)


def _experts(
    num_tokens: int,
    num_experts: int,
    top_k: int,
    hidden: int,
    inner: int,
    *,
    ids: str = "distinct",
    fmt: str = "",
    gate: GatedActivation | None = None,
    bias: str = "",
    layout: str = "",
    first_expert: int = 0,
    addend: bool = False,
    rows: str = "",
) -> _Build:
    def build(generator: torch.Generator, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
        from tokenspeed_kernel.ops.moe.cases import pair_ids  # cases imports this module

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).to(device, dtype)

        x = normal(num_tokens, hidden)
        topk_ids = pair_ids(generator, num_tokens, top_k, num_experts, ids, first_expert).to(device)
        weights = torch.rand(num_tokens, top_k, generator=generator).to(device)
        w13 = random_experts(generator, (num_experts, 2 * inner, hidden), fmt, device, dtype)
        w2 = random_experts(generator, (num_experts, hidden, inner), fmt, device, dtype)
        if layout == "transposed":  # as weights stored [.., in, out] come
            x, topk_ids, weights = (one.t().contiguous().t() for one in (x, topk_ids, weights))
            w13, w2 = (_swapped(one) for one in (w13, w2))
        if layout == "sliced":
            x = x.repeat_interleave(2, dim=1)[:, ::2]
            w13, w2 = (one.repeat_interleave(2, dim=0)[::2] if isinstance(one, torch.Tensor) else one for one in (w13, w2))
        inputs: dict[str, Any] = {"x": x, "w13": w13, "w2": w2, "topk_ids": topk_ids, "topk_weights": weights}
        if bias:
            wide = torch.float32 if bias == "wide" else dtype
            inputs["w13_bias"] = normal(num_experts, 2 * inner).to(wide)
            inputs["w2_bias"] = normal(num_experts, hidden).to(wide)
        if addend:
            inputs["addend"] = normal(num_tokens, hidden)
        options = {"activation": gate, "first_expert": first_expert or None, "activation_format": rows or None}
        return {**inputs, **{name: value for name, value in options.items() if value is not None}}

    return build


def _swapped(stack: torch.Tensor | QuantizedTensor) -> torch.Tensor | QuantizedTensor:
    return stack.transpose(1, 2).contiguous().transpose(1, 2) if isinstance(stack, torch.Tensor) else stack


# The gated values are rounded to x's dtype between the products, and results of experts once more before they are summed; the
# gate with an offset of 1 and unit biases makes values of up to about 8.
_TOLERANCE = {
    torch.float32: Tolerance(2e-5, 3e-5),
    torch.float16: Tolerance(4e-3, 8e-3),
    torch.bfloat16: Tolerance(3e-2, 6e-2),
}
# A gated value that lies between two fp8 numbers may be rounded to either, which are up to an eighth of it apart.
ROUNDED = {dtype: Tolerance(max(one.relative, 2e-2), max(one.absolute, 0.2)) for dtype, one in _TOLERANCE.items()}
_SHAPES: tuple[tuple[str, _Build], ...] = (
    ("empty 0 tokens", _experts(0, 4, 2, 16, 16)),
    ("one token, one expert", _experts(1, 1, 1, 16, 16)),
    ("one token, top 8", _experts(1, 12, 8, 32, 16)),
    ("top 1, 3 tokens", _experts(3, 5, 1, 16, 32)),
    ("odd 5 tokens, 7 experts, 37x21", _experts(5, 7, 3, 37, 21)),
    ("an expert without tokens", _experts(4, 9, 2, 32, 16)),
    ("all on one expert", _experts(40, 3, 2, 16, 16, ids="one")),
    ("some -1", _experts(40, 5, 2, 16, 16, ids="missing")),
    ("some -1, one token", _experts(1, 5, 4, 16, 16, ids="missing")),
    ("nothing here", _experts(3, 4, 2, 16, 16, ids="none")),
    ("nothing here, addend", _experts(40, 4, 2, 16, 16, ids="none", addend=True)),
    ("experts of other ranks", _experts(33, 4, 4, 16, 16, ids="outside", first_expert=4)),
    ("experts of other ranks, one token", _experts(1, 4, 8, 16, 16, ids="outside", first_expert=4)),
    ("repeated ids", _experts(24, 3, 4, 16, 16, ids="repeated")),
    ("addend", _experts(40, 5, 2, 24, 16, addend=True)),
    ("addend, one token", _experts(1, 5, 2, 24, 16, addend=True)),
    ("transposed", _experts(6, 5, 2, 24, 20, layout="transposed")),
    ("transposed, many tokens", _experts(40, 5, 2, 24, 20, layout="transposed")),
    ("sliced", _experts(6, 5, 2, 24, 20, layout="sliced")),
    ("bias", _experts(6, 5, 2, 24, 20, bias="narrow")),
    ("fp32 bias, many tokens", _experts(40, 5, 2, 24, 20, bias="wide")),
    ("clamped", _experts(6, 5, 2, 24, 20, gate=CLAMPED)),
    ("clamped, bias, many tokens", _experts(40, 5, 2, 24, 20, gate=CLAMPED, bias="narrow")),
    ("low limit", _experts(6, 5, 2, 24, 20, gate=GatedActivation(limit=0.25))),
    ("gelu", _experts(6, 5, 2, 24, 20, gate=GatedActivation("gelu"))),
    ("gelu_tanh, many tokens", _experts(40, 5, 2, 24, 20, gate=GatedActivation("gelu_tanh"))),
    ("several blocks 70 tokens, 150x90", _experts(70, 3, 2, 150, 90)),
)
_FORMATS: tuple[tuple[str, _Build], ...] = (
    *((f"{fmt}, 2 tokens", _experts(2, 3, 2, 128, 128, fmt=fmt, ids="missing")) for fmt in WEIGHT_FORMATS),
    *((f"{fmt}, 17 tokens", _experts(17, 2, 2, 128, 128, fmt=fmt)) for fmt in WEIGHT_FORMATS),
    # As files for the CPU have them.
    *((f"{name}@inline, 5 tokens", _experts(5, 2, 2, 256, 256, fmt=f"{name}@inline")) for name in GGUF_BLOCKS),
    *(
        (f"{fmt}, odd blocks, {tokens} tokens", _experts(tokens, 2, 2, 136, 72, fmt=fmt))
        for fmt in ("fp8_e4m3@block_128x128", "fp8_e5m2@channel", "int4@channel")
        for tokens in (1, 20)
    ),
    *(
        (f"{fmt}, clamped, bias, {tokens} tokens", _experts(tokens, 3, 2, 96, 96, fmt=fmt, gate=CLAMPED, bias="narrow"))
        for fmt in ("mxfp4@block_32",)
        for tokens in (1, 20)
    ),
)
_PAIRS = tuple((rows, weight) for rows, weights in ACTIVATION_FORMATS.items() for weight in weights)
_IN_FP8: tuple[tuple[str, _Build], ...] = (
    *((f"{rows} {fmt}, 2 tokens", _experts(2, 3, 2, 128, 128, fmt=fmt, rows=rows, ids="missing")) for rows, fmt in _PAIRS),
    *((f"{rows} {fmt}, 33 tokens", _experts(33, 2, 2, 256, 128, fmt=fmt, rows=rows)) for rows, fmt in _PAIRS),
    *(
        (f"{rows} {fmt}, odd blocks, {tokens} tokens", _experts(tokens, 2, 2, 136, 72, fmt=fmt, rows=rows, layout="sliced"))
        for rows, fmt in _PAIRS
        for tokens in (1, 20)
    ),
    *(
        (f"{rows} {fmt}, everything, {tokens} tokens", _experts(
            tokens, 4, 4, 128, 128, fmt=fmt, rows=rows, ids="outside", first_expert=4, gate=CLAMPED, bias="narrow", addend=True
        ))
        for rows, fmt in _PAIRS[1:]
        for tokens in (1, 33)
    ),
    *((f"{rows} {fmt}, no token", _experts(0, 2, 2, 128, 128, fmt=fmt, rows=rows)) for rows, fmt in _PAIRS[:1]),
)  # fmt: skip
_BENCH: tuple[tuple[str, _Build], ...] = (
    *((f"{tokens} tokens, top 4 of 16, 1024x512", _experts(tokens, 16, 4, 1024, 512)) for tokens in (1, 16, 64)),
    ("16 tokens, top 4 of 16, 1024x512, fp8_e4m3@block_128x128", _experts(16, 16, 4, 1024, 512, fmt="fp8_e4m3@block_128x128")),
    ("16 tokens, top 4 of 16, 1024x512, mxfp4@block_32", _experts(16, 16, 4, 1024, 512, fmt="mxfp4@block_32")),
)
_BENCH_IN_FP8: tuple[tuple[str, _Build], ...] = (
    (
        "64 tokens, top 4 of 16, 1024x512, fp8_e4m3@block_1x128 fp8_e4m3@block_128x128",
        _experts(64, 16, 4, 1024, 512, fmt="fp8_e4m3@block_128x128", rows="fp8_e4m3@block_1x128"),
    ),
)

EXPERT_CASES = tuple(
    Case(FUSED_EXPERTS.name, label, build, tolerance=tolerance, bench=bench)
    for group, tolerance, bench in (
        (_SHAPES, _TOLERANCE, False),
        (_FORMATS, _TOLERANCE, False),
        (_IN_FP8, ROUNDED, False),
        (_BENCH, _TOLERANCE, True),
        (_BENCH_IN_FP8, ROUNDED, True),
    )
    for label, build in group
)
