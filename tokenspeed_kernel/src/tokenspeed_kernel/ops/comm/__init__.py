"""Collectives: exchanges of tensors between the processes of a group."""

from tokenspeed_kernel.ops.comm.fused import all_reduce_add_rms_norm
from tokenspeed_kernel.ops.comm.group import Group
from tokenspeed_kernel.ops.comm.move import all_gather, all_to_all
from tokenspeed_kernel.ops.comm.reduce import all_reduce, reduce_scatter

__all__ = ["Group", "all_gather", "all_reduce", "all_reduce_add_rms_norm", "all_to_all", "reduce_scatter"]
