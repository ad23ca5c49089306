"""How the two processes talk, and when the front end gives up on the core: the stage of the supervisor."""

from __future__ import annotations

from dataclasses import dataclass

from tokenspeed_engine.config.fields import check, option, parse_count, parse_seconds

LOG_LEVELS = ("debug", "info", "warning", "error")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessConfig:
    """Limits of the link between front end and engine core, and of restarts.

    Attributes:
        heartbeat_interval_s: how often the core reports.
        heartbeat_timeout_s: silence after which the core counts as dead.
        hang_timeout_s: time without a finished step, while requests run, after which the core counts as hung.
        startup_timeout_s: longest start, from the process to ready.
        max_restarts: restarts in a row without a stable run between them; after that the server ends.
        restart_backoff_s: wait before the first restart; doubles each time.
        restart_backoff_max_s: longest wait before a restart.
        stable_after_s: a core that was ready for so long resets the count of restarts.
        max_message_bytes: largest message between the processes.
        log_level: level of both processes' log on standard error.
        runtime_dir: where the private socket directory is made; empty means the user's runtime or temporary directory.
    """

    heartbeat_interval_s: float = 0.5
    heartbeat_timeout_s: float = option(
        30.0,
        "--heartbeat-timeout",
        parse=parse_seconds,
        help="silence of the engine core after which it is restarted",
        metavar="SECONDS",
    )
    hang_timeout_s: float = option(
        300.0,
        "--hang-timeout",
        parse=parse_seconds,
        help="time without a finished step, with work in flight, after which the core is restarted",
        metavar="SECONDS",
    )
    startup_timeout_s: float = option(
        1800.0, "--startup-timeout", parse=parse_seconds, help="longest start of the engine core", metavar="SECONDS"
    )
    max_restarts: int = option(
        5,
        "--max-restarts",
        parse=parse_count,
        help="restarts of the core in a row before the server gives up",
        metavar="N",
    )
    restart_backoff_s: float = 0.5
    restart_backoff_max_s: float = 30.0
    stable_after_s: float = 60.0
    max_message_bytes: int = option(
        64 * 2**20,
        "--max-message-bytes",
        parse=parse_count,
        help="largest message between front end and core",
        metavar="BYTES",
    )
    log_level: str = option("info", "--log-level", parse=str, choices=LOG_LEVELS, help="level of the log on standard error")
    runtime_dir: str = option("", "--runtime-dir", parse=str, help="where the private socket directory is made", metavar="DIR")

    def __post_init__(self) -> None:
        if not 0 < self.heartbeat_interval_s < self.heartbeat_timeout_s:
            check(
                self,
                "heartbeat_timeout_s",
                False,
                expected=f"more than the heartbeat interval of {self.heartbeat_interval_s} s",
                remedy="use 30",
            )
        check(self, "hang_timeout_s", self.hang_timeout_s > 0, expected="more than 0 seconds", remedy="use 300")
        check(self, "startup_timeout_s", self.startup_timeout_s > 0, expected="more than 0 seconds", remedy="use 1800")
        check(self, "max_restarts", 0 <= self.max_restarts <= 1000, expected="0 to 1000", remedy="use 5")
        check(
            self,
            "max_message_bytes",
            4096 <= self.max_message_bytes <= 2**30,
            expected="4K to 1G bytes",
            remedy="use 64M",
        )
        check(self, "log_level", self.log_level in LOG_LEVELS, expected=f"one of {', '.join(LOG_LEVELS)}", remedy="use info")

    def restart_delay_s(self, restarts: int) -> float:
        """Wait before restart number `restarts` (0 is the first): doubles up to the cap."""
        return float(min(self.restart_backoff_s * 2.0 ** min(restarts, 30), self.restart_backoff_max_s))
