"""What the plugin offers; imports nothing heavy."""

from __future__ import annotations

from typing import Final

from tokenspeed_kernel import Band, Capability, KernelSpec, OneOf, Plugin, Signature, Verified, VerifiedBy

_EITHER: Final = OneOf(False, True)
_GGUF: Final = tuple(f"gguf_{name}@inline" for name in ("q4_0", "q4_1", "q8_0", "q4_k", "q6_k"))
_GROUPED: Final = (*(f"{name}@group_{size}" for name in ("int4", "uint4") for size in (32, 64, 128)), "mxint4@block_32")

_OPTIONS: Final = ("sliding_window", "logit_cap", "sinks", "return_lse")
# Queries are worked on in float32 whatever they come in, so that the cache may be narrower.
_PAGED: Final = tuple(
    Signature.of(q=q, k_cache=cache, v_cache=cache)
    for q, cache in (("fp32", "fp32"), ("fp32", "bf16"), ("fp32", "fp16"), ("bf16", "bf16"))
)


def _spec(
    op: str, implementation: str, formats: tuple[Signature, ...], traits: dict[str, OneOf] | None = None, *more: Verified
) -> KernelSpec:
    return KernelSpec(
        op=op,
        name=f"cpu_native_{implementation.partition(':')[2]}",
        solution="cpu_native",
        # Above the built-in CPU kernels, and below the band of plugins: a kernel of someone else's still outranks these.
        band=Band.SPECIALIZED,
        implementation=f"tokenspeed_kernel_cpu.{implementation}",
        # "avx2" means AVX2 and FMA. The AVX-512 code is chosen inside.
        capability=Capability(("cpu",), features=frozenset({"avx2"})),
        formats=formats,
        traits=traits or {},
        requires=("tokenspeed_kernel_cpu._kernels",),
        verified=(Verified(VerifiedBy.SILICON, "x86-64 AVX2, AVX-512 and AVX512_VNNI"), *more),
    )


def _rows(op: str, *operands: str) -> KernelSpec:
    family, _, name = op.partition(".")
    return _spec(op, f"{family}:{name}", Signature.same(operands, ("fp32",)))


def _attention(name: str, formats: tuple[Signature, ...], *options: str) -> KernelSpec:
    return _spec(f"attention.{name}", f"attention:{name}", formats, dict.fromkeys(options, _EITHER))


PLUGIN: Final = Plugin(
    api_version=(1, 0),
    specs=(
        _rows("norm.rms_norm", "x", "weight"),
        _rows("norm.fused_add_rms_norm", "x", "residual", "weight"),
        _rows("activation.silu_and_mul", "gate_up"),
        _rows("rope.apply_rope", "q", "k", "cos_sin_cache"),
        _rows("sampling.argmax", "logits"),
        _spec(
            "kvcache.write_kv",
            "kvcache:write_kv",
            tuple(
                Signature.of(k=fmt, v=fmt, k_cache=cache, v_cache=cache)
                for fmt, caches in (("fp32", ("fp32", "bf16", "fp16")), ("bf16", ("bf16",)), ("fp16", ("fp16",)))
                for cache in caches
            ),
        ),
        _attention("mha_decode", _PAGED, *_OPTIONS),
        _attention("mha_extend", _PAGED, "causal", *_OPTIONS),
        _attention("mha_prefill", Signature.same(("q", "k", "v"), ("fp32", "bf16")), "causal", *_OPTIONS),
        _spec(
            "gemm.pack_weight",
            "linear:pack_weight",
            Signature.product(weight=(*_GGUF, *_GROUPED)),
            # Activations are rounded to 8 bits: only for a caller that allows it.
            {"round_activations": OneOf(True)},
            Verified(VerifiedBy.SILICON, "x86-64 AMX-INT8", "the same bits as AVX512_VNNI"),
        ),
        _spec(
            "gemm.pack_weight",
            "linear:pack_weight_exact",
            Signature.product(weight=(*_GGUF, *_GROUPED)),
            {"round_activations": OneOf(False)},
        ),
        _spec(
            "gemm.mm",
            "linear:mm",
            tuple(
                Signature.of(x=x, weight=weight, bias=bias, out=out)
                for weight in _GGUF
                for x in ("fp32", "bf16")
                for bias in dict.fromkeys((x, "fp32"))
                for out in dict.fromkeys((x, "fp32"))
            ),
        ),
        _spec(
            "embedding.embedding",
            "embedding:embedding",
            Signature.product(token_ids=("int32", "int64"), weight=_GGUF, out=("fp32", "bf16")),
        ),
    ),
)
"""Read by `tokenspeed_kernel` through the entry point `cpu_native`."""
