"""While the front end is slow, outputs merge by request and nothing is lost."""

from __future__ import annotations

from typing import Any

from tokenspeed_engine.ipc import MessageTooLargeError, Outbox, RequestRejected, StepOutputs
from tokenspeed_engine.types import EngineStats, FinishReason, SampledTokens, TokenLogprobs


class Sink:
    """A link that takes `room` more messages, and none with more tokens than `limit`."""

    def __init__(self, room: int = 0, limit: int = 10**9) -> None:
        self.room = room
        self.limit = limit
        self.sent: list[Any] = []

    def send(self, message: Any) -> bool:
        size = sum(len(output.token_ids) for output in getattr(message, "outputs", ()))
        if size > self.limit:
            raise MessageTooLargeError("StepOutputs", size, self.limit)
        if self.room == 0:
            return False
        self.room -= 1
        self.sent.append(message)
        return True


def frame(step: int, *outputs: SampledTokens, queued: tuple[tuple[str, float], ...] = ()) -> StepOutputs:
    return StepOutputs(step, outputs, queued, EngineStats(num_steps=step))


def test_outputs_of_a_slow_front_end_merge() -> None:
    sink = Sink()
    outbox = Outbox(sink)
    for step in range(100):
        token = SampledTokens("a", (step,), (TokenLogprobs(step, -1.0, 1),))
        outbox.put(frame(step, token, SampledTokens("b", (2 * step,)), queued=(("a", 0.0),) if step == 0 else ()))
        assert outbox.flush() == []
    outbox.put(frame(100, SampledTokens("a", (100,), finish_reason=FinishReason.STOP)))
    assert not outbox.is_empty
    sink.room = 10
    outbox.flush()
    assert outbox.is_empty
    assert len(sink.sent) == 1
    merged = sink.sent[0]
    a, b = merged.outputs
    assert a.token_ids == tuple(range(101))
    assert len(a.logprobs) == 100
    assert a.finish_reason is FinishReason.STOP
    assert b.token_ids == tuple(range(0, 200, 2))
    assert merged.queued == (("a", 0.0),)
    assert merged.stats.num_steps == 100


def test_other_messages_keep_their_order() -> None:
    sink = Sink()
    outbox = Outbox(sink)
    rejections = [RequestRejected(str(n), "c", "m") for n in range(5)]
    for rejection in rejections:
        outbox.put(rejection)
    outbox.flush()
    sink.room = 3
    outbox.flush()
    assert sink.sent == rejections[:3]
    sink.room = 3
    outbox.flush()
    assert sink.sent == rejections


def test_a_frame_that_is_too_large_goes_in_parts() -> None:
    sink = Sink(room=100, limit=4)
    outbox = Outbox(sink)
    outbox.put(frame(1, *(SampledTokens(str(n), (n, n)) for n in range(5)), queued=(("0", 0.5),)))
    assert outbox.flush() == []
    assert [o.request_id for part in sink.sent for o in part.outputs] == ["0", "1", "2", "3", "4"]
    assert [part.queued for part in sink.sent if part.queued] == [(("0", 0.5),)]


def test_an_output_that_is_too_large_fails_its_request_alone() -> None:
    sink = Sink(room=100, limit=4)
    outbox = Outbox(sink)
    outbox.put(frame(1, SampledTokens("a", (1,)), SampledTokens("big", (1,) * 9), SampledTokens("b", (2,))))
    assert outbox.flush() == ["big"]
    outputs = {output.request_id: output for part in sink.sent for output in part.outputs}
    assert outputs["a"].token_ids == (1,)
    assert outputs["b"].token_ids == (2,)
    assert outputs["big"].finish_reason is FinishReason.ERROR
    assert "at most 4 bytes, got 9" in outputs["big"].error


def test_parts_that_were_not_taken_stay() -> None:
    sink = Sink(room=1, limit=2)
    outbox = Outbox(sink)
    outbox.put(frame(1, *(SampledTokens(str(n), (n, n)) for n in range(4))))
    outbox.flush()
    outbox.put(frame(2, SampledTokens("3", (9,))))
    sink.limit, sink.room = 100, 10
    outbox.flush()
    tokens: dict[str, tuple[int, ...]] = {}
    for part in sink.sent:
        for output in part.outputs:
            tokens[output.request_id] = tokens.get(output.request_id, ()) + output.token_ids
    assert tokens == {"0": (0, 0), "1": (1, 1), "2": (2, 2), "3": (3, 3, 9)}
