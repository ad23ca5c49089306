"""PyTorch's own way to the same result, in the fewest calls, timed beside our kernels. Vendor libraries are kernels themselves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.nn import functional

__all__ = ["PEERS", "Peer"]


@dataclass(frozen=True, slots=True)
class Peer:
    """What PyTorch has for an op; `run` takes the arguments of the op by name."""

    name: str
    run: Callable[..., Any]


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6, **_: Any) -> torch.Tensor:
    return functional.rms_norm(x, weight.shape, weight, eps)


def _fused_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6, **_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    total = x.add(residual)
    return functional.rms_norm(total, weight.shape, weight, eps), total


def _silu_and_mul(gate_up: torch.Tensor, **_: Any) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate).mul_(up)


def _embedding(token_ids: torch.Tensor, weight: torch.Tensor, **_: Any) -> torch.Tensor:
    return functional.embedding(token_ids, weight)


def _mm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, **_: Any) -> torch.Tensor:
    return functional.linear(x, weight, bias)


def _argmax(logits: torch.Tensor, **_: Any) -> torch.Tensor:
    return logits.argmax(-1)


PEERS: Final = {
    "norm.rms_norm": Peer("rms_norm", _rms_norm),
    "norm.fused_add_rms_norm": Peer("add, rms_norm", _fused_add_rms_norm),
    "activation.silu_and_mul": Peer("silu, mul", _silu_and_mul),
    "embedding.embedding": Peer("embedding", _embedding),
    "gemm.mm": Peer("linear", _mm),
    "sampling.argmax": Peer("argmax", _argmax),
}
"""By op. A case that PyTorch cannot run (a packed weight) has no row of it."""
