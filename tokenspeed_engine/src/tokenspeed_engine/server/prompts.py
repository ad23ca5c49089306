"""From the prompt of a request to token ids."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from tokenspeed_engine.server.engine_client import TextCodec
from tokenspeed_engine.server.errors import ApiError, bad_request
from tokenspeed_engine.server.lengths import check_num_chars
from tokenspeed_engine.server.limits import Limits
from tokenspeed_engine.server.messages import template_messages
from tokenspeed_engine.server.protocol import ChatCompletionRequest, ChatMessage
from tokenspeed_engine.server.token_text import complete_text

Result = TypeVar("Result")

# Names that apply_chat_template() has itself.
_RESERVED_TEMPLATE_NAMES = ("messages", "tools", "add_generation_prompt", "self")


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt.

    Attributes:
        token_ids: at least one.
        text: the text that it came from; None when it came as ids.
    """

    token_ids: tuple[int, ...]
    text: str | None

    def echo_text(self, codec: TextCodec, skip_special_tokens: bool) -> str:
        """What `echo` puts before the answer: the text as it was sent, or the decoded ids.

        An incomplete character at the end of the ids is left to the answer, which completes it.
        """
        if self.text is not None:
            return self.text
        return complete_text(self.token_ids, codec, skip_special_tokens)


async def chat_prompt(body: ChatCompletionRequest, codec: TextCodec, limits: Limits, max_model_len: int) -> Prompt:
    """Render the chat template and tokenize.

    Args:
        body: the request.
        codec: template and tokenizer.
        limits: what is done on the event loop.
        max_model_len: tokens of the model's context.

    Raises:
        ApiError: 400 when the template refuses the messages, nothing is left of them, or they cannot fit.
    """
    kwargs = body.chat_template_kwargs or {}
    for name in kwargs:
        if name in _RESERVED_TEMPLATE_NAMES:
            path = f"chat_template_kwargs.{name}"
            raise bad_request(f"Invalid value: {path!r} cannot be set.", path, "invalid_value")
    messages = template_messages(body.messages)
    try:
        text = await _run(
            sum(map(_num_chars, body.messages)),
            limits,
            lambda: codec.apply_chat_template(
                messages, None, add_generation_prompt=body.add_generation_prompt is not False, **kwargs
            ),
        )
    except ValueError as refusal:
        raise bad_request(f"{refusal}", "messages", "chat_template_error") from refusal
    add_special_tokens = bool(body.add_special_tokens)
    return await _run(len(text), limits, lambda: _encode(text, codec, add_special_tokens, "messages", limits, max_model_len))


def completion_prompts(prompt: str | list[Any], *, vocab_size: int, max_prompts: int) -> list[str | tuple[int, ...]]:
    """The prompts of a completion: texts, or checked token ids.

    Args:
        prompt: a text, a list of texts, token ids, or a list of them.
        vocab_size: bound of token ids.
        max_prompts: how many there may be.
    Raises:
        ApiError: 400 for an empty list, a mixture, ids out of range, or too many prompts.
    """
    if isinstance(prompt, str):
        return [prompt]
    kinds = {type(item) for item in prompt}
    if len(kinds) != 1:
        found = "an empty array" if not kinds else "a mixture"
        raise _invalid_prompt(f"expected a text, token ids, or an array of one of them, got {found}")
    kind = kinds.pop()
    if kind is int:
        return [_checked_ids(prompt, vocab_size)]
    if len(prompt) > max_prompts:
        raise _invalid_prompt(f"expected at most {max_prompts} prompts, got {len(prompt)}")
    if kind is str:
        return list(prompt)
    return [_checked_ids(ids, vocab_size) for ids in prompt]


async def encode_completion_prompts(
    prompts: list[str | tuple[int, ...]], codec: TextCodec, *, add_special_tokens: bool, limits: Limits, max_model_len: int
) -> list[Prompt]:
    """Tokenize those that are texts.

    Raises:
        ApiError: 400 when a text has no tokens, or cannot fit.
    """
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    num_chars = sum(map(len, texts))

    def encode_all() -> list[Prompt]:
        return [_encode(text, codec, add_special_tokens, "prompt", limits, max_model_len) for text in texts]

    encoded = iter(await _run(num_chars, limits, encode_all))
    return [next(encoded) if isinstance(prompt, str) else Prompt(prompt, None) for prompt in prompts]


def _encode(
    text: str, codec: TextCodec, add_special_tokens: bool, param: str, limits: Limits, max_model_len: int
) -> Prompt:
    if len(text) > limits.inline_encode_chars:
        check_num_chars(len(text), codec.max_chars(max_model_len), max_model_len, param)
    try:
        ids = codec.encode(text, add_special_tokens=add_special_tokens)
    except ValueError as refusal:
        raise bad_request(f"{refusal}", param, "invalid_value") from refusal
    if not ids:
        raise bad_request(
            f"Invalid value for {param!r}: it has no tokens, and there is nothing to continue. Send some text.",
            param,
            "empty_prompt",
        )
    return Prompt(tuple(ids), text)


def _num_chars(message: ChatMessage) -> int:
    content = message.content or ""
    shown = len(content) if isinstance(content, str) else sum(len(part.text) for part in content)
    called = sum(len(call.function.name) + len(call.function.arguments) for call in message.tool_calls or ())
    return shown + called + len(message.reasoning_content or "")


async def _run(num_chars: int, limits: Limits, work: Callable[[], Result]) -> Result:
    # A thread costs more than a short text, and a long text would hold up every stream.
    return work() if num_chars <= limits.inline_encode_chars else await asyncio.to_thread(work)


def _checked_ids(ids: list[int], vocab_size: int) -> tuple[int, ...]:
    if not ids:
        raise bad_request("Invalid value for 'prompt': an array of token ids is empty.", "prompt", "empty_prompt")
    if min(ids) < 0 or max(ids) >= vocab_size:
        wrong = next(i for i in ids if not 0 <= i < vocab_size)
        raise _invalid_prompt(f"expected token ids in 0..{vocab_size - 1}, got {wrong}")
    return tuple(ids)


def _invalid_prompt(what: str) -> ApiError:
    return bad_request(f"Invalid value for 'prompt': {what}.", "prompt", "invalid_value")
