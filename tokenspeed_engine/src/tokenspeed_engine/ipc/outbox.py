"""What the core has to tell the front end: sent at once, or merged by request while the front end is slow."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import Protocol

from msgspec import structs

from tokenspeed_engine.ipc.errors import MessageTooLargeError
from tokenspeed_engine.ipc.messages import Heartbeat, StepOutputs, ToFrontend
from tokenspeed_engine.types import FinishReason, SampledTokens


class Sender(Protocol):
    """The sending half of a CoreLink."""

    def send(self, message: ToFrontend | Heartbeat) -> bool:
        """Send without waiting; False when the queue is full. Raises MessageTooLargeError."""


class Outbox:
    """Never blocks the loop and never grows without bound.

    While the link takes nothing, the outputs of later steps are merged into those that wait: one entry a request, as long as what
    that request generated. Other messages wait in order; there is at most one for each request or query of the front end.
    """

    def __init__(self, sender: Sender) -> None:
        self._sender = sender
        self._outputs: StepOutputs | None = None
        self._others: deque[ToFrontend] = deque()

    @property
    def is_empty(self) -> bool:
        """Whether everything was sent."""
        return self._outputs is None and not self._others

    def put(self, message: ToFrontend) -> None:
        """Take a message; `flush` sends it."""
        if not isinstance(message, StepOutputs):
            self._others.append(message)
        elif self._outputs is None:
            self._outputs = message
        else:
            self._outputs = merge_outputs(self._outputs, message)

    def flush(self) -> list[str]:
        """Send as much as the link takes.

        Returns:
            ids of requests whose output was too large to be sent; they were told so, and must be aborted.
        """
        failed: list[str] = []
        while self._others:
            if not self._sender.send(self._others[0]):
                return failed
            self._others.popleft()
        if self._outputs is not None:
            waiting = self._send_outputs(self._outputs, failed)
            self._outputs = waiting
        return failed

    def _send_outputs(self, message: StepOutputs, failed: list[str]) -> StepOutputs | None:
        """Send one frame, in parts if it is too large. Returns what still waits."""
        try:
            return None if self._sender.send(message) else message
        except MessageTooLargeError as error:
            outputs = message.outputs
            if len(outputs) == 1:
                failed.append(outputs[0].request_id)
                parts = [structs.replace(message, outputs=(_too_large(outputs[0], error),))]
            else:
                half = len(outputs) // 2
                parts = [
                    structs.replace(message, outputs=outputs[:half]),
                    structs.replace(message, outputs=outputs[half:], queued=()),
                ]
        waiting: StepOutputs | None = None
        for part in parts:
            rest = part if waiting is not None else self._send_outputs(part, failed)
            if rest is not None:
                waiting = rest if waiting is None else merge_outputs(waiting, rest)
        return waiting


def merge_outputs(earlier: StepOutputs, later: StepOutputs) -> StepOutputs:
    """One frame in place of two: each request's tokens joined in order, the later statistics."""
    merged = {output.request_id: output for output in earlier.outputs}
    for output in later.outputs:
        before = merged.get(output.request_id)
        merged[output.request_id] = output if before is None else merge_sampled(before, output)
    return StepOutputs(step=later.step, outputs=tuple(merged.values()), queued=earlier.queued + later.queued, stats=later.stats)


def merge_sampled(earlier: SampledTokens, later: SampledTokens) -> SampledTokens:
    """The tokens of two messages of one request, as one."""
    return replace(
        later,
        token_ids=earlier.token_ids + later.token_ids,
        logprobs=earlier.logprobs + later.logprobs,
        prompt_logprobs=earlier.prompt_logprobs + later.prompt_logprobs,
    )


def _too_large(output: SampledTokens, error: MessageTooLargeError) -> SampledTokens:
    return SampledTokens(
        request_id=output.request_id,
        finish_reason=FinishReason.ERROR,
        num_prompt_tokens=output.num_prompt_tokens,
        num_cached_tokens=output.num_cached_tokens,
        error=f"{error}\nFix: ask for fewer log-probabilities",
    )
