"""The `tokenspeed-engine` command.

Exit status: 0 done, or stopped after all requests were finished; 1 failed; 2 wrong usage or configuration; 3 the engine could not
start; 4 the engine core died too often; 5 requests were cut off at the end of the grace period; 130 and 143 stopped at once by a
second SIGINT or SIGTERM.
"""

from __future__ import annotations

import argparse
import asyncio
import difflib
import logging
import signal
import sys
from collections.abc import Sequence

from tokenspeed_engine._version import __version__
from tokenspeed_engine.commands.flags import add_bench_flags, add_generate_flags
from tokenspeed_engine.config import ConfigError, EngineConfig, add_flags, read_config

_CORE_STAGES = ("model", "tokenizer", "cache", "scheduling", "process")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command. Returns the exit status; see the module's documentation."""
    arguments = _parsed(build_parser(), argv)
    # Imported here, as everything heavy is: `--version`, `--help` and a wrong flag answer at once.
    from tokenspeed_engine.checkpoint import CheckpointError
    from tokenspeed_engine.ipc import SocketPathError
    from tokenspeed_engine.launch import EXIT_FAILED, EXIT_START_FAILED, EXIT_USAGE
    from tokenspeed_engine.supervisor import CoreFailedError
    from tokenspeed_engine.tokenizer import TokenizerError

    try:
        return _run(arguments)
    except ConfigError as error:
        print(f"tokenspeed-engine {arguments.command}: {error}", file=sys.stderr)
        return EXIT_USAGE
    except (CheckpointError, TokenizerError, CoreFailedError, SocketPathError) as error:
        print(f"tokenspeed-engine {arguments.command}: {error}", file=sys.stderr)
        return EXIT_START_FAILED
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:
        return EXIT_FAILED


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    parser = argparse.ArgumentParser(prog="tokenspeed-engine", description="LLM inference engine with an OpenAI-compatible API")
    parser.add_argument("--version", action="version", version=f"tokenspeed-engine {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    serve = commands.add_parser("serve", help="serve a model over the OpenAI API")
    serve.add_argument(
        "model", nargs="?", default="", metavar="MODEL", help="Hugging Face id, folder or file (default: the default model)"
    )
    add_flags(serve)

    generate = commands.add_parser("generate", help="answer prompts without a server")
    add_generate_flags(generate)
    add_flags(generate, _CORE_STAGES)

    bench = commands.add_parser("bench", help="measure a server under concurrent streams")
    add_bench_flags(bench)
    add_flags(bench, _CORE_STAGES)

    doctor = commands.add_parser("doctor", help="say what this machine and installation can do")
    doctor.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _parsed(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    arguments, unknown = parser.parse_known_args(argv)
    if unknown:
        (commands,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
        chosen: argparse.ArgumentParser = commands.choices[arguments.command]
        flags = [flag for action in chosen._actions for flag in action.option_strings]
        close = [match for one in unknown for match in difflib.get_close_matches(one.partition("=")[0], flags, 1)]
        hint = f" Did you mean {', '.join(close)}?" if close else f" See {chosen.prog} --help."
        chosen.error(f"unrecognized arguments: {' '.join(unknown)}.{hint}")
    return arguments


def _run(arguments: argparse.Namespace) -> int:
    if arguments.command == "doctor":
        from tokenspeed_engine.commands.doctor import run_doctor

        return run_doctor(as_json=arguments.json)
    config = read_config(arguments, model=arguments.model)
    _configure_logging(config.core.process.log_level)
    match arguments.command:
        case "serve":
            return _serve(config)
        case "generate":
            from tokenspeed_engine.commands.generate import run_generate

            return run_generate(arguments, config)
        case _:
            from tokenspeed_engine.commands.bench import run_bench

            return run_bench(arguments)


def _serve(config: EngineConfig) -> int:
    from tokenspeed_engine.commands.console import TerminalConsole
    from tokenspeed_engine.launch import serve

    return asyncio.run(serve(config, TerminalConsole()))


def _configure_logging(level: str) -> None:
    logging.basicConfig(level=level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")


if __name__ == "__main__":
    sys.exit(main())
