"""Scaling to fp8 on the CPU."""

from __future__ import annotations

import torch

from tokenspeed_kernel.ops.kvcache.cpu.write_kv import write_kv

__all__ = ["quantize_kv", "write_scaled_kv"]

_LARGEST = 448.0


def write_scaled_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
) -> None:
    """See `tokenspeed_kernel.ops.kvcache.write_scaled_kv`."""
    # As bytes: an indexed copy of fp8 is not there on every version of PyTorch.
    kept_k, kept_v = (_scaled(one, scale).view(torch.uint8) for one, scale in ((k, k_scale), (v, v_scale)))
    write_kv(kept_k, kept_v, k_cache.view(torch.uint8), v_cache.view(torch.uint8), slot_mapping)


def quantize_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
    *,
    k_out: torch.Tensor | None = None,
    v_out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `tokenspeed_kernel.ops.kvcache.quantize_kv`."""
    kept_k, kept_v = _scaled(k, k_scale), _scaled(v, v_scale)
    return (kept_k if k_out is None else k_out.copy_(kept_k), kept_v if v_out is None else v_out.copy_(kept_v))


def _scaled(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    divided = torch.empty(x.shape)
    torch.div(x.float(), scale if scale.dim() == 0 else scale[:, None], out=divided)
    return divided.clamp_(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn)  # clamp leaves NaN as it is
