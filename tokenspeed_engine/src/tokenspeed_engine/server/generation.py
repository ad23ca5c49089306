"""Runs the sequences of one request side by side, and ends them together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from tokenspeed_engine.server.engine_client import EngineClient
from tokenspeed_engine.types import TextDelta, TokenizedRequest


async def generate_all(client: EngineClient, requests: Sequence[TokenizedRequest]) -> AsyncGenerator[tuple[int, TextDelta], None]:
    """The deltas of all sequences as they come, each with the number of its sequence.

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
    queue: asyncio.Queue[tuple[int, TextDelta | BaseException | None]] = asyncio.Queue(maxsize=len(requests))
    tasks = [asyncio.create_task(_pump(client, r, i, queue)) for i, r in enumerate(requests)]
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


async def _pump(
    client: EngineClient,
    request: TokenizedRequest,
    index: int,
    queue: asyncio.Queue[tuple[int, TextDelta | BaseException | None]],
) -> None:
    try:
        async with aclosing(client.generate(request)) as deltas:
            async for delta in deltas:
                await queue.put((index, delta))
    except Exception as error:  # noqa: BLE001 - handed to the consumer, which raises it
        await queue.put((index, error))
    else:
        await queue.put((index, None))
