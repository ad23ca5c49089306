"""Thin modules over the public kernel ops."""

from tokenspeed_engine.layers.attention import PagedAttention, SelfAttention
from tokenspeed_engine.layers.batch import DecodeRows, ExtendRows, ForwardBatch
from tokenspeed_engine.layers.linear import Embedding, Linear
from tokenspeed_engine.layers.mlp import GatedMLP, SiluAndMul
from tokenspeed_engine.layers.module import Module
from tokenspeed_engine.layers.norm import RMSNorm
from tokenspeed_engine.layers.rotary import Rotary

__all__ = [
    "DecodeRows",
    "Embedding",
    "ExtendRows",
    "ForwardBatch",
    "GatedMLP",
    "Linear",
    "Module",
    "PagedAttention",
    "RMSNorm",
    "Rotary",
    "SelfAttention",
    "SiluAndMul",
]
