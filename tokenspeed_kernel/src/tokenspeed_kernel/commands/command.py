"""What a command is. A module of this folder that holds a `COMMAND` is one; nothing else has to be edited."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum

__all__ = ["Command", "Status", "columns"]


class Status(IntEnum):
    """Exit status of a command."""

    OK = 0
    FAILED = 1
    """The question was answered, and the answer is no: nothing eligible, a failure, nothing that matches."""
    USAGE = 2
    """The question is wrong."""


@dataclass(frozen=True, slots=True)
class Command:
    """One command.

    Args:
        name: as typed.
        help: one line.
        add_arguments: adds its arguments to the parser.
        run: does it, and returns the exit status. What only it needs is imported in there, so that the others start fast.
        order: place in the help; equal ones by name.
    """

    name: str
    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]
    order: int = 100


def columns(rows: Sequence[tuple[str, ...]]) -> Iterable[str]:
    """Yield the rows as lines, each column as wide as its widest cell."""
    widths = [max(len(row[index]) for row in rows) for index in range(len(rows[0]))]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
