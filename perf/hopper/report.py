"""Results as plain data (what is saved, plotted and compared) and as lines of text."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from perf.hopper.rows import LIMIT, Rates, Result

__all__ = ["HEADER", "as_json", "line", "summary"]

HEADER = (
    f"{'case':<58} {'us':>9} {'TFLOP/s':>8} {'TB/s':>6} {'limit':>6} {'ratio':>7} {'goal':>6} {'met':<6} "
    f"{'1-cosine':>9} {'max err':>8}  over, and notes"
)
_MET = {True: "met", False: "MISSED", None: "-"}


def as_json(result: Result, rates: Rates) -> dict[str, Any]:
    """The row: its figures, its goals and what became of them.

    `goal`, `ratio` and `over` are the first goal's, and `met` is true only if all goals are; `goals` has each of them. A goal whose
    peers are absent is neither met nor missed: its `met` is null.
    """
    work, ours_us = result.work, result.ours_us
    limit_us = work.limit_us(rates)
    goals = [
        {"goal": goal.ratio, "over": list(goal.over), "ratio": result.ratio(goal, rates), "met": result.met(goal, rates)}
        for goal in work.goals
    ]
    met = [goal["met"] for goal in goals]
    first = goals[0] if goals else {"goal": None, "over": [], "ratio": None}
    return {
        "case": work.case,
        "goal": first["goal"],
        "over": first["over"],
        "ratio": first["ratio"],
        "met": False if False in met else None if None in met or not met else True,
        "goals": goals,
        "ours_us": ours_us,
        "spread_us": result.spread_us,
        "solution": result.solution,
        "limit_us": limit_us,
        "share_of_limit": limit_us / ours_us if ours_us else None,
        "tflops_per_s": work.flops / ours_us / 1e6 if ours_us else None,
        "tbytes_per_s": work.size_bytes / ours_us / 1e6 if ours_us else None,
        "size_bytes": work.size_bytes,
        "flops": work.flops,
        "dtype": work.dtype,
        "peers_us": dict(result.peers_us),
        "absent": dict(result.absent),
        "error": None if result.error is None else asdict(result.error),
        "note": result.note,
    }


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def line(row: dict[str, Any]) -> Iterable[str]:
    """The row as text: one line for each goal, or one if it has none; then one for each peer."""
    error = row["error"] or {}
    wrong = None if not error else 1 - error["cosine"]
    figures = (
        f"{row['case']:<58} {_number(row['ours_us'], '.2f'):>9} {_number(row['tflops_per_s'] or None, '.0f'):>8} "
        f"{_number(row['tbytes_per_s'], '.2f'):>6} {_number(row['share_of_limit'], '.0%'):>6}"
    )
    errors = f"{_number(wrong, '.1e'):>9} {_number(error.get('max_abs'), '.1e'):>8}"
    goals = row["goals"] or [{"goal": None, "over": [], "ratio": None, "met": None}]
    for index, goal in enumerate(goals):
        over = "limit" if goal["over"] == [LIMIT] else " or ".join(goal["over"])
        met = f"{_number(goal['ratio'], '.2f'):>7} {_number(goal['goal'], 'g'):>6} {_MET[goal['met']]:<6}"
        tail = over + (f"{' | ' if over else ''}{row['note']}" if index == 0 and row["note"] else "")
        first = index == 0
        yield f"{figures if first else '':<{len(figures)}} {met} {errors if first else '':<{len(errors)}}  {tail}".rstrip()
    for name, time_us in row["peers_us"].items():
        yield f"    {name}: {time_us:.2f} us"
    for name, why in row["absent"].items():
        yield f"    {name}: not measured: {why}"


def summary(families: dict[str, list[dict[str, Any]]]) -> str:
    """How many goals are met, missed and open, and the rows that missed one."""
    goals = [(name, row, goal) for name, rows in families.items() for row in rows for goal in row["goals"]]
    counts = {met: sum(goal["met"] is met for _, _, goal in goals) for met in (True, False, None)}
    lines = [f"goals: {counts[True]} met, {counts[False]} missed, {counts[None]} open (a peer is absent)"]
    for name, row, goal in goals:
        if goal["met"] is False:
            over = "of the limit" if goal["over"] == [LIMIT] else f"times {' or '.join(goal['over'])}"
            lines.append(f"  missed: {name}: {row['case']}: {_number(goal['ratio'], '.2f')} {over}, goal {goal['goal']:g}")
    return "\n".join(lines)
