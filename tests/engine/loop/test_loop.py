"""The loop over the real scheduler, with an executor whose tokens are arithmetic, and an in-memory link."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from tokenspeed_engine.ipc import (
    AbortRequests,
    Outbox,
    Progress,
    ProtocolError,
    QueryStats,
    RequestRejected,
    Shutdown,
    StatsReply,
    StepOutputs,
    SubmitRequest,
)
from tokenspeed_engine.loop import EngineLoop, session_number, tenant_number
from tokenspeed_engine.scheduler import Scheduler, SchedulerConfig
from tokenspeed_engine.types import FinishReason, ModelInfo, SampledTokens, SamplingParams, TokenizedRequest, TokenLogprobs

VOCAB = 1000
EOS = 2


def expected_token(prompt: Sequence[int], index: int) -> int:
    """What the executor samples: never EOS, and different for each prompt and index."""
    return 3 + (sum(prompt) * 31 + index * 7) % (VOCAB - 3)


@dataclass
class Result:
    token_ids: np.ndarray[Any, np.dtype[np.int32]]
    logprobs: Sequence[TokenLogprobs | None] = ()
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)


class ArithmeticExecutor:
    """Checks each plan against what it knows of the requests, and samples by arithmetic."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.requests: dict[int, TokenizedRequest | Any] = {}
        self.known: dict[int, list[int]] = {}
        self.eos_at: dict[int, int] = {}
        self.steps = 0
        self.on_step: Callable[[Any], None] = lambda plan: None

    def add_request(self, request_id: int, params: SamplingParams, prompt_token_ids: Sequence[int]) -> None:
        if params.top_k == 666:
            raise ValueError("top_k 666 is unlucky")
        self.requests[request_id] = (params, tuple(prompt_token_ids))
        self.known[request_id] = list(prompt_token_ids)

    def remove_request(self, request_id: int) -> None:
        del self.requests[request_id]
        del self.known[request_id]

    def execute(self, plan: Any, page_table: Any) -> Result:
        self.steps += 1
        self.on_step(plan)
        for row, number in enumerate(plan.request_ids.tolist()):
            first, end = int(plan.cu_query_lens[row]), int(plan.cu_query_lens[row + 1])
            tokens, positions = plan.token_ids[first:end].tolist(), plan.positions[first:end].tolist()
            for token, position in zip(tokens, positions, strict=True):
                assert token in (-1, self.known[number][position])
            assert (page_table[plan.slots[row]][: 1 + positions[-1] // self.page_size] >= 0).all()
        sampled, logprobs, prompt_logprobs = [], [], {}
        for number, index in zip(plan.request_ids[plan.sample_rows].tolist(), plan.output_index.tolist(), strict=True):
            params, prompt = self.requests[number]
            token = EOS if self.eos_at.get(sum(prompt)) == index else expected_token(prompt, index)
            if len(self.known[number]) == len(prompt) + index:
                self.known[number].append(token)
            sampled.append(token)
            logprobs.append(TokenLogprobs(token, -1.0, 1) if params.logprobs is not None else None)
        for row, number in enumerate(plan.request_ids.tolist()):
            params, prompt = self.requests[number]
            if params.prompt_logprobs is not None:
                span = plan.positions[plan.cu_query_lens[row] : plan.cu_query_lens[row + 1]].tolist()
                prompt_logprobs[number] = [TokenLogprobs(prompt[p + 1], -0.5, 1) for p in span if p + 1 < len(prompt)]
        return Result(np.array(sampled, dtype=np.int32), logprobs, prompt_logprobs)


class ScriptLink:
    """Feeds messages at given receives, then Shutdown once nothing is left to do; records what the loop sends."""

    def __init__(self, *script: Sequence[Any]) -> None:
        self.script = [list(messages) for messages in script]
        self.sent: list[Any] = []
        self.waits: list[float | None] = []
        self.room = 10**9

    def receive(self, timeout_s: float | None) -> list[Any]:
        self.waits.append(timeout_s)
        if self.script:
            return self.script.pop(0)
        return [Shutdown()] if timeout_s is None else []

    def send(self, message: Any) -> bool:
        if self.room == 0:
            return False
        self.room -= 1
        self.sent.append(message)
        return True


class Case:
    def __init__(self, *script: Sequence[Any], depth: int = 1, **sizes: Any) -> None:
        settings = {
            "num_pages": 64,
            "page_size": 4,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 16,
            "max_model_len": 64,
            "max_in_flight_steps": 2,
        } | sizes
        self.link = ScriptLink(*script)
        self.executor = ArithmeticExecutor(settings["page_size"])
        self.scheduler = Scheduler(SchedulerConfig(**settings))
        self.progress = Progress()
        info = ModelInfo(
            "m", "a", VOCAB, settings["max_model_len"], settings["num_pages"], settings["page_size"], (EOS,), "float32", "cpu"
        )
        self.loop = EngineLoop(self.scheduler, self.executor, self.link, self.progress, info, pipeline_depth=depth)

    def run(self) -> Case:
        self.loop.run()
        return self

    @property
    def outputs(self) -> list[SampledTokens]:
        return [output for message in self.link.sent if isinstance(message, StepOutputs) for output in message.outputs]

    def tokens(self, name: str) -> list[int]:
        return [token for output in self.outputs if output.request_id == name for token in output.token_ids]

    def last(self, name: str) -> SampledTokens:
        return [output for output in self.outputs if output.request_id == name][-1]

    def rejected(self) -> dict[str, RequestRejected]:
        return {message.request_id: message for message in self.link.sent if isinstance(message, RequestRejected)}

    def assert_clean(self) -> None:
        """No page is held, and the executor has forgotten all requests."""
        stats = self.scheduler.stats()
        assert stats.free_pages + stats.evictable_pages == stats.num_pages
        assert not self.scheduler.has_work()
        assert self.executor.requests == {}
        assert self.loop._by_name == {}
        assert self.loop._by_number == {}
        assert self.loop._retired == []


def submit(name: str, prompt: Sequence[int], max_tokens: int = 5, **params: Any) -> SubmitRequest:
    return SubmitRequest(TokenizedRequest(name, tuple(prompt), SamplingParams(max_tokens=max_tokens, **params)))


def wanted(prompt: Sequence[int], count: int) -> list[int]:
    return [expected_token(prompt, index) for index in range(count)]


both_depths = pytest.mark.parametrize("depth", [1, 2])


@both_depths
def test_requests_of_all_lengths_get_their_tokens(depth: int) -> None:
    prompts = {f"r{n}": list(range(n, n + 1 + 5 * n)) for n in range(9)}
    case = Case([submit(name, prompt, 6) for name, prompt in prompts.items()], depth=depth).run()
    for name, prompt in prompts.items():
        assert case.tokens(name) == wanted(prompt, 6)
        assert case.last(name).finish_reason is FinishReason.LENGTH
        assert case.last(name).num_prompt_tokens == len(prompt)
    case.assert_clean()


@both_depths
def test_the_model_s_end_and_the_request_s_stop_tokens_end_it(depth: int) -> None:
    case = Case([submit("eos", [7, 8], 20), submit("ignore", [9, 9], 6, ignore_eos=True)], depth=depth)
    case.executor.eos_at = {15: 3, 18: 2}
    stop = expected_token([40], 2)
    case.link.script[0].append(submit("own", [40], 20, stop_token_ids=(stop,)))
    case.run()
    assert case.tokens("eos") == [*wanted([7, 8], 3), EOS]
    assert case.last("eos").finish_reason is FinishReason.STOP
    assert case.tokens("own") == wanted([40], 3)
    assert case.last("own").finish_reason is FinishReason.STOP
    assert len(case.tokens("ignore")) == 6
    case.assert_clean()


@both_depths
def test_retracted_requests_resume_with_the_same_tokens(depth: int) -> None:
    prompts = {f"r{n}": [100 + n] * 6 for n in range(5)}
    case = Case([submit(name, prompt, 18) for name, prompt in prompts.items()], depth=depth, num_pages=9).run()
    assert case.scheduler.stats().num_retractions > 0
    for name, prompt in prompts.items():
        assert case.tokens(name) == wanted(prompt, 18)
    case.assert_clean()


@both_depths
def test_an_abort_takes_effect_before_the_next_plan(depth: int) -> None:
    case = Case([submit("a", [5], 50), submit("b", [6], 8)], [], [], [AbortRequests(("a", "unknown"))], depth=depth)
    seen_after: list[int] = []

    def watch(plan: Any) -> None:
        if not case.link.script:
            seen_after.extend(plan.request_ids.tolist())

    case.executor.on_step = watch
    case.run()
    assert seen_after
    assert set(seen_after) == {2}
    assert len(case.tokens("a")) <= 3
    assert case.tokens("b") == wanted([6], 8)
    assert case.link.sent[-1].stats.num_aborts == 1
    case.assert_clean()


@both_depths
def test_aborts_in_every_state_leave_nothing(depth: int) -> None:
    script: list[Sequence[Any]] = [[submit(f"r{n}", [n + 1] * 20, 10) for n in range(12)]]
    script += [[AbortRequests((f"r{n}",))] for n in (11, 0, 5, 3, 9)]
    script += [[submit("same-step", [1], 5), AbortRequests(("same-step",))]]
    case = Case(*script, depth=depth, num_pages=16).run()
    for n in (1, 2, 4, 6, 7, 8, 10):
        assert case.tokens(f"r{n}") == wanted([n + 1] * 20, 10)
    assert case.tokens("same-step") == []
    case.assert_clean()


def test_a_bad_request_concerns_itself_alone() -> None:
    case = Case(
        [
            submit("good", [1, 2, 3], 5),
            submit("unlucky", [1], top_k=666),
            submit("long", [1] * 60, 5),
            submit("empty", []),
            submit("token", [1, VOCAB]),
            submit("negative", [-1]),
            submit("good", [9]),
            submit("none", [4], 0),
            ProtocolError("broken"),
            submit("later", [7], 2),
        ],
    ).run()
    assert case.tokens("good") == wanted([1, 2, 3], 5)
    assert case.tokens("later") == wanted([7], 2)
    rejected = case.rejected()
    assert set(rejected) == {"unlucky", "long", "empty", "token", "negative", "good", "none"}
    assert "top_k 666 is unlucky" in rejected["unlucky"].message
    assert rejected["long"].code == "context_length_exceeded"
    assert "at most 64 tokens" in rejected["long"].message
    assert "Fix:" in rejected["long"].message
    assert rejected["token"].code == rejected["negative"].code == "invalid_token_id"
    assert "got 1 to 1000" in rejected["token"].message
    assert rejected["good"].code == "duplicate_request_id"
    case.assert_clean()


def test_a_prompt_larger_than_the_pool_is_refused_and_the_next_served() -> None:
    """Case C1: a pool of 4 pages of 16 tokens under a model length of 4096."""
    edges = {"fits": 63, "full": 64, "over": 65, "huge": 100}
    case = Case(
        [*(submit(name, [1] * length, 1) for name, length in edges.items()), submit("next", [5] * 10, 3)],
        num_pages=4,
        page_size=16,
        max_model_len=4096,
    ).run()
    assert set(case.rejected()) == {"over", "huge"}
    assert case.rejected()["huge"].code == "kv_cache_too_small"
    assert "64 tokens (4 pages" in case.rejected()["huge"].message
    assert case.tokens("fits") == wanted([1] * 63, 1)
    assert case.tokens("full") == wanted([1] * 64, 1)
    assert case.tokens("next") == wanted([5] * 10, 3)
    case.assert_clean()


@both_depths
def test_prompt_logprobs_come_once_with_the_first_token(depth: int) -> None:
    prompt = list(range(10, 50))
    case = Case(
        [submit("first", prompt, 3, prompt_logprobs=0, logprobs=0), submit("again", prompt, 3, prompt_logprobs=1)],
        depth=depth,
    ).run()
    for name in ("first", "again"):
        outputs = [output for output in case.outputs if output.request_id == name]
        assert [entry.token_id for entry in outputs[0].prompt_logprobs] == prompt[1:]
        assert all(output.prompt_logprobs == () for output in outputs[1:])
        assert outputs[0].num_cached_tokens == 0
    outputs = [output for output in case.outputs if output.request_id == "first"]
    assert [entry.token_id for output in outputs for entry in output.logprobs] == case.tokens("first")


def test_the_cache_is_reported() -> None:
    prompt = list(range(10, 40))
    case = Case([submit("a", prompt, 2)], *[[] for _ in range(6)], [submit("b", prompt, 2)]).run()
    assert case.last("a").num_cached_tokens == 0
    assert case.last("b").num_cached_tokens == 28
    assert case.link.sent[-1].stats.prefix_hit_tokens == 28
    assert case.link.sent[-1].stats.prefix_query_tokens == 60


def test_one_frame_a_step_and_a_block_when_idle() -> None:
    case = Case([submit("a", [1], 4), submit("b", [2], 4)]).run()
    assert len([message for message in case.link.sent if isinstance(message, StepOutputs)]) == case.executor.steps == 4
    assert case.link.waits[0] is None
    assert case.link.waits[-1] is None
    assert set(case.link.waits[1:-1]) == {0.0}


def test_waits_in_the_queue_are_reported_once() -> None:
    case = Case([submit(f"r{n}", [1] * 30, 3) for n in range(3)], max_num_seqs=1).run()
    queued = [entry for message in case.link.sent if isinstance(message, StepOutputs) for entry in message.queued]
    assert [name for name, _ in queued] == ["r0", "r1", "r2"]
    assert all(wait_s >= 0 for _, wait_s in queued)


def test_stats_are_answered_after_what_came_before() -> None:
    case = Case([submit("a", [1], 50), QueryStats(7)], [AbortRequests(("a",)), QueryStats(8)]).run()
    replies = {message.query_id: message.stats for message in case.link.sent if isinstance(message, StatsReply)}
    assert replies[7].num_waiting == 1
    assert replies[8].num_waiting == replies[8].num_running == 0
    assert replies[8].num_owned_pages == 0


def test_a_slow_front_end_does_not_stop_the_loop() -> None:
    case = Case([submit("a", [1], 10)])
    case.link.room = 2
    steps_before_room: list[int] = []

    def watch(plan: Any) -> None:
        steps_before_room.append(case.executor.steps)
        if case.executor.steps == 9:
            case.link.room = 10**9

    case.executor.on_step = watch
    case.run()
    assert len(steps_before_room) == 10
    assert case.tokens("a") == wanted([1], 10)
    assert len(case.link.sent) == 4
    case.assert_clean()


@both_depths
def test_logits_without_a_token_end_that_request_alone(depth: int) -> None:
    case = Case([submit("bad", [7, 8, 9], 6), submit("good", [1, 2, 3], 6)], depth=depth)
    execute = case.executor.execute

    def execute_with_nan(plan: Any, page_table: Any) -> Result:
        result = execute(plan, page_table)
        for row, number in enumerate(plan.request_ids[plan.sample_rows].tolist()):
            if case.executor.requests[number][1] == (7, 8, 9) and plan.output_index[row] >= 2:
                result.token_ids[row] = -1  # what the sampler gives for a NaN
        return result

    case.executor.execute = execute_with_nan  # type: ignore[method-assign]
    case.run()
    assert case.tokens("good") == wanted([1, 2, 3], 6)
    assert case.tokens("bad") == wanted([7, 8, 9], 2)
    assert case.last("bad").finish_reason == FinishReason.ERROR
    assert "NaN" in case.last("bad").error
    case.assert_clean()


def test_a_fatal_error_reaches_every_request() -> None:
    case = Case([submit("a", [1], 10), submit("b", [2], 10)])

    def explode(plan: Any) -> None:
        if case.executor.steps == 3:
            raise RuntimeError("device lost")

    case.executor.on_step = explode
    with pytest.raises(RuntimeError, match="device lost"):
        case.run()
    case.loop.fail("the engine core failed: device lost")
    for name in ("a", "b"):
        assert case.last(name).finish_reason is FinishReason.ERROR
        assert "device lost" in case.last(name).error
        assert case.tokens(name) == wanted([1 if name == "a" else 2], 2)


def test_progress_tells_work_from_idleness() -> None:
    case = Case([submit("a", [1], 3)])
    phases: list[str] = []
    case.executor.on_step = lambda plan: phases.append(case.progress.phase)
    case.run()
    assert phases == ["busy"] * 3
    assert case.progress.phase == "idle"
    assert case.progress.num_steps == 3


def test_the_outbox_of_the_loop_is_the_bounded_one() -> None:
    assert isinstance(Case().loop._outbox, Outbox)


# -- sessions and the clock -------------------------------------------------------------------------------------------------


def test_a_tenant_is_a_number_of_its_name() -> None:
    assert tenant_number("") == 0
    numbers = {tenant_number(name) for name in ("key 0", "key 1", "user ann")}
    assert len(numbers) == 3
    assert all(0 < number < 2**63 for number in numbers)
    assert tenant_number("key 0") == tenant_number("key 0")


def test_a_session_is_a_number_of_its_name_and_salt() -> None:
    def number(session_id: str, salt: str = "") -> int:
        return session_number(TokenizedRequest("r", (1,), SamplingParams(), session_id, salt))

    assert number("") == number("", "salt") == 0
    numbers = [number("a"), number("b"), number("a", "salt"), number("lta", "sa"), number("a", "lt")]
    assert len(set(numbers)) == len(numbers)
    assert all(0 < n < 2**63 for n in numbers)
    assert number("a") == numbers[0]


def test_a_turn_s_pages_are_kept_until_its_time_is_over() -> None:
    """A second conversation fills the pool between two turns of the first."""
    first, between = list(range(20)), [submit(f"b{n}", [50 + n] * 30, 4) for n in range(6)]
    reply = wanted(first, 5)
    for ttl_s, gap_s, cached in ((10, 5, 24), (10, 15, 0), (0, 5, 0)):
        case = Case(
            [turn("t1", first, "chat")],
            *[[] for _ in range(8)],
            *([message] for message in between),
            *[[] for _ in range(60)],
            [turn("t2", [*first, *reply, 1, 2, 3], "chat")],
            num_pages=16,
            session_ttl_us=ttl_s * 1_000_000,
        )

        def clock(case: Case = case, gap_s: float = gap_s) -> float:
            return gap_s if "b0" in case.loop._by_name or case.tokens("b0") else 0.0

        case.loop._clock_s = clock
        case.run()
        assert case.tokens("t1") == reply
        assert case.last("t2").num_cached_tokens == cached
        assert case.scheduler.stats().num_sessions == (1 if ttl_s else 0)


def turn(name: str, prompt: Sequence[int], session_id: str) -> SubmitRequest:
    return SubmitRequest(TokenizedRequest(name, tuple(prompt), SamplingParams(max_tokens=5), session_id))


@both_depths
def test_the_scheduler_is_told_how_long_steps_took(depth: int) -> None:
    case = Case([submit("a", [5], 6)], depth=depth)
    ticks = itertools.count()
    case.loop._clock_s = lambda: next(ticks) * 0.001
    told: list[int] = []
    scheduler = case.scheduler

    class Recorder:
        def __getattr__(self, name: str) -> Any:
            return getattr(scheduler, name)

        def commit(self, step: int, sampled: Any, step_time_us: int) -> Any:
            told.append(step_time_us)
            return scheduler.commit(step, sampled, step_time_us)

    case.loop._scheduler = Recorder()  # type: ignore[assignment]
    case.run()
    assert len(told) == 6
    assert all(1000 <= us <= 6000 for us in told)
    assert sum(told) <= next(ticks) * 1000  # no time is counted twice


@both_depths
def test_a_better_priority_takes_the_place_of_one_that_runs(depth: int) -> None:
    """From the message to the stream: the better one ends first, and the other's text is as if it had been alone."""
    low = TokenizedRequest("low", (1, 2, 3), SamplingParams(max_tokens=30), priority=1)
    high = TokenizedRequest("high", (4, 5), SamplingParams(max_tokens=3), tenant="key 1")
    case = Case([SubmitRequest(low)], *[[] for _ in range(4)], [SubmitRequest(high)], depth=depth, max_num_seqs=1)
    case.run()
    ends = [o.request_id for s in case.link.sent if isinstance(s, StepOutputs) for o in s.outputs if o.finish_reason]
    assert ends == ["high", "low"]
    assert case.tokens("low") == wanted((1, 2, 3), 30)
    assert case.tokens("high") == wanted((4, 5), 3)
    assert case.scheduler.stats().num_preemptions == 1
