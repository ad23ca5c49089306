"""Triton kernels of the sampling family."""

from __future__ import annotations

from tokenspeed_kernel.ops.sampling.contract import LOGIT_FORMATS
from tokenspeed_kernel.signature import Signature
from tokenspeed_kernel.spec import TRITON_PORTABLE, Band, KernelSpec, Verified, VerifiedBy

_MODULES = {
    "argmax": "argmax",
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
_VERIFIED = (Verified(VerifiedBy.SILICON, "H200 (sm_90)"), Verified(VerifiedBy.INTERPRETER, "x86-64"))

SPECS = tuple(
    KernelSpec(
        op=f"sampling.{op}",
        name=f"triton_{op}",
        solution="triton",
        band=Band.PORTABLE,
        implementation=f"tokenspeed_kernel.ops.sampling.triton.{module}:triton_{op}",
        capability=TRITON_PORTABLE,
        formats=_FORMATS.get(op, Signature.same(("logits",), LOGIT_FORMATS)),
        requires=("triton",),
        graph_safe=op != "log_probs",  # it allocates what it returns
        verified=_VERIFIED,
    )
    for op, module in _MODULES.items()
)
