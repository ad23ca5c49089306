"""Operand formats and signatures: how the numbers of each operand are stored and scaled.

A format says three things: the storage dtype, the logical format of the numbers, and the layout of their scales. A bare
"fp8" says none of them well enough to choose a kernel, so it is refused. What the bytes of each scaled format are, says
`docs/contracts/quantization.md`.
"""

from __future__ import annotations

import difflib
import functools
import itertools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from tokenspeed_kernel.errors import FormatError

__all__ = ["GGUF_BLOCKS", "SCALE_LAYOUTS", "Format", "Signature"]

_PLAIN: dict[str, torch.dtype] = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "int64": torch.int64,
    "int32": torch.int32,
    "int16": torch.int16,
    "int8": torch.int8,
    "uint8": torch.uint8,
    "bool": torch.bool,
}
# These mean nothing without their scales; "none" must be written out where the values really stand alone.
_SCALED: dict[str, torch.dtype] = {
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e4m3fnuz": torch.float8_e4m3fnuz,
    "fp8_e5m2": torch.float8_e5m2,
    "fp8_e5m2fnuz": torch.float8_e5m2fnuz,
    "mxfp8_e4m3": torch.float8_e4m3fn,
    "mxfp8_e5m2": torch.float8_e5m2,
    "nvfp4": torch.uint8,  # two values a byte
    "mxfp4": torch.uint8,
    "mxint4": torch.uint8,
    "int4": torch.uint8,
    "uint4": torch.uint8,
    "gguf_q4_0": torch.uint8,
    "gguf_q4_1": torch.uint8,
    "gguf_q8_0": torch.uint8,
    "gguf_q4_k": torch.uint8,
    "gguf_q6_k": torch.uint8,
}
_DTYPES = _PLAIN | _SCALED
# The first four scaled ones have a dtype of their own, from which they can be told.
_SHORT = {dtype: name for name, dtype in [*_PLAIN.items(), *list(_SCALED.items())[:4]]}
SCALE_LAYOUTS = (
    "none", "tensor", "channel", "token", "block_1x128", "block_128x128", "block_16", "block_32", "group_32", "group_64",
    "group_128", "inline", "head",
)  # fmt: skip
"""Scale layouts: one scale a tensor, an output channel, a token, a head, or a block or group of that many elements; `inline`:
the scales lie between the values, in the blocks of the file format."""
GGUF_BLOCKS = {
    "gguf_q4_0": (32, 18),
    "gguf_q4_1": (32, 20),
    "gguf_q8_0": (32, 34),
    "gguf_q4_k": (256, 144),
    "gguf_q6_k": (256, 210),
}
"""Elements and bytes of one block of each GGUF format."""
_FP8_LAYOUTS = ("none", "tensor", "channel", "token", "head", "block_1x128", "block_128x128")
_GROUPS = ("group_32", "group_64", "group_128", "channel")
# Where only some layouts exist; the others are misspellings, and would never find a kernel.
_LAYOUTS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("fp8_e4m3", "fp8_e4m3fnuz", "fp8_e5m2", "fp8_e5m2fnuz"), _FP8_LAYOUTS),
    **dict.fromkeys(("mxfp8_e4m3", "mxfp8_e5m2", "mxfp4", "mxint4"), ("block_32",)),
    "nvfp4": ("block_16",),
    "int4": _GROUPS,
    "uint4": _GROUPS,
    **dict.fromkeys(GGUF_BLOCKS, ("inline",)),
}
_FIX = "write the logical format and its scale layout, such as fp8_e4m3@tensor or fp8_e4m3@block_128x128"


