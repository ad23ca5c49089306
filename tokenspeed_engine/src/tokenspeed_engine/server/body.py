"""From the bytes of a request to its typed body."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from tokenspeed_engine.server import strict_json
from tokenspeed_engine.server.errors import ApiError, bad_request
from tokenspeed_engine.server.refused import Refusal, refuse

Body = TypeVar("Body", bound=msgspec.Struct)

# msgspec ends its messages with "- at `$.messages[0].content`", or "- at `key` in `$.logit_bias`".
_PATH = re.compile(r" - at (?:`key` in )?`\$\.?(?P<path>[^`]*)`$")
_UNKNOWN_FIELD = re.compile(r"^Object contains unknown field `(?P<name>.*?)`")
# What the HTTP library decodes, or refuses by itself where a package is missing. It takes any other for none at all.
_CONTENT_CODINGS = ("identity", "gzip", "deflate", "br", "zstd")
_MISSING_FIELD = re.compile(r"^Object missing required field `(?P<name>.*?)`")


async def read_json_object(
    request: web.Request, *, max_body_bytes: int, timeout_s: float, account: Callable[[int], None]
) -> dict[str, Any]:
    """Read and parse the body.

    Args:
        request: not read yet.
        max_body_bytes: bound of the (decompressed) body.
        timeout_s: bound of the time that it may take to arrive.
        account: told of the bytes of each part as it comes; raises when the server holds too much.
    Returns:
        the JSON object.
    Raises:
        ApiError: 415 not JSON by its Content-Type, 413 too large, 408 too slow, 400 not a JSON object.
    """
    _check_content_type(request)
    if request.content_length is not None and request.content_length > max_body_bytes:
        raise _too_large(max_body_bytes)
    raw = bytearray()
    try:
        async with asyncio.timeout(timeout_s):
            async for part in request.content.iter_any():
                account(len(part))
                raw += part
                if len(raw) > max_body_bytes:
                    raise _too_large(max_body_bytes)
    except TimeoutError:
        raise ApiError(
            408, f"The body did not arrive within {timeout_s:g} s. Send the request again.", closes_connection=True
        ) from None
    except web.RequestPayloadError as cause:
        raise ApiError(400, f"The body could not be read: {cause}.", code="invalid_body", closes_connection=True) from cause
    return parse_json_object(raw)


def parse_json_object(raw: bytes | bytearray) -> dict[str, Any]:
    """Parse strict JSON (UTF-8, no NaN).

    Raises:
        ApiError: 400 with the place of the mistake.
    """
    try:
        value = strict_json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError) as cause:
        raise bad_request(f"The body is not valid JSON: {cause}.", code="invalid_json") from None
    except RecursionError:
        raise bad_request("The body is not valid JSON: it is nested too deeply.", code="invalid_json") from None
    if not isinstance(value, dict):
        raise bad_request(
            f"The body must be a JSON object, got {_json_type(value)}.",
            code="invalid_json",
        )
    return value


def typed_body(fields: dict[str, Any], body_type: type[Body], refusals: Mapping[str, Refusal]) -> Body:
    """Convert a JSON object to its struct; null at the top level is "not given".

    Raises:
        ApiError: 400 naming the parameter that is refused, unknown, missing, or of a wrong type.
    """
    given = {name: value for name, value in fields.items() if value is not None}
    refuse(given, frozenset(body_type.__struct_encode_fields__), refusals)
    try:
        return msgspec.convert(given, body_type)
    except msgspec.ValidationError as error:
        raise invalid_value(str(error)) from None
    except RecursionError:
        raise bad_request("The body is nested too deeply.") from None


def _check_content_type(request: web.Request) -> None:
    coding = request.headers.get("Content-Encoding", "identity").lower()
    if coding not in _CONTENT_CODINGS:
        raise ApiError(
            415,
            f"The Content-Encoding must be gzip or deflate, or left out, got {coding[:128]!r}.",
            code="unsupported_media_type",
            closes_connection=True,
        )
    # A missing header is allowed; a form or text/plain is not: browsers send those across sites without asking.
    if "Content-Type" not in request.headers:
        return
    kind = request.content_type
    charset = (request.charset or "utf-8").lower()
    if not (kind == "application/json" or kind.endswith("+json")) or charset not in ("utf-8", "utf8", "us-ascii"):
        shown = request.headers["Content-Type"][:128]
        raise ApiError(
            415,
            f"The Content-Type must be application/json in UTF-8, got {shown!r}.",
            code="unsupported_media_type",
            closes_connection=True,
        )


def _too_large(max_body_bytes: int) -> ApiError:
    return ApiError(
        413,
        f"The body is larger than the limit of {max_body_bytes} bytes (flag --max-body-bytes).",
        code="request_too_large",
        closes_connection=True,
    )


def invalid_value(text: str, prefix: str = "") -> ApiError:
    """400 from a message of msgspec.ValidationError.

    Args:
        text: the message, which ends with a path.
        prefix: where the value that was checked stands in the body.
    """
    match = _PATH.search(text)
    path = ".".join(p for p in (prefix, match["path"] if match else "") if p)
    message = text[: match.start()] if match else text
    for pattern, code in ((_UNKNOWN_FIELD, "unknown_parameter"), (_MISSING_FIELD, "missing_required_parameter")):
        if named := pattern.match(message):
            path = f"{path}.{named['name']}" if path else named["name"]
            what = "Unknown parameter" if code == "unknown_parameter" else "Missing required parameter"
            return bad_request(f"{what}: {path!r}.", param=path, code=code)
    message = message.replace(" | null", "")
    where = f"Invalid value for {path!r}: " if path else "Invalid body: "
    return bad_request(f"{where}{message[0].lower()}{message[1:]}.", param=path or None, code="invalid_value")


def _json_type(value: object) -> str:
    if value is None:
        return "null"
    names = {list: "an array", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
    return names.get(type(value), type(value).__name__)
