"""`POST /v1/completions`."""

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
from tokenspeed_engine.server.logprobs import completion_logprobs
from tokenspeed_engine.server.prompts import completion_prompts, encode_completion_prompts
from tokenspeed_engine.server.protocol import (
    Completion,
    CompletionChoice,
    CompletionChunk,
    CompletionLogprobs,
    CompletionRequest,
)
from tokenspeed_engine.server.refused import COMPLETIONS
from tokenspeed_engine.server.sse import event, stream
from tokenspeed_engine.server.validation import check_cache_fields, check_common, choice_count, sampling_params, top_count

_DEFAULT_MAX_TOKENS = 16


async def completions(request: web.Request) -> web.StreamResponse:
    """Continue one or several prompts, whole or as a stream."""
    context = request.app[CONTEXT]
    with context.gate() as account:
        limits = context.limits
        fields = await read_json_object(
            request, max_body_bytes=context.config.max_body_bytes, timeout_s=limits.body_timeout_s, account=account
        )
        body = typed_body(fields, CompletionRequest, COMPLETIONS)
        note_caller(body)
        job = await _job(body, context)
        if not body.stream:
            return web.Response(body=await _whole(job), content_type="application/json")
        include_usage = body.stream_options is not None and bool(body.stream_options.include_usage)
        return await stream(
            request,
            _events(job, include_usage=include_usage),
            write_timeout_s=limits.write_timeout_s,
        )


async def _job(body: CompletionRequest, context: ServerContext) -> Job:
    context.check_model(body.model)
    check_common(body, context.limits)
    limits = context.limits
    vocab_size = context.client.model_info.vocab_size
    max_tokens = check_max_tokens("max_tokens", body.max_tokens, lowest=0 if body.echo else 1)
    raw_prompts = completion_prompts(body.prompt, vocab_size=vocab_size, max_prompts=limits.max_sequences)
    num_choices = choice_count(body, len(raw_prompts), limits)
    check_cache_fields(body, num_choices * len(raw_prompts), context.client.model_info, limits)
    if body.best_of is not None and body.best_of != num_choices:
        raise bad_request(
            f"'best_of' is supported only when it equals n ({num_choices}), got {body.best_of}. Use n with logprobs.",
            "best_of",
            "unsupported_parameter",
        )
    logprobs = None if body.logprobs is None else top_count("logprobs", body.logprobs, vocab_size, limits)
    params = sampling_params(
        body,
        vocab_size=vocab_size,
        limits=limits,
        draw_seed=context.draw_seed,
        logprobs=logprobs,
        prompt_logprobs=logprobs if body.echo else None,
    )
    prompts = await encode_completion_prompts(
        raw_prompts,
        context.client.tokenizer,
        add_special_tokens=body.add_special_tokens is not False,
        limits=limits,
        max_model_len=context.client.model_info.max_model_len,
    )
    return Job.build(
        context.client,
        context.identity("cmpl", body.model),
        prompts,
        params,
        num_choices=num_choices,
        max_tokens=max_tokens,
        default_max_tokens=_DEFAULT_MAX_TOKENS,
        prompt_param="prompt",
        session_id=body.session_id or "",
        cache_salt=body.cache_salt or "",
        priority=body.priority or 0,
        tenant=tenant_of(body),
        echo=bool(body.echo),
    )


def _shown_logprobs(job: Job, pieces: Sequence[Piece]) -> CompletionLogprobs | None:
    if job.params.logprobs is None:
        return None
    return completion_logprobs([e for piece in pieces for e in piece.entries], job.codec, job.params.logprobs)


async def _whole(job: Job) -> bytes:
    collected = await job.collect()
    identity = job.identity
    return msgspec.json.encode(
        Completion(
            id=identity.id,
            created=identity.created,
            model=identity.model,
            system_fingerprint=identity.system_fingerprint,
            choices=[_choice(job, index, pieces) for index, pieces in enumerate(collected)],
            usage=job.usage(),
        )
    )


def _choice(job: Job, index: int, pieces: Sequence[Piece]) -> CompletionChoice:
    return CompletionChoice(
        index=index,
        text="".join(piece.text for piece in pieces),
        logprobs=_shown_logprobs(job, pieces),
        finish_reason=pieces[-1].finish_reason,
        stop_reason=pieces[-1].stop_reason,
    )


async def _events(job: Job, *, include_usage: bool) -> AsyncGenerator[bytes, None]:
    identity = job.identity

    def chunk(choices: list[CompletionChoice], *, is_last: bool = False) -> bytes:
        usage = (job.usage() if is_last else None) if include_usage else msgspec.UNSET
        return event(
            msgspec.json.encode(
                CompletionChunk(
                    id=identity.id,
                    created=identity.created,
                    model=identity.model,
                    system_fingerprint=identity.system_fingerprint,
                    choices=choices,
                    usage=usage,
                )
            )
        )

    async with aclosing(job.pieces()) as pieces:
        async for index, piece in pieces:
            if not piece.is_empty:
                yield chunk([_choice(job, index, [piece])])
    if include_usage:
        yield chunk([], is_last=True)
