"""`tokenspeed-engine generate`: prompts in, text out, without a server."""

from __future__ import annotations

import argparse
import asyncio
import json
import secrets
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tokenspeed_engine.commands.console import TerminalConsole
from tokenspeed_engine.config import ConfigError, EngineConfig
from tokenspeed_engine.launch import EXIT_FAILED, EXIT_OK, Engine, open_engine
from tokenspeed_engine.server import EngineClientError
from tokenspeed_engine.types import FinishReason, SamplingParams, TextDelta, TokenizedRequest


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of one prompt."""

    prompt: str
    deltas: tuple[TextDelta, ...]
    error: str = ""

    @property
    def text(self) -> str:
        """The generated text."""
        return "".join(delta.text for delta in self.deltas)

    def to_json(self) -> dict[str, object]:
        """The answer as plain data, one JSON object a prompt."""
        last = self.deltas[-1] if self.deltas else TextDelta("")
        return {
            "prompt": self.prompt,
            "text": self.text,
            "token_ids": [token for delta in self.deltas for token in delta.token_ids],
            "finish_reason": last.finish_reason.name.lower() if not self.error else "error",
            "num_prompt_tokens": last.num_prompt_tokens,
            "error": self.error or None,
        }


def run_generate(arguments: argparse.Namespace, config: EngineConfig) -> int:
    """Run the command. Raises ConfigError for a flag that cannot work; returns the exit status."""
    params = _params(arguments, config.core.model.seed)
    prompts = list(arguments.prompts)
    if not prompts:
        prompts = [sys.stdin.read()]
    if not all(prompts):
        raise ConfigError("PROMPT", "", expected="a prompt that is not empty", remedy="give a prompt, or pipe one in")
    return asyncio.run(_generate(prompts, params, arguments, config))


async def _generate(prompts: Sequence[str], params: SamplingParams, arguments: argparse.Namespace, config: EngineConfig) -> int:
    stream_out = len(prompts) == 1 and not arguments.json
    async with open_engine(config, TerminalConsole(quiet=config.core.process.log_level == "error")) as engine:
        answers = [
            asyncio.create_task(_answer(engine, f"prompt-{index}", prompt, params, arguments, stream_out))
            for index, prompt in enumerate(prompts)
        ]
        failed = False
        for task in answers:
            answer = await task
            failed = failed or bool(answer.error)
            _show(answer, arguments, stream_out)
    return EXIT_FAILED if failed else EXIT_OK


async def _answer(
    engine: Engine, name: str, prompt: str, params: SamplingParams, arguments: argparse.Namespace, stream_out: bool
) -> Answer:
    tokenizer, deltas = engine.client.tokenizer, []
    try:
        if arguments.raw:
            ids = tokenizer.encode(prompt, add_special_tokens=True)
        else:
            messages = [{"role": "system", "content": arguments.system}] if arguments.system else []
            messages.append({"role": "user", "content": prompt})
            text = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
            ids = tokenizer.encode(text, add_special_tokens=False)
        room = engine.client.model_info.max_model_len - len(ids)
        request = TokenizedRequest(name, tuple(ids), _limited(params, room))
        async for delta in engine.client.generate(request):
            deltas.append(delta)
            if stream_out:
                sys.stdout.write(delta.text)
                sys.stdout.flush()
        error = deltas[-1].error if deltas[-1].finish_reason is FinishReason.ERROR else ""
    except (EngineClientError, ValueError) as problem:  # ValueError: the tokenizer or its template refuses the prompt
        error = str(problem)
    return Answer(prompt, tuple(deltas), error)


def _show(answer: Answer, arguments: argparse.Namespace, streamed: bool) -> None:
    if answer.error:
        print(f"error: {answer.error}", file=sys.stderr)
    if arguments.json:
        print(json.dumps(answer.to_json(), ensure_ascii=False), flush=True)
    elif streamed:
        print(flush=True)
    elif not answer.error:
        print(answer.text, flush=True)


def _limited(params: SamplingParams, room: int) -> SamplingParams:
    """The parameters with no more tokens than the model has room for; an over-long prompt keeps them and is refused."""
    return replace(params, max_tokens=min(params.max_tokens, room)) if room > 0 else params


def _params(arguments: argparse.Namespace, seed: int) -> SamplingParams:
    checks = (
        ("--max-tokens", arguments.max_tokens, arguments.max_tokens >= 1, "1 or more"),
        ("--temperature", arguments.temperature, 0 <= arguments.temperature <= 100, "0 to 100"),
        ("--top-p", arguments.top_p, 0 < arguments.top_p <= 1, "more than 0, at most 1"),
        ("--stop", arguments.stop, all(arguments.stop), "strings that are not empty"),
    )
    for flag, value, holds, expected in checks:
        if not holds:
            raise ConfigError(flag, value, expected=expected, remedy="correct the value, or leave the flag out")
    return SamplingParams(
        temperature=arguments.temperature,
        top_p=arguments.top_p,
        max_tokens=arguments.max_tokens,
        stop=tuple(arguments.stop),
        seed=seed or secrets.randbits(63),
    )
