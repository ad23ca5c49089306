"""Command line: list and explain kernels, look at the machine, verify, time and tune. A command is a module of `commands/`."""

from __future__ import annotations

import argparse
import importlib
import os
import pkgutil
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from tokenspeed_kernel import commands
from tokenspeed_kernel._version import __version__
from tokenspeed_kernel.commands.command import Command, Status
from tokenspeed_kernel.errors import TokenSpeedKernelError

__all__ = ["main"]

# What a shell shows of a program that SIGPIPE ended.
_READER_GONE = 128 + 13


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: without the program's name; those of the process where left out.
    Returns:
        Exit status: 0; 1 when the answer is no (nothing eligible, a failure, nothing that matches); 2 for a mistake in the
        arguments; 141 when nobody reads on.
    """
    found = _commands()
    options = _parser(found).parse_args(arguments)
    try:
        with _plain_warnings():
            status = next(one for one in found if one.name == options.command).run(options)
            sys.stdout.flush()
        return int(status)
    except TokenSpeedKernelError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return Status.USAGE
    except BrokenPipeError:
        # The reader, `head` say, has seen enough. Python would complain once more when it flushes at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _READER_GONE


def _commands() -> list[Command]:
    """Every module in `commands/` that holds a `COMMAND`, in order."""
    modules = [
        importlib.import_module(f"{commands.__name__}.{info.name}") for info in pkgutil.iter_modules(commands.__path__)
    ]
    found = [module.COMMAND for module in modules if isinstance(getattr(module, "COMMAND", None), Command)]
    return sorted(found, key=lambda one: (one.order, one.name))


def _parser(found: Sequence[Command]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tokenspeed-kernel", description="Kernels for language models.")
    parser.add_argument("--version", action="version", version=f"tokenspeed-kernel {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True)
    for command in found:
        command.add_arguments(subparsers.add_parser(command.name, help=command.help, description=command.help))
    return parser


@contextmanager
def _plain_warnings() -> Iterator[None]:
    """Warnings (a plugin that failed, a setting that names nothing) as one line each, without the place in our code."""

    def show(message: Warning | str, category: type[Warning], *_: object, **__: object) -> None:
        print(f"{category.__name__}: {message}", file=sys.stderr)

    with warnings.catch_warnings():
        warnings.simplefilter("default")
        warnings.showwarning = show
        yield


if __name__ == "__main__":
    sys.exit(main())
