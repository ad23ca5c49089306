"""Messages survive the wire unchanged, and nothing else is accepted."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenspeed_engine.ipc import (
    PROTOCOL_VERSION,
    AbortRequests,
    CoreFailed,
    CoreReady,
    Heartbeat,
    LoadProgress,
    MessageTooLargeError,
    ProtocolError,
    QueryStats,
    RequestRejected,
    Shutdown,
    StatsReply,
    StepOutputs,
    SubmitRequest,
    encode,
)
from tokenspeed_engine.ipc.messages import Hello, decode_hello, decode_to_core, decode_to_frontend
from tokenspeed_engine.types import (
    EngineStats,
    FinishReason,
    ModelInfo,
    SampledTokens,
    SamplingParams,
    TokenizedRequest,
    TokenLogprobs,
)

LIMIT = 1 << 20

PARAMS = SamplingParams(
    temperature=0.5,
    top_k=3,
    logit_bias={5: -1.5, 0: 100.0},
    stop=("a", "\u732b"),
    stop_token_ids=(1, 2),
    logprobs=2,
    seed=2**63 - 1,
)
LOGPROBS = TokenLogprobs(7, -0.25, 1, (7, 8), (-0.25, float("-inf")))
STATS = EngineStats(num_running=1, num_pages=8, num_free_pages=3, num_cached_pages=1, step_time_s=0.25)

TO_CORE = [
    SubmitRequest(TokenizedRequest("r", (0, 1, 99), PARAMS)),
    AbortRequests(("a", "b")),
    QueryStats(3),
    Shutdown(),
]
TO_FRONTEND = [
    LoadProgress("weights", 3, 9, "model.layers.3"),
    CoreReady(ModelInfo("n", "LlamaForCausalLM", 100, 64, 8, 16, (2,), "float32", "cpu"), 64, 1.5),
    StepOutputs(
        4,
        (SampledTokens("r", (7,), (LOGPROBS,), (LOGPROBS,), FinishReason.STOP, 3, 2), SampledTokens("s", error="e")),
        (("r", 0.5),),
        STATS,
    ),
    RequestRejected("r", "code", "why"),
    StatsReply(3, STATS),
    CoreFailed("why", user_error=True),
    Heartbeat("busy", 7, 0.5),
]


@pytest.mark.parametrize("message", TO_CORE, ids=lambda m: type(m).__name__)
def test_messages_to_the_core_survive(message: object) -> None:
    decoded = decode_to_core(encode(message, max_bytes=LIMIT))
    assert decoded == message
    assert type(decoded) is type(message)


@pytest.mark.parametrize("message", TO_FRONTEND, ids=lambda m: type(m).__name__)
def test_messages_to_the_front_end_survive(message: object) -> None:
    decoded = decode_to_frontend(encode(message, max_bytes=LIMIT))
    assert decoded == message
    assert type(decoded) is type(message)


def test_types_survive_within_a_message() -> None:
    decoded = decode_to_frontend(encode(TO_FRONTEND[2], max_bytes=LIMIT))
    assert isinstance(decoded, StepOutputs)
    assert decoded.outputs[0].finish_reason is FinishReason.STOP
    assert isinstance(decoded.outputs[0].logprobs[0], TokenLogprobs)


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_refused_or_decode_to_a_message(raw: bytes) -> None:
    for decode in (decode_to_core, decode_to_frontend, decode_hello):
        try:
            message = decode(raw)
        except ProtocolError:
            continue
        assert isinstance(message, msgspec.Struct)


@pytest.mark.parametrize("cut", [0, 1, 5, -1])
def test_a_truncated_message_is_refused(cut: int) -> None:
    with pytest.raises(ProtocolError, match="expected a message"):
        decode_to_core(encode(TO_CORE[0], max_bytes=LIMIT)[:cut])
    with pytest.raises(ProtocolError, match="expected a message"):
        decode_to_frontend(encode(TO_FRONTEND[2], max_bytes=LIMIT)[:cut])


def test_a_wrong_type_inside_is_refused() -> None:
    raw = msgspec.msgpack.encode({"type": "submit", "request": {"request_id": 5, "prompt_token_ids": [], "params": {}}})
    with pytest.raises(ProtocolError, match="request_id"):
        decode_to_core(raw)


def test_a_message_for_the_other_side_is_refused() -> None:
    with pytest.raises(ProtocolError):
        decode_to_core(encode(TO_FRONTEND[0], max_bytes=LIMIT))
    with pytest.raises(ProtocolError):
        decode_to_frontend(encode(TO_CORE[0], max_bytes=LIMIT))


def test_an_oversized_message_is_not_encoded() -> None:
    message = SubmitRequest(TokenizedRequest("r", tuple([70000] * 1000), PARAMS))
    with pytest.raises(MessageTooLargeError) as caught:
        encode(message, max_bytes=4096)
    assert caught.value.limit_bytes == 4096
    assert caught.value.size_bytes > 5000
    assert "--max-message-bytes" in str(caught.value)


def test_a_hello_of_another_version_is_read_as_far_as_it_must_be() -> None:
    raw = msgspec.msgpack.encode(
        {"type": "hello", "protocol_version": PROTOCOL_VERSION + 7, "token": "t", "role": {"new": 1}, "more": []}
    )
    assert decode_hello(raw) == Hello(PROTOCOL_VERSION + 7, "t", "", 0)
