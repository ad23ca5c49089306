"""Bounds on what one client can send, beside the body size of ServerConfig."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """Every count and length that a request can choose.

    Attributes:
        max_inflight_requests: HTTP requests that generate at the same time; more are answered 429.
        max_inflight_body_bytes: size of the bodies of all requests in progress; more are answered 429.
        max_choices: largest `n`.
        max_sequences: largest number of prompts times `n` of one request.
        max_messages: messages of a chat.
        max_content_parts: parts of one message's content.
        max_tool_calls: tool calls of one message.
        max_stop_strings: entries of `stop`.
        max_stop_string_chars: length of one of them.
        max_stop_token_ids: entries of `stop_token_ids`.
        max_logit_bias: entries of `logit_bias`.
        max_top_logprobs: largest `top_logprobs` of a chat and `logprobs` of a completion.
        max_identifier_chars: length of `user`, `safety_identifier`, `session_id`, and of an X-Request-Id header.
        max_salt_bytes: length of `cache_salt` in UTF-8; the scheduler takes no more.
        max_priority: largest `priority`; the smallest is its negative.
        body_timeout_s: time in which a request's body must have arrived.
        write_timeout_s: time that one event of a stream may wait for its reader, before the connection is closed.
        inline_encode_chars: prompts up to this length are made on the event loop, longer ones in a worker thread.
    """

    max_inflight_requests: int = 2048
    max_inflight_body_bytes: int = 512 * 2**20
    max_choices: int = 128
    max_sequences: int = 256
    max_messages: int = 4096
    max_content_parts: int = 1024
    max_tool_calls: int = 128
    max_stop_strings: int = 16
    max_stop_string_chars: int = 512
    max_stop_token_ids: int = 128
    max_logit_bias: int = 1024
    max_top_logprobs: int = 20
    max_identifier_chars: int = 512
    max_salt_bytes: int = 256
    max_priority: int = 100
    body_timeout_s: float = 60.0
    write_timeout_s: float = 60.0
    inline_encode_chars: int = 8192
