"""``python -m perf hopper [FAMILY ...]``: attention and cache kernels on a Hopper GPU against their goals.

Runs every family (or those named), prints a line for each goal of each shape, saves and plots the result, and compares it with a
saved one. ``--from FILE`` takes a saved result instead of running and needs no GPU. Exit status: 0; 1 if a row has no time (wrong,
or it failed) or regressed against the baseline; 2 if the command cannot run here.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from perf.discovery import modules_defining
from perf.harness import machine, versions
from perf.hopper.compare import compare, load
from perf.hopper.plots import plot
from perf.hopper.report import HEADER, as_json, line, summary
from perf.hopper.rows import Family

__all__ = ["families", "main"]


def families() -> dict[str, Family]:
    """Every family of this folder by its name."""
    found = [importlib.import_module(name).FAMILY for name in modules_defining("FAMILY", "hopper")]
    return {family.name: family for family in found}


def _parse(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m perf hopper", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("families", nargs="*", metavar="FAMILY", help="such as gqa_decode; all if none is named")
    parser.add_argument("--list", action="store_true", help="print the families, their shapes and goals, and stop")
    parser.add_argument("--json", metavar="FILE", type=Path, help="save the result")
    parser.add_argument("--plots", metavar="DIR", type=Path, help="write the roofline and the speed-up of each shape there")
    parser.add_argument("--baseline", metavar="FILE", type=Path, nargs="+", default=[], help="saved results to compare with")
    parser.add_argument("--noise", type=float, default=0.05, help="part of a saved time that a difference must pass (default 0.05)")
    parser.add_argument("--from", dest="saved", metavar="FILE", type=Path, nargs="+", help="take saved results instead of running")
    parser.add_argument(
        "--without", metavar="PEER", action="append", default=[], help="a peer that is not measured; may be repeated"
    )
    parser.add_argument("--quick", action="store_true", help="two shapes of each family, to see that it runs")
    arguments = parser.parse_args(words)
    if not 0 <= arguments.noise < 1:
        parser.error(f"--noise must be at least 0 and below 1, got {arguments.noise}")
    return arguments


def _chosen(names: list[str]) -> dict[str, Family]:
    known = families()
    unknown = [name for name in names if name not in known]
    if unknown:
        raise SystemExit(f"python -m perf hopper: no family is named {', '.join(unknown)}; there are: {', '.join(known)}")
    return {name: known[name] for name in names or known}  # in the order in which they were named


def _merged(paths: list[Path], names: list[str] | None = None) -> dict[str, Any]:
    """Saved results as one; a family's rows come from the first file that has it."""
    reports = [load(path) for path in paths]
    rows: dict[str, list[dict[str, Any]]] = {}
    for path, report in zip(paths, reports, strict=True):
        if report["machine"].get("gpu") != reports[0]["machine"].get("gpu"):
            raise SystemExit(f"python -m perf hopper: {path} is of another GPU than {paths[0]}: name results of one")
        for family, found in report["families"].items():
            if not names or family in names:
                rows.setdefault(family, found)
    return {**reports[0], "families": rows}


def _run(arguments: argparse.Namespace) -> dict[str, Any]:
    from perf.hopper.bench import Bench, measure_shape, missing_device, rates

    chosen = _chosen(arguments.families)
    missing = missing_device()
    if missing:
        print(f"python -m perf hopper: {missing}. Fix: run it there; --from FILE shows a saved result.", file=sys.stderr)
        raise SystemExit(2)
    measured = rates()
    report: dict[str, Any] = {
        "command": " ".join(["python -m perf hopper", *arguments.families, *(["--quick"] if arguments.quick else [])]),
        "date": time.strftime("%Y-%m-%d"),
        "quick": arguments.quick,
        "machine": machine(),
        "versions": versions(),
        "rates": asdict(measured),
        "families": {},
    }
    print(json.dumps({key: report[key] for key in ("machine", "versions", "rates")}))
    bench = Bench(measured, 5 if arguments.quick else 20, arguments.quick, frozenset(arguments.without))
    for name, family in chosen.items():
        print(f"\n{name}: {family.summary}\n{HEADER}")
        rows = report["families"].setdefault(name, [])
        for shape in family.shapes[:2] if arguments.quick else family.shapes:
            rows.append(as_json(measure_shape(family, shape, bench), measured))
            print("\n".join(line(rows[-1])), flush=True)
            _save(report, arguments.json)  # what was measured stays when a later shape ends the process
    return report


def _save(report: dict[str, Any], path: Path | None) -> None:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def _list() -> None:
    for name, family in families().items():
        print(f"{name}: {family.summary}")
        for shape in family.shapes:
            work = family.work(shape)
            print(f"  {work.case:<60} {', '.join(map(str, work.goals))}")


def main(words: list[str]) -> int:
    """Run the command; returns the exit status."""
    arguments = _parse(words)
    if arguments.list:
        _list()
        return 0
    baseline = _merged(arguments.baseline) if arguments.baseline else None  # refused before minutes of measuring, not after
    if arguments.saved:
        report = _merged(arguments.saved, arguments.families)
        for name, rows in report["families"].items():
            print(f"\n{name}\n{HEADER}")
            for row in rows:
                print("\n".join(line(row)))
        _save(report, arguments.json)
    else:
        report = _run(arguments)
    print(f"\n{summary(report['families'])}")
    if arguments.plots is not None:
        for path in plot(report, arguments.plots):
            print(f"wrote {path}")
    failed = [(name, row) for name, rows in report["families"].items() for row in rows if not row["ours_us"]]
    for name, row in failed:
        print(f"no time: {name}: {row['case']}: {row['note']}")
    regressed = False
    if baseline is not None:
        changes = compare(report, baseline, arguments.noise)
        for change in changes:
            if change.improved or change.regressed:
                print(f"{'REGRESSED' if change.regressed else 'improved'}: {change}")
        regressed = any(change.regressed for change in changes)
        print(f"compared {len(changes)} rows with the baseline: {sum(change.regressed for change in changes)} regressed")
    return 1 if failed or regressed else 0
