"""Lines of a start: on a terminal one line that moves, elsewhere a line now and then."""

from __future__ import annotations

import sys
import time
from typing import TextIO

from tokenspeed_engine.ipc import LoadProgress

_BAR_WIDTH = 30
_LINE_INTERVAL_S = 2.0


class TerminalConsole:
    """Writes to standard error, so that standard output holds results only."""

    def __init__(self, stream: TextIO | None = None, *, quiet: bool = False) -> None:
        """Args: stream: where to write; None is standard error. quiet: write nothing."""
        self._stream = stream if stream is not None else sys.stderr
        self._is_terminal = self._stream.isatty()
        self._quiet = quiet
        self._stage = ""
        self._shown_s = 0.0
        self._line_open = False

    def say(self, text: str) -> None:
        """Show a line."""
        if self._quiet:
            return
        end_of_bar = "\n" if self._line_open else ""
        self._line_open = False
        self._write(f"{end_of_bar}{text}\n")

    def progress(self, progress: LoadProgress) -> None:
        """Show how far the core's start is; not every report is shown."""
        if self._quiet:
            return
        text = _describe(progress)
        if self._is_terminal and progress.total:
            self._write(f"\r\x1b[K{text}")
            self._line_open = True
            return
        is_news = progress.stage != self._stage or (progress.total and progress.done >= progress.total)
        now_s = time.monotonic()
        if is_news or now_s - self._shown_s >= _LINE_INTERVAL_S:
            self._stage, self._shown_s = progress.stage, now_s
            self.say(text)

    def _write(self, text: str) -> None:
        try:
            self._stream.write(text)
            self._stream.flush()
        except OSError:
            self._quiet = True  # nobody reads any more; that is no reason to stop serving


def _describe(progress: LoadProgress) -> str:
    if not progress.total:
        return f"loading: {progress.stage} {progress.detail}".rstrip()
    share = min(progress.done / progress.total, 1.0)
    filled = round(share * _BAR_WIDTH)
    bar = "#" * filled + "." * (_BAR_WIDTH - filled)
    return f"loading: {progress.stage} [{bar}] {share:4.0%} of {progress.total / 2**20:,.1f} MiB"
