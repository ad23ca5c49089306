"""Attention to fp8 caches with scales on the CPU; see the public ops for the contracts."""

from __future__ import annotations

from typing import Final

from tokenspeed_kernel.ops.attention.cpu import mha
from tokenspeed_kernel.ops.attention.scaling import decode_through, extend_through

mha_extend_scaled: Final = extend_through(mha.mha_extend)
mha_decode_scaled: Final = decode_through(mha.mha_decode)
