"""The formats that the kernels read, by the numbers that the extension knows them by (`csrc/quantized.h`, `csrc/attend_args.h`)."""

from __future__ import annotations

from typing import Final

import torch

__all__ = ["INT4", "NUMBERS", "SCALES", "STORED"]

STORED: Final = {"gguf_q4_0": 0, "gguf_q4_1": 1, "gguf_q8_0": 2, "gguf_q4_k": 3, "gguf_q6_k": 4}
"""GGUF blocks."""
INT4: Final = {"int4": 5, "uint4": 5, "mxint4": 5}
"""Group-wise 4-bit values."""
SCALES: Final = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2}
"""How the scales of group-wise values are stored."""
NUMBERS: Final = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""Plain numbers."""
