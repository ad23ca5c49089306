"""What this plugin offers. It is read on every start, so it imports nothing that takes time."""

from __future__ import annotations

from tokenspeed_kernel import CPU, Band, KernelSpec, Plugin, Signature

PLUGIN = Plugin(
    # The version of the plugin contract that this file was written against.
    api_version=(1, 0),
    specs=(
        KernelSpec(
            op="norm.rms_norm",  # one that `tokenspeed-kernel list` shows
            name="acme_kernels_rms_norm",  # unique over all packages
            solution="acme_kernels",  # what users pass as solution=
            band=Band.PLUGIN,  # above the built-in kernels
            implementation="acme_kernels.norm:rms_norm",  # imported when it is first selected
            capability=CPU,  # where it runs: for a GPU, what it was built for, such as Capability(("sm_90a",))
            formats=Signature.same(("x", "weight"), ("fp32", "bf16", "fp16")),  # what it takes
            # Libraries that it needs, such as requires=("acme_runtime",), and limits on the op's traits go here.
            # verified=(Verified(VerifiedBy.SILICON, "your device"),) says how it was checked. Say only what was done.
        ),
    ),
)
