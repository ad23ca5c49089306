"""The nouns of the engine: frozen, standard library only."""

from tokenspeed_engine.types.memory import ProcessMemory
from tokenspeed_engine.types.model import ModelInfo
from tokenspeed_engine.types.output import FinishReason, SampledTokens, TextDelta, TokenLogprobs
from tokenspeed_engine.types.params import SamplingParams
from tokenspeed_engine.types.request import TokenizedRequest
from tokenspeed_engine.types.stats import EngineStats

__all__ = [
    "EngineStats",
    "FinishReason",
    "ModelInfo",
    "ProcessMemory",
    "SampledTokens",
    "SamplingParams",
    "TextDelta",
    "TokenLogprobs",
    "TokenizedRequest",
]
