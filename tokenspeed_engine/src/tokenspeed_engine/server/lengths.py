"""How many tokens a prompt leaves for its answer."""

from __future__ import annotations

from tokenspeed_engine.server.errors import bad_request
from tokenspeed_engine.server.validation import invalid
from tokenspeed_engine.types import ModelInfo

CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
_MAX_TOKENS = 2**31 - 1


def check_max_tokens(name: str, value: int | None, *, lowest: int = 1) -> int | None:
    """A requested number of tokens, or None.

    Raises:
        ApiError: 400 when it is below `lowest`, or no 32-bit number.
    """
    if value is not None and not lowest <= value <= _MAX_TOKENS:
        raise invalid(name, f"{lowest} to {_MAX_TOKENS}", value)
    return value


def check_num_chars(num_chars: int, most: int | None, max_model_len: int, prompt_param: str) -> None:
    """Refuse a text that has too many tokens whatever they are.

    Args:
        num_chars: length of the text.
        most: characters that max_model_len tokens can stand for; None when that is not known.
        max_model_len: the model's context.
        prompt_param: the field that holds the prompt, for the error.
    Raises:
        ApiError: 400 context_length_exceeded.
    """
    if most is not None and num_chars > most:
        raise bad_request(
            f"This model's maximum context length is {max_model_len} tokens, which is {most} characters at the very most, and the "
            f"prompt has {num_chars}. Shorten the prompt.",
            prompt_param,
            CONTEXT_LENGTH_EXCEEDED,
        )


def resolve_max_tokens(
    requested: int | None, *, default: int | None, num_prompt_tokens: int, model: ModelInfo, prompt_param: str
) -> int:
    """The bound of generated tokens for one prompt.

    Args:
        requested: what the client asked for; never cut.
        default: used when nothing was asked for, cut to the room that there is; None takes all the room.
        num_prompt_tokens: length of the prompt.
        model: context and pool size.
        prompt_param: the field that holds the prompt, for the error.
    Returns:
        at least 1.
    Raises:
        ApiError: 400 context_length_exceeded, when the prompt (or prompt and requested tokens together) cannot fit the
            model's context or the page pool.
    """
    pool_tokens = model.num_pages * model.page_size
    if num_prompt_tokens >= model.max_model_len:
        raise bad_request(
            f"This model's maximum context length is {model.max_model_len} tokens, and the prompt alone has "
            f"{num_prompt_tokens}; at least one must be left for the answer. Shorten the prompt.",
            prompt_param,
            CONTEXT_LENGTH_EXCEEDED,
        )
    if num_prompt_tokens > pool_tokens:
        raise bad_request(
            f"This server's KV cache holds {pool_tokens} tokens ({model.num_pages} pages of {model.page_size}), and the "
            f"prompt has {num_prompt_tokens}. Shorten the prompt, or start the server with a larger cache.",
            prompt_param,
            CONTEXT_LENGTH_EXCEEDED,
        )
    # The last token of an answer is never read back, so it needs no place in the cache.
    room = min(model.max_model_len - num_prompt_tokens, pool_tokens - num_prompt_tokens + 1)
    if requested is None:
        return room if default is None else min(default, room)
    if requested > room:
        holds = min(model.max_model_len, pool_tokens + 1)
        raise bad_request(
            f"This model's maximum context length is {holds} tokens, but {num_prompt_tokens + requested} were requested: "
            f"{num_prompt_tokens} in the prompt and {requested} for the answer. Ask for at most {room}, or shorten the "
            f"prompt.",
            "max_tokens",
            CONTEXT_LENGTH_EXCEEDED,
        )
    return requested
