"""Choosing the next token of each request: state between steps, batching, log-probabilities, ranges of parameters."""

from tokenspeed_engine.sampling.logprobs import SamplerOutput, prompt_logprobs
from tokenspeed_engine.sampling.sampler import Sampler
from tokenspeed_engine.sampling.validate import SamplingParamsError, validate_sampling_params

__all__ = ["Sampler", "SamplerOutput", "SamplingParamsError", "prompt_logprobs", "validate_sampling_params"]
