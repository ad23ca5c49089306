"""Cache kernels for Hopper."""

from __future__ import annotations

from typing import Final

from tokenspeed_kernel.ops.kvcache.contract import ROPE_WRITE_KV, rope_write_formats
from tokenspeed_kernel.spec import Band, Capability, KernelSpec, Verified, VerifiedBy

__all__ = ["SPECS"]

SPECS: Final = (
    KernelSpec(
        op=ROPE_WRITE_KV.name,
        name="hopper_rope_write_kv",
        solution="hopper",
        band=Band.SPECIALIZED,
        implementation="tokenspeed_kernel.ops.kvcache.hopper.rope_write:rope_write_kv",
        # Sizes are this chip's, and few tokens are a chained launch.
        capability=Capability(("sm_90a",), interpreter=True),
        formats=rope_write_formats(("fp32", "bf16", "fp16")),
        requires=("triton",),
        graph_safe=True,
        verified=(
            Verified(VerifiedBy.SILICON, "H200 (sm_90)", "every byte that of the two ops; a graph of chained launches only timed"),
            Verified(VerifiedBy.INTERPRETER, "x86-64"),
            Verified(VerifiedBy.COMPILED, "sm_90a", "Triton 3.6 and 3.9: 16-byte accesses, nothing spilled"),
        ),
    ),
)
