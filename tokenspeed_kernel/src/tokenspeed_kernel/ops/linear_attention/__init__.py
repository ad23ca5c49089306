"""Linear attention with recurrent states: the gated delta rule, Mamba2's state space, and the convolution before them."""

from tokenspeed_kernel.ops.linear_attention.causal_conv1d import causal_conv1d_prefill, causal_conv1d_update
from tokenspeed_kernel.ops.linear_attention.gdn import gdn_decode, gdn_prefill
from tokenspeed_kernel.ops.linear_attention.mamba2 import mamba2_prefill, selective_state_update

__all__ = [
    "causal_conv1d_prefill",
    "causal_conv1d_update",
    "gdn_decode",
    "gdn_prefill",
    "mamba2_prefill",
    "selective_state_update",
]
