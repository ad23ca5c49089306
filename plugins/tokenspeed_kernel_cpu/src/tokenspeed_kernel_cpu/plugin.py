"""What the plugin offers; imports nothing heavy."""

from __future__ import annotations

from typing import Final

from tokenspeed_kernel import Band, Capability, KernelSpec, OneOf, Plugin, Signature, Verified, VerifiedBy

_EITHER: Final = OneOf(False, True)


def _spec(op: str, operands: tuple[str, ...], *options: str) -> KernelSpec:
    family, _, name = op.partition(".")
    return KernelSpec(
        op=op,
        name=f"cpu_native_{name}",
        solution="cpu_native",
        # Above the built-in CPU kernels, and below the band of plugins: a kernel of someone else's still outranks these.
        band=Band.SPECIALIZED,
        implementation=f"tokenspeed_kernel_cpu.{family}:{name}",
        # "avx2" means AVX2 and FMA. The AVX-512 code is chosen inside.
        capability=Capability(("cpu",), features=frozenset({"avx2"})),
        formats=Signature.same(operands, ("fp32",)),
        traits=dict.fromkeys(options, _EITHER),
        requires=("tokenspeed_kernel_cpu._kernels",),
        verified=(Verified(VerifiedBy.SILICON, "x86-64 AVX2 and AVX-512"),),
    )


PLUGIN: Final = Plugin(
    api_version=(1, 0),
    specs=(
        _spec("norm.rms_norm", ("x", "weight")),
        _spec("norm.fused_add_rms_norm", ("x", "residual", "weight")),
        _spec("activation.silu_and_mul", ("gate_up",)),
        _spec("rope.apply_rope", ("q", "k", "cos_sin_cache")),
        _spec("kvcache.write_kv", ("k", "v", "k_cache", "v_cache")),
        _spec(
            "attention.mha_decode",
            ("q", "k_cache", "v_cache"),
            *("sliding_window", "logit_cap", "sinks", "return_lse"),
        ),
    ),
)
"""Read by `tokenspeed_kernel` through the entry point `cpu_native`."""
