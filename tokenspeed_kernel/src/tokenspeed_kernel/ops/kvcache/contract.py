"""What the cache op is: operands, parameters and traits."""

from __future__ import annotations

from typing import Final

from tokenspeed_kernel.spec import OpContract
from tokenspeed_kernel.traits import Trait

WRITE_KV: Final = OpContract(
    name="kvcache.write_kv",
    operands=("k", "v", "k_cache", "v_cache"),
    parameters=("k", "v", "k_cache", "v_cache", "slot_mapping"),
    traits=(Trait("head_dim", "elements of one head"), Trait("page_size", "tokens in a page of the cache")),
    summary="write new keys and values into their slots of a paged cache",
)

CONTRACTS: Final = (WRITE_KV,)
