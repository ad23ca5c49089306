"""Whether the kernels here can work with a cache of another type than the activations."""

from __future__ import annotations

import torch

from tokenspeed_engine.kvcache.pool import KVLayout
from tokenspeed_kernel import NoKernelError
from tokenspeed_kernel.ops.attention import mha_decode, mha_extend
from tokenspeed_kernel.ops.kvcache import write_kv


class KVCacheTypeError(ValueError):
    """No kernel writes or reads a cache of that type on this device."""


def check_cache_dtype(layout: KVLayout, dtype: torch.dtype, device: torch.device) -> None:
    """Write one token into a page, and attend to it in both ways: what fails here would fail in the first step.

    Args:
        layout: of the cache.
        dtype: of queries, keys and values.
        device: where the model runs.
    Raises:
        KVCacheTypeError: a kernel is missing; the message has each one's reason.
    """
    if layout.dtype == dtype:
        return
    shape = (1, layout.page_size, layout.num_kv_heads, layout.head_dim)
    k_cache, v_cache = (torch.zeros(shape, dtype=layout.dtype, device=device) for _ in "kv")
    rows = torch.zeros(1, layout.num_kv_heads, layout.head_dim, dtype=dtype, device=device)
    slot, page = torch.zeros(1, dtype=torch.int64, device=device), torch.zeros(1, 1, dtype=torch.int32, device=device)
    lens, starts = torch.ones(1, dtype=torch.int32, device=device), torch.tensor([0, 1], dtype=torch.int32, device=device)
    try:
        write_kv(rows, rows, k_cache, v_cache, slot)
        mha_decode(rows, k_cache, v_cache, page, lens, max_seqlen_k=1)
        mha_extend(rows, k_cache, v_cache, page, starts, lens, max_seqlen_q=1, max_seqlen_k=1)
    except NoKernelError as error:
        named = str(layout.dtype).removeprefix("torch.")
        reasons = "".join(f"\n  {kernel}: {reason}" for kernel, reason in error.rejections)
        raise KVCacheTypeError(
            f"--kv-cache-dtype {named}: no kernel for {error.request}{reasons}\nFix: use --kv-cache-dtype auto."
        ) from error
