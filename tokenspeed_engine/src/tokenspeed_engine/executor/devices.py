"""Which device and compute type a configuration means."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class DeviceError(ValueError):
    """The device that was asked for is not there."""


def resolve_device(name: str) -> torch.device:
    """Turn `auto`, `cpu`, `cuda` or `cuda:N` into a device.

    Raises:
        DeviceError: torch sees no such device.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        index = device.index or 0
        if index >= count:
            raise DeviceError(
                f"device {name!r}: torch sees {count} CUDA device(s). Fix: use --device cpu, or a torch built for CUDA."
            )
        return torch.device("cuda", index)
    return device


def resolve_dtype(name: str, device: torch.device, config: Mapping[str, Any]) -> torch.dtype:
    """Turn `auto` or a name into the compute type of the weights.

    `auto` is float32 on a CPU, where 16-bit products are often slower by an order of magnitude, and the checkpoint's own type on a
    GPU (bfloat16 where it is float32 or not stated).

    Raises:
        DeviceError: the GPU has no bfloat16.
    """
    if name == "auto":
        nested = config.get("text_config")
        stated = config.get("dtype") or config.get("torch_dtype") or (nested or {}).get("dtype")
        is_half = str(stated).removeprefix("torch.") == "float16"
        dtype = torch.float32 if device.type == "cpu" else torch.float16 if is_half else torch.bfloat16
    else:
        dtype = _DTYPES[name]
    if device.type == "cuda" and dtype == torch.bfloat16 and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise DeviceError(f"{torch.cuda.get_device_name(device)} has no bfloat16. Fix: use --dtype float16.")
    return dtype
