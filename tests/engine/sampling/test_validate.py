"""Ranges of sampling parameters."""

from __future__ import annotations

from typing import Any

import pytest

from tokenspeed_engine.sampling import SamplingParamsError, validate_sampling_params
from tokenspeed_engine.types import SamplingParams

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("param", "value", "expected"),
    [
        ("temperature", -0.1, "0 or more"),
        ("temperature", NAN, "0 or more"),
        ("temperature", INF, "0 or more"),
        ("top_p", -0.01, "0 to 1"),
        ("top_p", 1.01, "0 to 1"),
        ("top_p", NAN, "0 to 1"),
        ("top_k", -2, "-1 or 0"),
        ("min_p", 1.5, "0 to 1"),
        ("min_p", -1, "0 to 1"),
        ("presence_penalty", 2.1, "-2 to 2"),
        ("frequency_penalty", -2.1, "-2 to 2"),
        ("repetition_penalty", 0.0, "0.01 to 100"),
        ("repetition_penalty", 1e-45, "0.01 to 100"),
        ("repetition_penalty", INF, "0.01 to 100"),
        ("seed", 2**64, "64-bit"),
        ("seed", -(2**63) - 1, "64-bit"),
        ("logit_bias", {100: 1.0}, r"0\.\.99"),
        ("logit_bias", {-1: 1.0}, r"0\.\.99"),
        ("logit_bias", {5: 100.5}, "-100 to 100"),
        ("logit_bias", {5: NAN}, "-100 to 100"),
        ("stop_token_ids", (100,), r"0\.\.99"),
        ("stop", ("a", ""), "not empty"),
        ("logprobs", 21, "0 to 20"),
        ("logprobs", -1, "0 to 20"),
        ("prompt_logprobs", 1000000, "0 to 20"),
        ("max_tokens", 0, "1 or more"),
        ("max_tokens", 513, "512"),
        ("min_tokens", 17, "0 to max_tokens, 16"),
        ("min_tokens", -1, "0 to max_tokens"),
    ],
)
def test_out_of_range_names_the_parameter(param: str, value: Any, expected: str) -> None:
    with pytest.raises(SamplingParamsError, match=f"^{param}: expected .*{expected}.*, got ") as caught:
        validate_sampling_params(SamplingParams(**{param: value}), vocab_size=100, max_model_len=512)
    assert caught.value.param == param
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 0.0},
        {"temperature": 5.0},
        {"top_p": 0.0},
        {"top_p": 1.0},
        {"top_k": -1},
        {"top_k": 10**6},
        {"min_p": 1.0},
        {"presence_penalty": -2.0, "frequency_penalty": 2.0, "repetition_penalty": 0.01},
        {"seed": 2**64 - 1},
        {"seed": -(2**63)},
        {"logit_bias": {0: -100.0, 99: 100.0}},
        {"stop_token_ids": (0, 99), "stop": ("x",)},
        {"logprobs": 0, "prompt_logprobs": 20},
        {"max_tokens": 512, "min_tokens": 512},
    ],
)
def test_the_ends_of_the_ranges_are_in(fields: dict[str, Any]) -> None:
    validate_sampling_params(SamplingParams(**fields), vocab_size=100, max_model_len=512)


def test_logprobs_stay_within_a_small_vocabulary() -> None:
    with pytest.raises(SamplingParamsError, match="logprobs: expected 0 to 5"):
        validate_sampling_params(SamplingParams(logprobs=6), vocab_size=5)


def test_a_long_value_is_cut_in_the_message() -> None:
    with pytest.raises(SamplingParamsError) as caught:
        validate_sampling_params(SamplingParams(top_k=-(10**200)), vocab_size=5)
    assert len(str(caught.value)) < 160
