"""Ranges of the sampling fields, and their translation to SamplingParams."""

from __future__ import annotations

import random
import secrets
from collections.abc import Callable

from tokenspeed_engine.server.errors import ApiError, bad_request
from tokenspeed_engine.server.limits import Limits
from tokenspeed_engine.server.protocol import SamplingFields
from tokenspeed_engine.types import ModelInfo, SamplingParams

_SEED_BITS = 63
_NUM_SEEDS = 1 << _SEED_BITS
_INT64 = 1 << 63
_MAX_TOKENS = 2**31 - 1


def invalid(name: str, expected: str, got: object) -> ApiError:
    """400 for a value out of range."""
    shown = repr(got)
    shown = shown if len(shown) <= 64 else shown[:64] + "..."
    return bad_request(f"Invalid value for {name!r}: expected {expected}, got {shown}.", name, "invalid_value")


def choice_count(fields: SamplingFields, num_prompts: int, limits: Limits) -> int:
    """`n`, 1 when not given.

    Raises:
        ApiError: 400 when n, or the number of sequences of the whole request, is out of range.
    """
    n = 1 if fields.n is None else fields.n
    if not 1 <= n <= limits.max_choices:
        raise invalid("n", f"1 to {limits.max_choices}", n)
    if n * num_prompts > limits.max_sequences:
        raise bad_request(
            f"The request asks for {n * num_prompts} sequences ({num_prompts} prompts times n={n}); at most "
            f"{limits.max_sequences} are allowed. Send several requests.",
            "prompt" if num_prompts > 1 else "n",
            "invalid_value",
        )
    return n


def check_common(fields: SamplingFields, limits: Limits) -> None:
    """Rules of the fields that are not sampling parameters.

    Raises:
        ApiError: 400 that names the field.
    """
    if fields.stream_options is not None and not fields.stream:
        raise bad_request("'stream_options' needs stream=true.", "stream_options", "invalid_value")
    for name, text in (("user", fields.user), ("safety_identifier", fields.safety_identifier)):
        if text is not None and len(text) > limits.max_identifier_chars:
            raise invalid(name, f"at most {limits.max_identifier_chars} characters", text)
    if fields.priority is not None and abs(fields.priority) > limits.max_priority:
        raise invalid("priority", f"-{limits.max_priority} to {limits.max_priority}", fields.priority)


def check_cache_fields(fields: SamplingFields, num_sequences: int, info: ModelInfo, limits: Limits) -> None:
    """Rules of `session_id` and `cache_salt`.

    Args:
        num_sequences: prompts times `n`.
        info: tells whether this server keeps sessions.
    Raises:
        ApiError: 400 that names the field.
    """
    session_id, salt = fields.session_id, fields.cache_salt
    if session_id is not None:
        if not 0 < len(session_id) <= limits.max_identifier_chars:
            raise invalid("session_id", f"1 to {limits.max_identifier_chars} characters", session_id)
        if num_sequences != 1:
            raise bad_request(
                f"'session_id' names the one conversation that goes on; the request asks for {num_sequences} sequences. "
                "Send one prompt with n=1.",
                "session_id",
                "invalid_value",
            )
        if not info.keeps_sessions:
            raise bad_request(
                "'session_id' needs prefix caching and a --session-ttl of more than 0; this server runs without. Leave it out.",
                "session_id",
                "unsupported_parameter",
            )
    if salt is not None and not 0 < len(salt.encode()) <= limits.max_salt_bytes:
        raise bad_request(
            f"Invalid value for 'cache_salt': expected 1 to {limits.max_salt_bytes} bytes of UTF-8, got {len(salt.encode())}.",
            "cache_salt",
            "invalid_value",
        )


def top_count(name: str, value: int, vocab_size: int, limits: Limits) -> int:
    """A number of most likely tokens to report.

    Raises:
        ApiError: 400 when it is negative, or more than the limit or the vocabulary.
    """
    most = min(limits.max_top_logprobs, vocab_size)
    if not 0 <= value <= most:
        raise invalid(name, f"0 to {most}", value)
    return value


