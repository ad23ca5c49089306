"""One request on its way: its sequences, their assemblers, and the two ways to read them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

from tokenspeed_engine.server.assemble import ChoiceAssembler, Piece
from tokenspeed_engine.server.context import NOTES, ResponseIdentity
from tokenspeed_engine.server.engine_client import EngineClient, EngineClientError, TextCodec
from tokenspeed_engine.server.errors import bad_request
from tokenspeed_engine.server.generation import generate_all
from tokenspeed_engine.server.lengths import resolve_max_tokens
from tokenspeed_engine.server.prompts import Prompt
from tokenspeed_engine.server.protocol import SamplingFields, Usage
from tokenspeed_engine.server.usage import total_usage
from tokenspeed_engine.server.validation import choice_seed
from tokenspeed_engine.types import SamplingParams, TokenizedRequest


@dataclass(frozen=True, slots=True)
class Job:
    """A request that was checked and tokenized; nothing runs before collect() or pieces().

    Attributes:
        client: the engine.
        identity: fields of the response.
        prompts: one or more.
        params: what all sequences share.
        requests: num_choices for each prompt, in order.
        choices: one assembler for each request.
    """

    client: EngineClient
    identity: ResponseIdentity
    prompts: Sequence[Prompt]
    params: SamplingParams
    requests: Sequence[TokenizedRequest]
    choices: Sequence[ChoiceAssembler]

    @classmethod
    def build(
        cls,
        client: EngineClient,
        identity: ResponseIdentity,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        *,
        num_choices: int,
        max_tokens: int | None,
        default_max_tokens: int | None,
        prompt_param: str,
        session_id: str = "",
        cache_salt: str = "",
        priority: int = 0,
        tenant: str = "",
        echo: bool = False,
    ) -> Job:
        """Make the sequences: each prompt num_choices times, with a seed for each choice.

        Args:
            max_tokens, default_max_tokens, prompt_param: see resolve_max_tokens; a max_tokens of 0 means that only the echo is
                wanted (one token is generated, and dropped).
            session_id, cache_salt, priority, tenant: see TokenizedRequest.
            echo: begin each text with its prompt.
        Raises:
            ApiError: 400 when a prompt leaves no room for its answer, or min_tokens is more than that room.
        """
        echo_only = max_tokens == 0
        requests: list[TokenizedRequest] = []
        choices: list[ChoiceAssembler] = []
        for prompt in prompts:
            room = resolve_max_tokens(
                1 if echo_only else max_tokens,
                default=default_max_tokens,
                num_prompt_tokens=len(prompt.token_ids),
                model=client.model_info,
                prompt_param=prompt_param,
            )
            if params.min_tokens > room:
                raise bad_request(
                    f"Invalid value for 'min_tokens': expected at most {room}, the most tokens that this request may generate, "
                    f"got {params.min_tokens}.",
                    "min_tokens",
                    "invalid_value",
                )
            for choice in range(num_choices):
                request = TokenizedRequest(
                    request_id=f"{identity.id}-{len(requests)}",
                    prompt_token_ids=prompt.token_ids,
                    params=replace(params, seed=choice_seed(params.seed, choice), max_tokens=room),
                    session_id=session_id,
                    cache_salt=cache_salt,
                    priority=priority,
                    tenant=tenant,
                )
                requests.append(request)
                choices.append(ChoiceAssembler(request, client.tokenizer, prompt, echo=echo, echo_only=echo_only))
        return cls(client, identity, prompts, params, requests, choices)

    @property
    def codec(self) -> TextCodec:
        """The tokenizer."""
        return self.client.tokenizer

    async def pieces(self) -> AsyncGenerator[tuple[int, Piece], None]:
        """Run all sequences; pieces with the number of their choice, as they come.

        Raises:
            EngineClientError: a sequence failed, or ended without a reason.
        """
        async with aclosing(generate_all(self.client, self.requests)) as deltas:
            async for index, delta in deltas:
                yield index, self.choices[index].feed(delta)
        if not all(choice.is_finished for choice in self.choices):
            raise EngineClientError("the engine ended a sequence without saying why")

    async def collect(self) -> list[list[Piece]]:
        """Run all sequences to their end; the pieces of each choice."""
        collected: list[list[Piece]] = [[] for _ in self.choices]
        async with aclosing(self.pieces()) as pieces:
            async for index, piece in pieces:
                collected[index].append(piece)
        return collected

    def usage(self) -> Usage:
        """Token counts so far."""
        return total_usage(self.prompts, self.choices)


def note_caller(body: SamplingFields) -> None:
    """Keep the caller's own identifiers for the log line of the request."""
    named = [
        f", {name} {value!r}"
        for name, value in (("user", body.user), ("safety_identifier", body.safety_identifier))
        if value is not None
    ]
    if named:
        NOTES.get().caller = "".join(named)


def tenant_of(body: SamplingFields) -> str:
    """Whose share of the machine a request uses.

    Where the server knows several API keys, each is a tenant: nobody gets a second share by another name. Otherwise all requests
    come from one party, and `user` tells its users apart.
    """
    return NOTES.get().key_name or (f"user {body.user}" if body.user else "")
