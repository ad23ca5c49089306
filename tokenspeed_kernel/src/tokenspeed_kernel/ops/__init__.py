"""Op families. Import one to use it: `from tokenspeed_kernel.ops.norm import rms_norm`."""
