"""Token entries in the two dialects of the API."""

from __future__ import annotations

from collections.abc import Sequence

from tokenspeed_engine.server.assemble import TokenEntry
from tokenspeed_engine.server.engine_client import TextCodec
from tokenspeed_engine.server.protocol import ChatLogprobs, ChatTokenLogprob, ChatTopLogprob, CompletionLogprobs
from tokenspeed_engine.server.token_text import shown_key, shown_text

# JSON has no infinity; this is the API's value for "impossible", and what a NaN becomes.
LOWEST_LOGPROB = -9999.0


def finite(logprob: float) -> float:
    """A value that JSON can hold."""
    return logprob if logprob >= LOWEST_LOGPROB else LOWEST_LOGPROB


def chat_logprobs(entries: Sequence[TokenEntry], codec: TextCodec, num_top: int) -> ChatLogprobs:
    """Entries of generated tokens, for a chat.

    Args:
        entries: tokens with log-probabilities.
        codec: gives the tokens' bytes.
        num_top: alternatives to show for each.
    """
    content = []
    for entry in entries:
        assert entry.logprobs is not None, "a generated token always has log-probabilities here"
        raw = codec.token_bytes(entry.token_id)
        top = []
        for token_id, logprob in zip(entry.logprobs.top_token_ids[:num_top], entry.logprobs.top_logprobs[:num_top], strict=True):
            top_raw = codec.token_bytes(token_id)
            top.append(ChatTopLogprob(shown_text(top_raw), finite(logprob), list(top_raw)))
        content.append(ChatTokenLogprob(shown_text(raw), finite(entry.logprobs.logprob), list(raw), top))
    return ChatLogprobs(content)


def completion_logprobs(entries: Sequence[TokenEntry], codec: TextCodec, num_top: int) -> CompletionLogprobs:
    """Entries of prompt and generated tokens, for a text completion.

    The chosen token is in each dictionary even where it is not among the num_top most likely. Where two tokens have the same
    text, the likelier one keeps the key.
    """
    shown = CompletionLogprobs()
    for entry in entries:
        key = shown_key(codec.token_bytes(entry.token_id))
        shown.tokens.append(key)
        shown.text_offset.append(entry.start)
        if entry.logprobs is None:
            shown.token_logprobs.append(None)
            shown.top_logprobs.append(None)
            continue
        top: dict[str, float] = {}
        for token_id, logprob in zip(entry.logprobs.top_token_ids[:num_top], entry.logprobs.top_logprobs[:num_top], strict=True):
            top.setdefault(shown_key(codec.token_bytes(token_id)), finite(logprob))
        top.setdefault(key, finite(entry.logprobs.logprob))
        shown.token_logprobs.append(finite(entry.logprobs.logprob))
        shown.top_logprobs.append(top)
    return shown
