"""Runs the sequences of one request side by side, and ends them together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from tokenspeed_engine.server.engine_client import EngineClient
from tokenspeed_engine.types import FinishReason, TextDelta, TokenizedRequest

_FAILURES = (FinishReason.ERROR, FinishReason.ABORT)
_Item = tuple[int, TextDelta | BaseException | None]


async def generate_all(client: EngineClient, requests: Sequence[TokenizedRequest]) -> AsyncGenerator[tuple[int, TextDelta], None]:
    """The deltas of all sequences as they come, each with the number of its sequence.

    Of several sequences with one prompt, the first runs alone until its first delta: then its prompt is in the prefix cache, and
    the others find it there instead of computing it as many times.

    Closing or cancelling this generator, or the failure of one sequence, closes all of them, which aborts them at the core.
    At most one delta of each sequence waits here; what a slow consumer leaves is merged by the client.

    Raises:
        EngineClientError: what the first sequence that failed raised.
    """
    if len(requests) == 1:
        async with aclosing(client.generate(requests[0])) as deltas:
            async for delta in deltas:
                yield 0, delta
        return
    queue: asyncio.Queue[_Item] = asyncio.Queue(maxsize=len(requests))
    tasks = _start(client, requests, queue)
    try:
        num_running = len(tasks)
        while num_running:
            index, item = await queue.get()
            if item is None:
                num_running -= 1
            elif isinstance(item, BaseException):
                raise item
            else:
                yield index, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _start(client: EngineClient, requests: Sequence[TokenizedRequest], queue: asyncio.Queue[_Item]) -> list[asyncio.Task[None]]:
    computed: dict[tuple[int, ...], asyncio.Event] = {}
    tasks = []
    for index, request in enumerate(requests):
        prompt = request.prompt_token_ids
        # Less than a page is never shared, and a prompt whose log-probabilities are wanted is always computed.
        shares = len(prompt) > client.model_info.page_size and request.params.prompt_logprobs is None
        earlier = computed.get(prompt) if shares else None
        own = asyncio.Event()
        if shares and earlier is None:
            computed[prompt] = own
        tasks.append(asyncio.create_task(_pump(client, request, index, queue, earlier, own)))
    return tasks


async def _pump(
    client: EngineClient,
    request: TokenizedRequest,
    index: int,
    queue: asyncio.Queue[_Item],
    after: asyncio.Event | None,
    begun: asyncio.Event,
) -> None:
    """Move the deltas of one sequence to the queue; begin when `after` is set, and set `begun` at the first delta."""
    try:
        if after is not None:
            await after.wait()
        async with aclosing(client.generate(request)) as deltas:
            async for delta in deltas:
                if delta.finish_reason not in _FAILURES:
                    begun.set()
                await queue.put((index, delta))
    except Exception as error:  # noqa: BLE001 - handed to the consumer, which raises it
        await queue.put((index, error))
    else:
        await queue.put((index, None))
