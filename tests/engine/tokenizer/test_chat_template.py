"""Chat templates: the helpers that they rely on, the sandbox, and errors with their reason."""

from __future__ import annotations

import datetime as dt
from typing import Any

import pytest

from tokenspeed_engine.tokenizer import ChatTemplate, TemplateError, Tokenizer

QUESTION = "What is the capital of France? Answer in one sentence."
USER = [{"role": "user", "content": "hi"}]


def render(source: str | dict[str, str], messages: list[dict[str, Any]] | None = None, **kwargs: Any) -> str:
    return ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"}, "test").render(messages or USER, **kwargs)


def test_the_default_models_prompt_has_42_tokens(smollm: Tokenizer) -> None:
    prompt = smollm.apply_chat_template([{"role": "user", "content": QUESTION}])
    ids = smollm.encode(prompt, add_special_tokens=False)
    assert len(ids) == 42
    assert prompt.startswith("<|im_start|>system\n")
    assert prompt.endswith(f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n")


def test_a_system_message_replaces_the_default_one(smollm: Tokenizer) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    assert smollm.apply_chat_template(messages, add_generation_prompt=False) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"
    )


def test_a_folders_template(qwen: Tokenizer) -> None:
    assert qwen.apply_chat_template(USER) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_it_renders_as_transformers_does(smollm: Tokenizer, qwen: Tokenizer) -> None:
    utilities = pytest.importorskip("transformers.utils.chat_template_utils", reason="needs transformers")
    source = (
        "{%- if tools %}\n  {{- tools | tojson }}\n{%- endif %}\n"
        "{% for message in messages %}\n  {%- if loop.index > 3 %}{% break %}{% endif %}\n"
        "{{ bos_token + message['role'] }}:\n{% if message.content is string %}{{ message.content | trim }}\n{% endif %}\n"
        "{% generation %}x{{ loop.index }}{% endgeneration %}\n{% endfor %}\n"
        "    {% set ns = namespace(n=0) %}\n{{ ns.n }}{{ messages | tojson(indent=2) }}{% if add_generation_prompt %}A:{% endif %}"
    )
    messages = [{"role": "user", "content": f" é<'&> {index} "} for index in range(5)]
    tools = [{"type": "function", "function": {"name": "f", "description": "<é>"}}]
    for chosen in (None, tools):
        expected, _ = utilities.render_jinja_template(
            [messages], tools=chosen, chat_template=source, add_generation_prompt=True, bos_token="<s>"
        )
        assert render(source, messages, tools=chosen) == expected[0]


def test_json_keeps_text_as_it_is() -> None:
    assert render("{{ messages | tojson }}", [{"content": "é<b>&'"}]) == '[{"content": "é<b>&\'"}]'


def test_the_date() -> None:
    assert render("{{ strftime_now('%Y') }}") in {str(dt.datetime.now().year + offset) for offset in (-1, 0)}


def test_special_tokens_and_further_variables() -> None:
    assert render("{{ bos_token }}{{ enable_thinking }}{{ eos_token }}", enable_thinking=False) == "<s>False</s>"
    assert render("{{ documents is none }}{{ tools is none }}") == "TrueTrue"


def test_the_tool_template_is_used_with_tools() -> None:
    sources = {"default": "plain", "tool_use": "tools {{ tools | length }}"}
    assert render(sources) == "plain"
    assert render(sources, tools=[]) == "plain"
    assert render(sources, tools=[{"type": "function"}]) == "tools 1"


def test_the_templates_own_refusal_is_the_message() -> None:
    with pytest.raises(TemplateError, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


@pytest.mark.parametrize(
    ("source", "messages", "reason"),
    [
        ("{{ messages[0]['content'] + 1 }}", USER, "TypeError"),
        ("{{ messages[0].missing.deeper }}", USER, "UndefinedError.*missing"),
        ("{{ 'x' + messages[0].content }}", [{"role": "user", "content": None}], "TypeError"),
        ("{{ 1 / 0 }}", USER, "ZeroDivisionError"),
        ("{{ messages | tojson }}", [{"content": object()}], "not JSON serializable"),
        ("{% include 'other' %}", USER, "TypeError|no loader"),
    ],
)
def test_a_failing_template_says_why(source: str, messages: list[dict[str, Any]], reason: str) -> None:
    with pytest.raises(TemplateError, match=reason) as caught:
        render(source, messages)
    assert caught.value.__cause__ is not None


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append({}) }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{{ raise_exception.__globals__.x }}",
        "{% for i in range(10000000) %}x{% endfor %}",
        "{{ '{0.__class__}'.format(messages) }}{{ ('%s' | attr('__class__')).__mro__ }}",
    ],
)
def test_the_sandbox_holds(source: str) -> None:
    messages = [{"role": "user", "content": "hi"}]
    with pytest.raises(TemplateError):
        render(source, messages)
    assert messages == [{"role": "user", "content": "hi"}]


def test_a_template_that_does_not_compile_is_refused_at_once() -> None:
    with pytest.raises(TemplateError, match="line 2"):
        ChatTemplate("a\n{% if %}", {}, "test")
    with pytest.raises(TemplateError, match="'default'"):
        ChatTemplate({"other": "x"}, {}, "test")


def test_a_user_cannot_replace_what_the_server_sets() -> None:
    template = ChatTemplate("{{ messages[0].content }}{{ add_generation_prompt }}", {}, "test")
    with pytest.raises(TypeError):
        template.render(USER, None, True, messages=[])  # type: ignore[misc]