def sampling_params(
    fields: SamplingFields,
    *,
    vocab_size: int,
    limits: Limits,
    draw_seed: Callable[[], int],
    logprobs: int | None,
    prompt_logprobs: int | None,
) -> SamplingParams:
    """The parameters that all sequences of a request share; seed is that of choice 0, max_tokens is filled in per prompt.

    Args:
        fields: the request.
        vocab_size: bound of token ids.
        limits: bounds of counts and lengths.
        draw_seed: gives the seed of a request that has none.
        logprobs, prompt_logprobs: already checked.
    Raises:
        ApiError: 400 that names the first field out of range.
    """
    top_p = _in_range("top_p", fields.top_p, 1.0, 0.0, 1.0)
    top_k = 0 if fields.top_k is None or fields.top_k == -1 else fields.top_k
    if not 0 <= top_k < _INT64:
        raise invalid("top_k", "-1 or 0 (off), or a number of tokens", top_k)
    top_k = 0 if top_k >= vocab_size else top_k
    if top_p == 0.0:
        # A nucleus of no mass still holds the most likely token, and nothing else.
        top_p, top_k = 1.0, 1
    min_tokens = fields.min_tokens or 0
    if not 0 <= min_tokens <= _MAX_TOKENS:
        raise invalid("min_tokens", "0 or more", min_tokens)
    return SamplingParams(
        temperature=_in_range("temperature", fields.temperature, 1.0, 0.0, 2.0),
        top_p=top_p,
        top_k=top_k,
        min_p=_in_range("min_p", fields.min_p, 0.0, 0.0, 1.0),
        presence_penalty=_in_range("presence_penalty", fields.presence_penalty, 0.0, -2.0, 2.0),
        frequency_penalty=_in_range("frequency_penalty", fields.frequency_penalty, 0.0, -2.0, 2.0),
        repetition_penalty=_in_range("repetition_penalty", fields.repetition_penalty, 1.0, 0.01, 10.0),
        logit_bias=_logit_bias(fields.logit_bias, vocab_size, limits),
        seed=draw_seed() if fields.seed is None else _seed(fields.seed),
        min_tokens=min_tokens,
        stop=_stop_strings(fields.stop, limits),
        stop_token_ids=_stop_token_ids(fields.stop_token_ids, vocab_size, limits),
        ignore_eos=bool(fields.ignore_eos),
        include_stop_str_in_output=bool(fields.include_stop_str_in_output),
        skip_special_tokens=fields.skip_special_tokens is not False,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )


def choice_seed(seed: int, choice: int) -> int:
    """The seed of one choice: the request's seed plus the choice's number, so that choices differ and each can be repeated."""
    return (seed + choice) % _NUM_SEEDS


def seed_source(seed: int) -> Callable[[], int]:
    """What gives requests without a seed theirs, one after the other: the same for the same `seed`; with 0, others each time."""
    source = random.Random(seed) if seed else secrets.SystemRandom()
    return lambda: source.getrandbits(_SEED_BITS)


def _seed(value: int) -> int:
    if not -_INT64 <= value < _INT64:
        raise invalid("seed", "a 64-bit integer", value)
    return value % _NUM_SEEDS


def _in_range(name: str, value: float | None, default: float, low: float, high: float) -> float:
    if value is None:
        return default
    if not low <= value <= high:
        raise invalid(name, f"{low:g} to {high:g}", value)
    return value


def _stop_strings(stop: str | list[str] | None, limits: Limits) -> tuple[str, ...]:
    if stop is None:
        return ()
    strings = (stop,) if isinstance(stop, str) else tuple(dict.fromkeys(stop))
    if len(strings) > limits.max_stop_strings:
        raise invalid("stop", f"at most {limits.max_stop_strings} strings", f"{len(strings)} strings")
    for text in strings:
        if not 0 < len(text) <= limits.max_stop_string_chars:
            raise invalid("stop", f"strings of 1 to {limits.max_stop_string_chars} characters", text)
    return strings


def _stop_token_ids(ids: list[int] | None, vocab_size: int, limits: Limits) -> tuple[int, ...]:
    if not ids:
        return ()
    if len(ids) > limits.max_stop_token_ids:
        raise invalid("stop_token_ids", f"at most {limits.max_stop_token_ids} ids", f"{len(ids)} ids")
    for token_id in ids:
        if not 0 <= token_id < vocab_size:
            raise invalid("stop_token_ids", f"ids in 0..{vocab_size - 1}", token_id)
    return tuple(dict.fromkeys(ids))


def _logit_bias(bias: dict[str, float] | None, vocab_size: int, limits: Limits) -> dict[int, float]:
    if not bias:
        return {}
    if len(bias) > limits.max_logit_bias:
        raise invalid("logit_bias", f"at most {limits.max_logit_bias} entries", f"{len(bias)} entries")
    checked: dict[int, float] = {}
    for key, value in bias.items():
        # isdecimal() and isascii(): int() would take "1_0", " 1" and digits of other scripts.
        if not (key.isascii() and key.isdecimal() and len(key) <= 12 and int(key) < vocab_size):
            raise invalid("logit_bias", f"token ids in 0..{vocab_size - 1} as keys", key)
        if not -100.0 <= value <= 100.0:
            raise invalid("logit_bias", "values of -100 to 100", value)
        if int(key) in checked:
            raise invalid("logit_bias", "each token id once", key)
        checked[int(key)] = value
    return checked
