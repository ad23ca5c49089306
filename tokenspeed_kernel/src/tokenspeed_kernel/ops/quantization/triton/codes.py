"""Float32 numbers to codes, by integer operations: the same bits on every architecture, with and without the format in hardware."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["encode_values"]


@triton.jit
def _nearest_even(values):
    """Round to a whole number, ties to even: |values| < 2**22. The sum has no bits left for a fraction."""
    return (values + 12582912.0) - 12582912.0


@triton.jit
def _float_codes(
    values, SHIFT: tl.constexpr, BIAS: tl.constexpr, SMALLEST: tl.constexpr, STEP: tl.constexpr, LARGEST: tl.constexpr
):  # fmt: skip
    """Codes of a float8: the exponent is rebased and the mantissa rounded where it stands; subnormal numbers are whole steps.

    SHIFT: bits of the mantissa that go. BIAS: difference of the exponents' biases. SMALLEST: normal number. STEP: 1 / step.
    """
    size = tl.minimum(tl.abs(values), LARGEST)
    bits = size.to(tl.int32, bitcast=True)
    rounded = (bits + ((1 << (SHIFT - 1)) - 1) + ((bits >> SHIFT) & 1)) >> SHIFT
    normal = rounded - (BIAS << (23 - SHIFT))
    subnormal = (tl.minimum(size, SMALLEST) * STEP + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000
    codes = tl.where(size < SMALLEST, subnormal, normal)
    sign = (values.to(tl.int32, bitcast=True) >> 24) & 128
    return tl.where(values != values, 127, codes) | sign


@triton.jit
def _e2m1_codes(values):
    """A number just between two goes to the even code: up at every second one. NaN gives 0."""
    size = tl.abs(values)
    codes = (size > 0.25).to(tl.int32) + (size >= 0.75).to(tl.int32) + (size > 1.25).to(tl.int32) + (size >= 1.75).to(tl.int32)
    codes += (size > 2.5).to(tl.int32) + (size >= 3.5).to(tl.int32) + (size > 5.0).to(tl.int32)
    sign = (values.to(tl.int32, bitcast=True) >> 28) & 8
    return tl.where(values != values, 0, codes | sign)


@triton.jit
def encode_values(values, zeros, KIND: tl.constexpr):
    """Codes (int32) of float32 numbers that were divided by their scale. zeros: uint4's zero points, spread out."""
    if KIND == "e4m3":
        codes = _float_codes(values, 20, 120, 0.015625, 512.0, 448.0)
    elif KIND == "e5m2":
        codes = _float_codes(values, 21, 112, 6.103515625e-05, 65536.0, 57344.0)
    elif KIND == "e2m1":
        codes = _e2m1_codes(values)
    else:
        known = tl.where(values == values, values, 0.0)
        whole = _nearest_even(tl.minimum(tl.maximum(known, -64.0), 64.0))
        if KIND == "uint4":
            shifted = tl.minimum(tl.maximum(whole + zeros, 0.0), 15.0).to(tl.int32)
            codes = tl.where(values == values, shifted, 0)
        else:
            codes = tl.minimum(tl.maximum(whole, -8.0), 7.0).to(tl.int32)
            codes = codes + 8 if KIND == "int4" else codes & 15
    return codes
