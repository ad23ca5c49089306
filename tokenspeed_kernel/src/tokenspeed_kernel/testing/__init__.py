"""Conformance of kernels: each one is held against the reference on its op's cases."""

from tokenspeed_kernel.testing.compare import ConformanceError, Difference
from tokenspeed_kernel.testing.conformance import check_case, family_cases, public_op

__all__ = ["ConformanceError", "Difference", "check_case", "family_cases", "public_op"]
