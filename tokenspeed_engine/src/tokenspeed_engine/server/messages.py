"""Chat messages: checked one by one, then put into the form that chat templates read."""

from __future__ import annotations

from typing import Any

import msgspec

from tokenspeed_engine.server import strict_json
from tokenspeed_engine.server.body import invalid_value
from tokenspeed_engine.server.errors import bad_request
from tokenspeed_engine.server.limits import Limits
from tokenspeed_engine.server.protocol import ChatMessage

# Clients send an earlier answer back as they got it; these fields say nothing when they are empty.
_EMPTY_FIELDS = ("refusal", "annotations", "audio", "function_call", "tool_calls", "reasoning_content")


def parse_messages(messages: Any, limits: Limits) -> list[ChatMessage]:
    """Type-check `messages` of a request body.

    Args:
        messages: the JSON value.
        limits: bounds of their number and size.
    Returns:
        at least one message.
    Raises:
        ApiError: 400 with the path of what is wrong.
    """
    if not isinstance(messages, list):
        raise bad_request("Invalid value for 'messages': expected an array of messages.", "messages", "invalid_value")
    if not 0 < len(messages) <= limits.max_messages:
        raise bad_request(
            f"Invalid value for 'messages': expected 1 to {limits.max_messages} messages, got {len(messages)}.",
            "messages",
            "invalid_value",
        )
    return [_parse_message(message, f"messages[{i}]", limits) for i, message in enumerate(messages)]


def template_messages(messages: list[ChatMessage]) -> list[dict[str, Any]]:
    """The messages as chat templates expect them.

    Text parts are joined by a line feed, the developer's role becomes "system" (templates know no other), and the arguments
    of earlier tool calls become objects where they are JSON objects.
    """
    return [_template_message(message) for message in messages]


def _parse_message(value: Any, path: str, limits: Limits) -> ChatMessage:
    if isinstance(value, dict):
        value = {name: v for name, v in value.items() if not (name in _EMPTY_FIELDS and v in (None, [], ""))}
        _check_parts(value.get("content"), path, limits)
    try:
        message = msgspec.convert(value, ChatMessage)
    except msgspec.ValidationError as error:
        raise invalid_value(str(error), path) from None
    except RecursionError:
        raise bad_request(f"Invalid value for {path!r}: nested too deeply.", path, "invalid_value") from None
    _check_role(message, path, limits)
    return message


def _check_parts(content: Any, path: str, limits: Limits) -> None:
    if not isinstance(content, list):
        return
    path = f"{path}.content"
    if not 0 < len(content) <= limits.max_content_parts:
        raise bad_request(
            f"Invalid value for {path!r}: expected 1 to {limits.max_content_parts} parts, got {len(content)}.",
            path,
            "invalid_value",
        )
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind != "text":
            raise bad_request(
                f"Content parts of type {kind[:64]!r} are not supported: this server reads text only.",
                f"{path}[{i}].type",
                "unsupported_content",
            )


def _check_role(message: ChatMessage, path: str, limits: Limits) -> None:
    if message.content is None and not message.tool_calls:
        raise bad_request(f"Missing required parameter: '{path}.content'.", f"{path}.content", "invalid_value")
    assistant = message.role == "assistant"
    for name, value, allowed in (
        ("tool_calls", message.tool_calls, assistant),
        ("reasoning_content", message.reasoning_content, assistant),
        ("tool_call_id", message.tool_call_id, message.role == "tool"),
    ):
        if value is not None and not allowed:
            raise bad_request(
                f"Invalid value: '{path}.{name}' does not belong to a message of role {message.role!r}.",
                f"{path}.{name}",
                "invalid_value",
            )
    if message.role == "tool" and message.tool_call_id is None:
        raise bad_request(
            f"Missing required parameter: '{path}.tool_call_id' says which tool call this answers.",
            f"{path}.tool_call_id",
            "missing_required_parameter",
        )
    if message.tool_calls and len(message.tool_calls) > limits.max_tool_calls:
        raise bad_request(
            f"Invalid value for '{path}.tool_calls': expected at most {limits.max_tool_calls}, got {len(message.tool_calls)}.",
            f"{path}.tool_calls",
            "invalid_value",
        )


def _template_message(message: ChatMessage) -> dict[str, Any]:
    content = message.content
    if isinstance(content, list):
        content = "\n".join(part.text for part in content)
    role = "system" if message.role == "developer" else message.role
    shaped: dict[str, Any] = {"role": role, "content": content or ""}
    if message.name is not None:
        shaped["name"] = message.name
    if message.tool_call_id is not None:
        shaped["tool_call_id"] = message.tool_call_id
    if message.reasoning_content is not None:
        shaped["reasoning_content"] = message.reasoning_content
    if message.tool_calls:
        shaped["tool_calls"] = [
            {
                "id": call.id,
                "type": call.type,
                "function": {"name": call.function.name, "arguments": _arguments(call.function.arguments)},
            }
            for call in message.tool_calls
        ]
    return shaped


def _arguments(text: str) -> Any:
    # A call that was cut off is not JSON; it goes back to the model as it was.
    try:
        parsed = strict_json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return text
    return parsed if isinstance(parsed, dict) else text
