"""Request fields that chat and text completions share."""

from __future__ import annotations

import msgspec


class StreamOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """How a stream reports.

    Attributes:
        include_usage: send one more chunk before [DONE], with the usage and no choices.
    """

    include_usage: bool | None = None


class SamplingFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Fields of both endpoints. None is "not given"; ranges are checked by validation.py, meanings are in docs/openai_api.md.

    Attributes:
        model: a served name.
        session_id: the conversation that the request is a turn of.
        cache_salt: whose cached prompts the request may reuse.
        priority: class of service; a smaller one goes first.
        user: the caller's identifier for its own user; written to the request log, and its tenant where there are no two API keys.
        safety_identifier: another such identifier; written to the request log, nothing else.
    """

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    session_id: str | None = None
    cache_salt: str | None = None
    priority: int | None = None
    user: str | None = None
    safety_identifier: str | None = None
