"""Rotary position embedding: its configuration, its table of cosines and sines, and its application."""

from tokenspeed_kernel.ops.rope.api import apply_rope
from tokenspeed_kernel.ops.rope.config import RopeConfig
from tokenspeed_kernel.ops.rope.frequencies import inverse_frequencies, rope_cos_sin
from tokenspeed_kernel.ops.rope.multi_axis import multi_axis_cos_sin

__all__ = ["RopeConfig", "apply_rope", "inverse_frequencies", "multi_axis_cos_sin", "rope_cos_sin"]
