"""Attention to fp8 caches with scales, around the Triton kernels; see the public ops for the contracts."""

from __future__ import annotations

from typing import Final

from tokenspeed_kernel.ops.attention.scaling import decode_through, extend_through
from tokenspeed_kernel.ops.attention.triton import decode, extend

mha_extend_scaled: Final = extend_through(extend.mha_extend)
mha_decode_scaled: Final = decode_through(decode.mha_decode)
