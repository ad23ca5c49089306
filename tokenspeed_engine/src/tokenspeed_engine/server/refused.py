"""Parameters that the API knows and this server does not have: refused by name, never ignored.

A parameter may still be sent with a value that asks for nothing (`tools: []`, `response_format: {"type": "text"}`): those
values are listed too, because clients fill them in by default.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tokenspeed_engine.server.errors import ApiError, bad_request


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a parameter is refused.

    Attributes:
        reason: one clause that ends the message.
        neutral: values that ask for nothing, and are accepted.
    """

    reason: str
    neutral: tuple[Any, ...] = field(default=())

    def accepts(self, value: Any) -> bool:
        """True for a neutral value, of the same type (0 is not false)."""
        return any(type(value) is type(n) and value == n for n in self.neutral)


_TOOLS = "tool calls are not supported yet"
_FORMAT = "structured output is not supported yet"
_STORE = "nothing is stored on this server"
_EXTRA = "this extension is not supported"

_BOTH: Mapping[str, Refusal] = {
    "store": Refusal(_STORE, (False,)),
    "metadata": Refusal(_STORE, ({},)),
    "service_tier": Refusal("there is one service tier", ("auto", "default")),
    "prompt_cache_key": Refusal("prompts are cached by content, without keys"),
    "prompt_cache_retention": Refusal("cached prompts are kept as long as there is room"),
    "use_beam_search": Refusal("beam search is not supported", (False,)),
    "length_penalty": Refusal("beam search is not supported"),
    "early_stopping": Refusal("beam search is not supported", (False,)),
    "guided_json": Refusal(_FORMAT),
    "guided_regex": Refusal(_FORMAT),
    "guided_choice": Refusal(_FORMAT),
    "guided_grammar": Refusal(_FORMAT),
    "structured_outputs": Refusal(_FORMAT),
    "regex": Refusal(_FORMAT),
    "ebnf": Refusal(_FORMAT),
    "json_schema": Refusal(_FORMAT),
    "lora_path": Refusal(_EXTRA),
    "truncate_prompt_tokens": Refusal("prompts are never cut; send a shorter one"),
    "spaces_between_special_tokens": Refusal("tokens are joined as the tokenizer joins them", (True,)),
    "bad_words": Refusal("use logit_bias", ([],)),
    "allowed_token_ids": Refusal("use logit_bias"),
    "prompt_logprobs": Refusal("use echo with logprobs on /v1/completions"),
    "return_token_ids": Refusal(_EXTRA, (False,)),
    "return_tokens_as_token_ids": Refusal(_EXTRA, (False,)),
    "logits_processors": Refusal(_EXTRA, ([],)),
    "kv_transfer_params": Refusal(_EXTRA),
    "vllm_xargs": Refusal(_EXTRA),
    "no_stop_trim": Refusal("use include_stop_str_in_output", (False,)),
}

CHAT: Mapping[str, Refusal] = {
    **_BOTH,
    "tools": Refusal(_TOOLS, ([],)),
    "tool_choice": Refusal(_TOOLS, ("none",)),
    "parallel_tool_calls": Refusal(_TOOLS),
    "functions": Refusal(_TOOLS, ([],)),
    "function_call": Refusal(_TOOLS, ("none",)),
    "response_format": Refusal(_FORMAT, ({"type": "text"},)),
    "modalities": Refusal("only text is generated", (["text"],)),
    "audio": Refusal("only text is generated"),
    "prediction": Refusal("predicted output is not supported"),
    "reasoning_effort": Refusal("reasoning is not parsed yet; use chat_template_kwargs where the template has a switch"),
    "include_reasoning": Refusal("reasoning is not parsed yet"),
    "separate_reasoning": Refusal("reasoning is not parsed yet", (False,)),
    "verbosity": Refusal("use max_completion_tokens"),
    "web_search_options": Refusal("there is no web search"),
    "echo": Refusal("use /v1/completions, or chat_template_kwargs where the template has a switch", (False,)),
    "best_of": Refusal("use n and logprobs"),
    "continue_final_message": Refusal("use /v1/completions with the formatted prompt", (False,)),
    "chat_template": Refusal("a template is chosen when the server starts; requests cannot bring code"),
    "documents": Refusal("pass them in chat_template_kwargs, where the template shows them"),
    "mm_processor_kwargs": Refusal("only text is read"),
    "prompt": Refusal("a chat takes messages; use /v1/completions"),
    "suffix": Refusal("insertion is not supported"),
}

COMPLETIONS: Mapping[str, Refusal] = {
    **_BOTH,
    "suffix": Refusal("insertion is not supported", ("",)),
    "response_format": Refusal(_FORMAT, ({"type": "text"},)),
    "prompt_embeds": Refusal("prompts are text or token ids"),
    "messages": Refusal("a completion takes a prompt; use /v1/chat/completions"),
    "max_completion_tokens": Refusal("completions call it max_tokens"),
    "top_logprobs": Refusal("completions give the number of alternatives in logprobs"),
    "tools": Refusal(_TOOLS, ([],)),
    "tool_choice": Refusal(_TOOLS, ("none",)),
}


def refuse(fields: dict[str, Any], known: frozenset[str], refusals: Mapping[str, Refusal]) -> None:
    """Take neutral values of refused parameters out of `fields`, in place.

    Raises:
        ApiError: 400 that names the first parameter which is refused, or unknown.
    """
    for name in [n for n in fields if n not in known]:
        refusal = refusals.get(name)
        if refusal is None:
            raise _unknown(name)
        if not refusal.accepts(fields[name]):
            allowed = "".join(f" or {n!r}" for n in refusal.neutral)
            raise bad_request(
                f"The parameter {name!r} is not supported: {refusal.reason}. Leave it out{allowed and ', or send'}"
                f"{allowed.removeprefix(' or')}.",
                param=name,
                code="unsupported_parameter",
            )
        del fields[name]


def _unknown(name: str) -> ApiError:
    shown = name if len(name) <= 64 else name[:64] + "..."
    return bad_request(
        f"Unknown parameter: {shown!r}. Nothing is ignored: leave it out, or see docs/openai_api.md for what there is.",
        param=shown,
        code="unknown_parameter",
    )
