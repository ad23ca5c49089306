"""Chat templates: Jinja in a sandbox, with the helpers that templates on the Hub rely on."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tokenspeed_engine.tokenizer.errors import TemplateError

DEFAULT_TEMPLATE = "default"
TOOL_TEMPLATE = "tool_use"


class _GenerationTag(Extension):
    """`{% generation %}...{% endgeneration %}` marks the assistant's text for training; here its body is plain text."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own attribute

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Refusal(jinja2.TemplateRuntimeError):
    """The template called raise_exception()."""


def _raise_exception(message: object) -> NoReturn:
    raise _Refusal(str(message))


def _to_json(
    value: Any,
    indent: int | None = None,
    ensure_ascii: bool = False,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes <, >, & and ' for HTML; a prompt must hold the characters themselves.
    return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii, separators=separators, sort_keys=sort_keys)


def _strftime_now(form: str) -> str:
    return dt.datetime.now().strftime(form)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class ChatTemplate:
    """One or several compiled templates of a model.

    Args:
        templates: the source, or named sources; "default" is used, and "tool_use" where tools are given.
        special_tokens: variables such as bos_token and eos_token.
        source: where they came from, for messages.
    Raises:
        TemplateError: a template does not compile, or none is called "default".
    """

    def __init__(self, templates: str | Mapping[str, str], special_tokens: Mapping[str, str], source: str) -> None:
        named = {DEFAULT_TEMPLATE: templates} if isinstance(templates, str) else dict(templates)
        self._source = source
        self._special_tokens = dict(special_tokens)
        environment = _environment()
        self._compiled: dict[str, jinja2.Template] = {}
        for name, text in named.items():
            try:
                self._compiled[name] = environment.from_string(text)
            except jinja2.TemplateSyntaxError as error:
                raise TemplateError(
                    f"chat template {name!r} of {source}: line {error.lineno}: {error.message}. Fix: correct the template."
                ) from error
        if DEFAULT_TEMPLATE not in self._compiled:
            raise TemplateError(f"chat template of {source}: expected one named {DEFAULT_TEMPLATE!r}, got {sorted(named)}")

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> str:
        """Messages to text; see Tokenizer.apply_chat_template. Raises TemplateError with the template's own reason."""
        template = self._compiled[DEFAULT_TEMPLATE]
        if tools:
            template = self._compiled.get(TOOL_TEMPLATE, template)
        variables: dict[str, Any] = {
            **self._special_tokens,
            "documents": None,
            **kwargs,
            "messages": list(messages),
            "tools": list(tools) if tools else None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return template.render(variables)
        except _Refusal as error:
            raise TemplateError(f"the chat template refused the messages: {error}") from error
        except (
            jinja2.TemplateError,
            TypeError,
            ValueError,
            LookupError,
            AttributeError,
            ArithmeticError,
            RecursionError,
        ) as error:
            raise TemplateError(
                f"the chat template of {self._source} cannot render these messages: {type(error).__name__}: {error}"
            ) from error
