"""Who counts as dead or hung, on a clock that the test owns."""

from __future__ import annotations

from tokenspeed_engine.ipc import Heartbeat, HeartbeatMonitor, Progress


def monitor() -> HeartbeatMonitor:
    return HeartbeatMonitor(interval_s=0.5, timeout_s=5.0, hang_timeout_s=20.0, now_s=100.0)


def run_until(watch: HeartbeatMonitor, start_s: float, end_s: float) -> str:
    """Check at the proper pace; the first objection or an empty text."""
    now_s = start_s
    while now_s < end_s:
        now_s += 0.5
        if verdict := watch.verdict(now_s):
            return verdict
    return ""


def test_silence_is_death() -> None:
    watch = monitor()
    assert run_until(watch, 100.0, 104.9) == ""
    assert "no heartbeat" in run_until(watch, 105.0, 107.0)


def test_a_heartbeat_starts_the_silence_anew() -> None:
    watch = monitor()
    assert run_until(watch, 100.0, 104.0) == ""
    watch.observe(Heartbeat("idle", 0, 0.0), 104.0)
    assert run_until(watch, 104.0, 108.5) == ""


def test_no_progress_with_work_is_a_hang() -> None:
    watch = monitor()
    watch.observe(Heartbeat("busy", 3, 19.0), 100.0)
    assert watch.verdict(100.5) == ""
    watch.observe(Heartbeat("busy", 3, 20.5), 101.0)
    assert "hangs" in watch.verdict(101.5)
    assert "--hang-timeout" in watch.verdict(102.0)


def test_a_front_end_that_stood_still_blames_nobody() -> None:
    watch = monitor()
    assert watch.verdict(100.5) == ""
    assert watch.verdict(500.0) == ""
    assert run_until(watch, 500.0, 504.5) == ""
    assert "no heartbeat" in run_until(watch, 504.5, 507.0)


def _progress(heartbeat: Heartbeat) -> tuple[str, int, float]:
    return heartbeat.phase, heartbeat.num_steps, heartbeat.stalled_s


def test_progress_measures_only_while_busy() -> None:
    now_s = [0.0]
    progress = Progress(clock=lambda: now_s[0])
    now_s[0] = 1000.0
    first = progress.snapshot()
    assert _progress(first) == ("loading", 0, 0.0)
    assert 2**20 < first.resident_bytes <= first.peak_resident_bytes
    progress.set_phase("idle")
    now_s[0] = 2000.0
    assert progress.snapshot().stalled_s == 0.0
    progress.set_phase("busy")
    now_s[0] = 2003.0
    assert _progress(progress.snapshot()) == ("busy", 0, 3.0)
    progress.set_phase("busy")
    assert progress.snapshot().stalled_s == 3.0
    progress.step_done()
    now_s[0] = 2004.0
    assert _progress(progress.snapshot()) == ("busy", 1, 1.0)
