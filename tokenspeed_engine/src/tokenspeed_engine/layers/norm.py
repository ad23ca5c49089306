"""RMSNorm, with the residual addition before it."""

from __future__ import annotations

from torch import Tensor

from tokenspeed_engine.layers.module import Module
from tokenspeed_engine.parallel import Parameter
from tokenspeed_kernel.ops.norm import fused_add_rms_norm, rms_norm


class RMSNorm(Module):
    """x / rms(x) * weight over the last dimension.

    Args:
        dim: H.
        eps: added to the mean square.
    """

    def __init__(self, dim: int, eps: float) -> None:
        self.weight = Parameter((dim,))
        self._eps = eps

    def process_weights(self) -> None:
        """See `Module.process_weights`."""
        self._weight = self.weight.tensor()

    def __call__(self, x: Tensor) -> Tensor:
        """[..., H] -> a new [..., H]."""
        return rms_norm(x, self._weight, eps=self._eps)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """residual += x; returns norm(residual). Both tensors are overwritten: x holds the result."""
        fused_add_rms_norm(x, residual, self._weight, eps=self._eps, out=x, residual_out=residual)
        return x
