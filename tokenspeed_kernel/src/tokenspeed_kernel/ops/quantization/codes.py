"""The numbers of the codes of four bits."""

from __future__ import annotations

__all__ = ["CODE_VALUES", "E2M1_VALUES"]

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""Numbers of the sixteen e2m1 codes."""

_TWOS_COMPLEMENT = tuple(float(code - 16 if code > 7 else code) for code in range(16))
CODE_VALUES: dict[str, tuple[float, ...]] = {
    "nvfp4": E2M1_VALUES,
    "mxfp4": E2M1_VALUES,
    "mxint4": _TWOS_COMPLEMENT,
    "int4": tuple(float(code - 8) for code in range(16)),
    "uint4": tuple(float(code) for code in range(16)),
}
"""Number of each code, by logical format, before scales and zero points."""
