"""Attention kernels for Hopper."""

from __future__ import annotations

from typing import Final

from tokenspeed_kernel.ops.attention.hopper.prefill_specs import PREFILL_SPECS
from tokenspeed_kernel.signature import Signature
from tokenspeed_kernel.spec import Band, Capability, KernelSpec, Verified, VerifiedBy
from tokenspeed_kernel.traits import OneOf, PowerOfTwo, Range

__all__ = ["SPECS"]

_BOTH: Final = OneOf(False, True)


def _decode(name: str, band: Band, priority: int, *, window: bool) -> KernelSpec:
    return KernelSpec(
        op="attention.mha_decode",
        name=name,
        solution="hopper",
        band=band,
        priority=priority,
        implementation="tokenspeed_kernel.ops.attention.hopper.decode:mha_decode",
        # Tile shapes, stages and the number of programs are those of this chip's shared memory and multiprocessors.
        capability=Capability(("sm_90a",), interpreter=True),
        formats=Signature.same(("q", "k_cache", "v_cache"), ("bf16", "fp16")),
        # The 16 keys of a lane lie in one page.
        traits={
            "head_dim": OneOf(64, 128),
            "page_size": PowerOfTwo(16, 4096),
            "sliding_window": OneOf(window),
            **dict.fromkeys(("logit_cap", "sinks", "return_lse"), _BOTH),
        },
        requires=("triton",),
        graph_safe=True,
        verified=(
            Verified(VerifiedBy.SILICON, "H200 (sm_90)", "ragged, logit_cap, one dominant key, graph replay"),
            Verified(VerifiedBy.INTERPRETER, "x86-64"),
            Verified(VerifiedBy.COMPILED, "sm_90a", "Triton 3.6 and 3.9: mma.sync, cp.async; no spill in the loop over tiles"),
        ),
    )


SPECS: Final = (
    _decode("hopper_mha_decode", Band.SPECIALIZED, 0, window=False),
    # A window of 128 keys is no more than a launch: there the portable kernel is ahead (9.0 us against 10.6 at 64 requests).
    _decode("hopper_mha_decode_window", Band.PORTABLE, -2, window=True),
    KernelSpec(
        op="attention.merge_states",
        name="hopper_merge_states",
        solution="hopper",
        band=Band.SPECIALIZED,
        implementation="tokenspeed_kernel.ops.attention.hopper.merge:merge_states",
        capability=Capability(("sm_90a",), interpreter=True),
        formats=Signature.same(("outs",), ("fp32", "bf16", "fp16")),
        # A kernel is compiled for each number of states, with that many pointers.
        traits={"num_states": Range(1, 32), "head_dim": Range(1, 4096)},
        requires=("triton",),
        graph_safe=True,
        verified=(
            Verified(VerifiedBy.SILICON, "H200 (sm_90)", "its plain launch; chained launches only timed"),
            Verified(VerifiedBy.INTERPRETER, "x86-64"),
            Verified(VerifiedBy.COMPILED, "sm_90a", "Triton 3.6 and 3.9"),
        ),
    ),
    *PREFILL_SPECS,
)