@dataclass(frozen=True, slots=True)
class Format:
    """Storage dtype, logical format and scale layout of one operand.

    Args:
        storage: dtype of the tensor that holds the values.
        logical: name of the number format: `bf16`, `fp8_e4m3`, `nvfp4`, ...
        scale: one of `SCALE_LAYOUTS`.
    """

    storage: torch.dtype
    logical: str
    scale: str = "none"

    @classmethod
    @functools.cache
    def parse(cls, text: str) -> Format:
        """Return the format written as `bf16` or `fp8_e4m3@block_128x128`.

        Raises:
            FormatError: the name is unknown, or leaves out what the format needs ("fp8").
        """
        logical, _, scale = text.strip().lower().partition("@")
        if logical in ("fp8", "fp4", "float8") or text.strip().lower() == "int4":
            raise FormatError(f"format: {text!r} names neither an encoding nor a scale layout\nFix: {_FIX}.")
        if logical not in _DTYPES:
            close = difflib.get_close_matches(logical, _DTYPES, n=3, cutoff=0.5)
            hint = f"did you mean {', '.join(close)}? " if close else ""
            raise FormatError(f"format: unknown {text!r}\nFix: {hint}known: {', '.join(_DTYPES)}.")
        if logical in _SCALED and not scale:
            raise FormatError(f"format: {text!r} lacks a scale layout ({', '.join(_LAYOUTS[logical])})\nFix: {_FIX}.")
        if logical in _PLAIN and scale not in ("", "none"):
            raise FormatError(f"format: {text!r}: {logical} takes no scales\nFix: write {logical}.")
        if (scale or "none") not in SCALE_LAYOUTS:
            raise FormatError(f"format: {text!r}: unknown scale layout\nFix: use one of {', '.join(SCALE_LAYOUTS)}.")
        if logical in _SCALED and scale not in _LAYOUTS[logical]:
            layouts = ", ".join(_LAYOUTS[logical])
            raise FormatError(f"format: {text!r}: {logical} has no scale layout {scale}\nFix: use one of {layouts}.")
        return cls(_DTYPES[logical], logical, scale or "none")

    @classmethod
    @functools.cache
    def of(cls, dtype: torch.dtype) -> Format:
        """Return the format of an unscaled tensor of that dtype.

        Raises:
            FormatError: no format stores its values in that dtype.
        """
        if dtype not in _SHORT:
            names = ", ".join(str(known).removeprefix("torch.") for known in _SHORT)
            raise FormatError(f"format: no format is stored as {dtype}\nFix: use one of {names}.")
        return cls(dtype, _SHORT[dtype])

    @classmethod
    def scaled(cls) -> tuple[Format, ...]:
        """Return every format whose values mean nothing without scales: all that a `QuantizedTensor` can have. Scales of a head are
        those of a cache, which is none."""
        pairs = ((name, layout) for name, layouts in _LAYOUTS.items() for layout in layouts if layout not in ("none", "head"))
        return tuple(cls.parse(f"{name}@{layout}") for name, layout in pairs)

    @property
    def block(self) -> tuple[int, int]:
        """Rows and columns that share a scale; 0 stands for all of them, (0, 0) where there is no scale."""
        if self.logical in GGUF_BLOCKS:
            return 1, GGUF_BLOCKS[self.logical][0]
        fixed = {"none": (0, 0), "head": (0, 0), "tensor": (0, 0), "channel": (1, 0), "token": (1, 0), "block_128x128": (128, 128)}
        return fixed[self.scale] if self.scale in fixed else (1, int(re.split("[_x]", self.scale)[-1]))

    def __hash__(self) -> int:
        # Keys of the dispatch tables hold formats; strings keep their hash, a tuple of fields would be built each time.
        return hash(self.logical) ^ hash(self.scale)

    def __str__(self) -> str:
        return f"{self.logical}@{self.scale}" if self.logical in _SCALED else self.logical


@dataclass(frozen=True, slots=True)
class Signature:
    """The format of each operand; an optional operand that is absent has no entry."""

    operands: tuple[tuple[str, Format], ...]

    @classmethod
    def of(cls, **operands: str | Format | torch.dtype) -> Signature:
        """Build one signature: `Signature.of(x="bf16", weight="fp8_e4m3@channel")`."""
        return cls(tuple((name, _as_format(value)) for name, value in operands.items()))

    @classmethod
    def same(cls, operands: Iterable[str], formats: Iterable[str]) -> tuple[Signature, ...]:
        """One signature for each format, which all the operands share."""
        names = tuple(operands)
        return tuple(cls.of(**dict.fromkeys(names, text)) for text in formats)

    @classmethod
    def product(cls, **operands: Iterable[str]) -> tuple[Signature, ...]:
        """One signature for each combination of the formats given for each operand."""
        combos = itertools.product(*operands.values())
        return tuple(cls.of(**dict(zip(operands, combo, strict=True))) for combo in combos)

    def get(self, operand: str) -> Format | None:
        """Return the operand's format, or None where it has no entry."""
        return next((value for name, value in self.operands if name == operand), None)

    def accepts(self, got: Signature) -> bool:
        """Say whether every operand that `got` has is here in the same format."""
        return all(self.get(name) == value for name, value in got.operands)

    def overlaps(self, other: Signature) -> bool:
        """Say whether some call fits both."""
        return all(other.get(name) in (None, value) for name, value in self.operands)

    def __iter__(self) -> Iterator[tuple[str, Format]]:
        return iter(self.operands)

    def __str__(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self.operands)


def _as_format(value: str | Format | torch.dtype) -> Format:
    if isinstance(value, Format):
        return value
    return Format.of(value) if isinstance(value, torch.dtype) else Format.parse(value)
