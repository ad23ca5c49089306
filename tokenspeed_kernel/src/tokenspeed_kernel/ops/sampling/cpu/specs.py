"""The sampling family on the CPU: PyTorch's vectorised operations."""

from __future__ import annotations

from tokenspeed_kernel.ops.sampling.contract import LOGIT_FORMATS
from tokenspeed_kernel.signature import Signature
from tokenspeed_kernel.spec import CPU, Band, KernelSpec, Verified, VerifiedBy

_MODULES = {
    "argmax": "sample",
    "sample": "sample",
    "sampling_probs": "sample",
    "philox_uniform": "philox",
    "apply_penalties": "penalties",
    "apply_logit_bias": "penalties",
    "log_probs": "log_probs",
    "verify_chain": "verify",
}
_FORMATS = {
    "philox_uniform": (Signature.of(seeds="int64"),),
    "apply_penalties": (Signature.of(logits="fp32"),),
    "apply_logit_bias": (Signature.of(logits="fp32"),),
    "verify_chain": tuple(Signature.of(logits=fmt, draft_probs="fp32") for fmt in LOGIT_FORMATS),
}

SPECS = tuple(
    KernelSpec(
        op=f"sampling.{op}",
        name=f"cpu_{op}",
        solution="cpu",
        band=Band.PERFORMANT,
        implementation=f"tokenspeed_kernel.ops.sampling.cpu.{module}:cpu_{op}",
        capability=CPU,
        formats=_FORMATS.get(op, Signature.same(("logits",), LOGIT_FORMATS)),
        verified=(Verified(VerifiedBy.SILICON, "x86-64 AVX2"),),
    )
    for op, module in _MODULES.items()
)
