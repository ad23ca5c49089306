"""fp8 e4m3 in integer arithmetic, for GPUs that lack the conversion as well (sm_80, gfx90a)."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["decode_e4m3", "encode_e4m3"]


@triton.jit
def encode_e4m3(x):
    """float32 to the bits of e4m3, in int32: to nearest even, bounded to 448; NaN stays NaN."""
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    # From 2**-6 on: keep three bits of the mantissa, and move the exponent's bias from 127 to 7.
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - 960
    # Below, multiples of 2**-9, which is the last place of numbers from 2**14 on: the sum rounds as it should.
    small = (tl.abs(x) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.minimum(tl.where(magnitude < 0x3C800000, small, normal), 0x7E)
    code = tl.where(magnitude > 0x7F800000, 0x7F, code)
    return code | ((bits >> 24) & 0x80)


@triton.jit
def decode_e4m3(code):
    """The bits of e4m3 to float32."""
    code = code.to(tl.int32)
    magnitude = code & 0x7F
    # The exponent's bias moves from 7 to 127; below 2**-6 the numbers are multiples of 2**-9.
    normal = ((magnitude << 20) + (120 << 23)).to(tl.float32, bitcast=True)
    small = magnitude.to(tl.float32) * 0.001953125
    value = tl.where(magnitude < 8, small, normal)
    value = tl.where(magnitude == 0x7F, float("nan"), value)
    return tl.where((code & 0x80) != 0, -value, value)
