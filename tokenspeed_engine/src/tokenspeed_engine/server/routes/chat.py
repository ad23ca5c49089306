"""`POST /v1/chat/completions`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

import msgspec
from aiohttp import web

from tokenspeed_engine.server.assemble import Piece
from tokenspeed_engine.server.body import read_json_object, typed_body
from tokenspeed_engine.server.context import CONTEXT, ServerContext
from tokenspeed_engine.server.errors import bad_request
from tokenspeed_engine.server.job import Job, note_caller, tenant_of
from tokenspeed_engine.server.lengths import check_max_tokens
from tokenspeed_engine.server.logprobs import chat_logprobs
from tokenspeed_engine.server.messages import parse_messages
from tokenspeed_engine.server.prompts import chat_prompt
from tokenspeed_engine.server.protocol import (
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChoice,
    ChatCompletionMessage,
    ChatCompletionRequest,
    ChatDelta,
    ChatLogprobs,
)
from tokenspeed_engine.server.refused import CHAT
from tokenspeed_engine.server.sse import event, stream
from tokenspeed_engine.server.validation import check_cache_fields, check_common, choice_count, sampling_params, top_count


async def chat_completions(request: web.Request) -> web.StreamResponse:
    """Answer a conversation, whole or as a stream."""
    context = request.app[CONTEXT]
    with context.gate() as account:
        limits = context.limits
        fields = await read_json_object(
            request, max_body_bytes=context.config.max_body_bytes, timeout_s=limits.body_timeout_s, account=account
        )
        if fields.get("messages") is not None:
            fields["messages"] = parse_messages(fields["messages"], limits)
        body = typed_body(fields, ChatCompletionRequest, CHAT)
        note_caller(body)
        job = await _job(body, context)
        if not body.stream:
            return web.Response(body=await _whole(job), content_type="application/json")
        return await stream(
            request,
            _events(job, include_usage=_include_usage(body)),
            write_timeout_s=limits.write_timeout_s,
        )


async def _job(body: ChatCompletionRequest, context: ServerContext) -> Job:
    context.check_model(body.model)
    check_common(body, context.limits)
    max_tokens = _max_tokens(body)
    num_choices = choice_count(body, 1, context.limits)
    check_cache_fields(body, num_choices, context.client.model_info, context.limits)
    vocab_size = context.client.model_info.vocab_size
    logprobs = _logprobs(body, vocab_size, context)
    params = sampling_params(
        body,
        vocab_size=vocab_size,
        limits=context.limits,
        draw_seed=context.draw_seed,
        logprobs=logprobs,
        prompt_logprobs=None,
    )
    prompt = await chat_prompt(body, context.client.tokenizer, context.limits, context.client.model_info.max_model_len)
    return Job.build(
        context.client,
        context.identity("chatcmpl", body.model),
        [prompt],
        params,
        num_choices=num_choices,
        max_tokens=max_tokens,
        default_max_tokens=None,
        prompt_param="messages",
        session_id=body.session_id or "",
        cache_salt=body.cache_salt or "",
        priority=body.priority or 0,
        tenant=tenant_of(body),
    )


def _max_tokens(body: ChatCompletionRequest) -> int | None:
    old = check_max_tokens("max_tokens", body.max_tokens)
    new = check_max_tokens("max_completion_tokens", body.max_completion_tokens)
    if old is not None and new is not None and old != new:
        raise bad_request(
            f"'max_tokens' ({old}) and 'max_completion_tokens' ({new}) are two names of one limit. Send one of them.",
            "max_tokens",
            "invalid_value",
        )
    return old if new is None else new


def _logprobs(body: ChatCompletionRequest, vocab_size: int, context: ServerContext) -> int | None:
    top = top_count("top_logprobs", body.top_logprobs or 0, vocab_size, context.limits)
    if body.logprobs:
        return top
    if top:
        raise bad_request("'top_logprobs' needs logprobs=true.", "top_logprobs", "invalid_value")
    return None


def _include_usage(body: ChatCompletionRequest) -> bool:
    return body.stream_options is not None and bool(body.stream_options.include_usage)


def _shown_logprobs(job: Job, pieces: Sequence[Piece]) -> ChatLogprobs | None:
    if job.params.logprobs is None:
        return None
    return chat_logprobs([e for piece in pieces for e in piece.entries], job.codec, job.params.logprobs)


async def _whole(job: Job) -> bytes:
    collected = await job.collect()
    identity = job.identity
    return msgspec.json.encode(
        ChatCompletion(
            id=identity.id,
            created=identity.created,
            model=identity.model,
            system_fingerprint=identity.system_fingerprint,
            choices=[
                ChatCompletionChoice(
                    index=index,
                    message=ChatCompletionMessage(content="".join(piece.text for piece in pieces)),
                    logprobs=_shown_logprobs(job, pieces),
                    finish_reason=pieces[-1].finish_reason,
                    stop_reason=pieces[-1].stop_reason,
                )
                for index, pieces in enumerate(collected)
            ],
            usage=job.usage(),
        )
    )


async def _events(job: Job, *, include_usage: bool) -> AsyncGenerator[bytes, None]:
    identity = job.identity
    usage = None if include_usage else msgspec.UNSET

    def chunk(index: int, delta: ChatDelta, piece: Piece) -> bytes:
        choice = ChatChunkChoice(
            index=index,
            delta=delta,
            logprobs=_shown_logprobs(job, [piece]) if piece.entries else None,
            finish_reason=piece.finish_reason,
            stop_reason=piece.stop_reason,
        )
        return event(
            msgspec.json.encode(
                ChatChunk(
                    id=identity.id,
                    created=identity.created,
                    model=identity.model,
                    system_fingerprint=identity.system_fingerprint,
                    choices=[choice],
                    usage=usage,
                )
            )
        )

    begun = [False] * len(job.choices)
    async with aclosing(job.pieces()) as pieces:
        async for index, piece in pieces:
            data = b""
            if not begun[index]:
                begun[index] = True
                data = chunk(index, ChatDelta(role="assistant", content=""), Piece(""))
            if not piece.is_empty:
                data += chunk(index, ChatDelta(content=piece.text or None), piece)
            if data:
                yield data
    if include_usage:
        yield event(
            msgspec.json.encode(
                ChatChunk(
                    id=identity.id,
                    created=identity.created,
                    model=identity.model,
                    system_fingerprint=identity.system_fingerprint,
                    choices=[],
                    usage=job.usage(),
                )
            )
        )
