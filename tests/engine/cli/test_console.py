"""Lines of a start, on a terminal and elsewhere."""

from __future__ import annotations

import io

from tokenspeed_engine.commands.console import TerminalConsole
from tokenspeed_engine.ipc import LoadProgress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_elsewhere_than_on_a_terminal_a_line_now_and_then() -> None:
    stream = io.StringIO()
    console = TerminalConsole(stream)
    console.progress(LoadProgress("checkpoint"))
    for done in range(1, 101):
        console.progress(LoadProgress("weights", done * 2**20, 100 * 2**20, "tensor"))
    console.say("ready")
    lines = stream.getvalue().splitlines()
    assert lines[0] == "loading: checkpoint"
    assert "1% of 100.0 MiB" in lines[1]
    assert "100% of 100.0 MiB" in lines[-2]
    assert lines[-1] == "ready"
    assert len(lines) == 4


def test_a_terminal_shows_a_bar_that_moves() -> None:
    stream = Terminal()
    console = TerminalConsole(stream)
    for done in (1, 2, 4):
        console.progress(LoadProgress("weights", done, 4))
    console.say("ready")
    text = stream.getvalue()
    assert text.count("\r") == 3
    assert text.endswith("100% of 0.0 MiB\nready\n")


def test_a_closed_stream_stops_the_lines_and_nothing_else() -> None:
    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    console = TerminalConsole(Closed())
    console.say("one")
    console.progress(LoadProgress("weights", 1, 1))


def test_quiet_says_nothing() -> None:
    stream = io.StringIO()
    console = TerminalConsole(stream, quiet=True)
    console.say("x")
    console.progress(LoadProgress("weights", 1, 1))
    assert stream.getvalue() == ""
