"""The one reader: flags and environment variables to configuration objects."""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Mapping
from typing import Any

from tokenspeed_engine.config.cache import CacheConfig
from tokenspeed_engine.config.engine import CoreConfig, EngineConfig
from tokenspeed_engine.config.errors import ConfigError
from tokenspeed_engine.config.fields import Flag, flags_of
from tokenspeed_engine.config.model import ModelConfig
from tokenspeed_engine.config.process import ProcessConfig
from tokenspeed_engine.config.scheduling import SchedulingConfig
from tokenspeed_engine.config.server import ServerConfig
from tokenspeed_engine.config.tokenizer import TokenizerConfig

STAGES: Mapping[str, type] = {
    "model": ModelConfig,
    "tokenizer": TokenizerConfig,
    "cache": CacheConfig,
    "scheduling": SchedulingConfig,
    "server": ServerConfig,
    "process": ProcessConfig,
}


def add_flags(parser: argparse.ArgumentParser, stages: tuple[str, ...] = tuple(STAGES)) -> None:
    """Add the flags of the named stages to a parser, one group a stage, in the order of declaration.

    Values stay text until `read_config` converts them, so that a mistake is a ConfigError, not argparse's message.
    """
    for stage in stages:
        group = parser.add_argument_group(stage)
        for name, flag in flags_of(STAGES[stage]).items():
            _add_flag(group, f"{stage}.{name}", flag, _default_of(STAGES[stage], name))


def read_config(arguments: argparse.Namespace, *, model: str = "", environment: Mapping[str, str] | None = None) -> EngineConfig:
    """Build the configuration from parsed flags.

    Args:
        arguments: the result of a parser that `add_flags` filled; stages that it lacks keep their defaults.
        model: the positional MODEL; empty means the default model.
        environment: variables to read where a flag is absent; None means the process's own.
    Raises:
        ConfigError: a value cannot be read or cannot work; names flag, value and remedy.
    """
    variables = os.environ if environment is None else environment
    given = {stage: _read_stage(stage, arguments, variables) for stage in STAGES}
    core = CoreConfig(
        model=ModelConfig(model=model, **given["model"]),
        cache=CacheConfig(**given["cache"]),
        scheduling=SchedulingConfig(**given["scheduling"]),
        process=ProcessConfig(**given["process"]),
    )
    return EngineConfig(core=core, tokenizer=TokenizerConfig(**given["tokenizer"]), server=ServerConfig(**given["server"]))


def given_flags(arguments: argparse.Namespace) -> list[str]:
    """The flags of `add_flags` that were given on a command line, as a command line again. Secrets are left out."""
    words: list[str] = []
    for stage, config_type in STAGES.items():
        for name, flag in flags_of(config_type).items():
            raw = getattr(arguments, f"{stage}.{name}", None)
            if raw is None or flag.secret:
                continue
            if flag.is_switch:
                words.append(flag.names[0] if raw else flag.names[0].replace("--", "--no-", 1))
            else:
                words += [flag.names[0], *(raw if flag.repeated else [raw])]
    return words


def _add_flag(group: argparse._ArgumentGroup, destination: str, flag: Flag, default: object) -> None:
    shown = "" if default in (None, "", ()) or flag.secret else f" (default: {default})"
    source = f" [{flag.environment}]" if flag.environment else ""
    text = (flag.help + shown + source).replace("%", "%%")
    if flag.is_switch:
        group.add_argument(*flag.names, dest=destination, action=argparse.BooleanOptionalAction, default=None, help=text)
        return
    group.add_argument(
        *flag.names,
        dest=destination,
        default=None,
        nargs="+" if flag.repeated else None,
        action="extend" if flag.repeated else "store",
        metavar="{" + ",".join(flag.choices) + "}" if flag.choices else flag.metavar or None,
        help=text,
    )


def _read_stage(stage: str, arguments: argparse.Namespace, variables: Mapping[str, str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, flag in flags_of(STAGES[stage]).items():
        raw = getattr(arguments, f"{stage}.{name}", None)
        source = flag.names[0]
        if raw is None and flag.environment and variables.get(flag.environment):
            text, source = variables[flag.environment], flag.environment
            raw = [part.strip() for part in text.split(",") if part.strip()] if flag.repeated else text
        if raw is None:
            continue
        values[name] = _convert(flag, source, raw)
    return values


def _convert(flag: Flag, source: str, raw: Any) -> Any:
    if flag.is_switch:
        return raw
    if flag.repeated:
        return tuple(_parse(flag, source, text) for text in raw)
    return _parse(flag, source, raw)


def _parse(flag: Flag, source: str, text: str) -> Any:
    shown = "(hidden)" if flag.secret else text
    if flag.choices and text not in flag.choices:
        raise ConfigError(source, shown, expected=f"one of {', '.join(flag.choices)}", remedy=f"use {flag.choices[0]}")
    try:
        return flag.parse(text)
    except ValueError as error:
        raise ConfigError(source, shown, expected=str(error), remedy="correct the value, or leave the flag out") from None


def _default_of(config_type: type, name: str) -> object:
    return next(f.default for f in dataclasses.fields(config_type) if f.name == name)
