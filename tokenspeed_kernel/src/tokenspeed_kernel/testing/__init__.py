"""Conformance of kernels: each one is held against the reference on its op's cases."""

from tokenspeed_kernel.testing.conformance import ConformanceError, check_case, family_cases, public_op

__all__ = ["ConformanceError", "check_case", "family_cases", "public_op"]
