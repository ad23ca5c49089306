"""``python -m perf [NAME ...] [--json FILE]``: list and run the benchmarks.

Without a name: the list. A name is a benchmark's own ("scheduler.step_time"), a prefix of it ("scheduler"), or "all".
``python -m perf hopper`` is a command of its own, with goals, plots and baselines: see ``python -m perf hopper --help``.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from perf.discovery import load, module_names
from perf.harness import Benchmark, Context, Row, machine, versions


def _number(value: float | None, suffix: str = "") -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}{suffix}" if abs(value) >= 1000 else f"{value:.3g}{suffix}"


def _print_row(row: Row) -> None:
    share = row.share_of_limit
    cells = (
        f"{row.case:<64}",
        f"{_number(row.ours):>10}",
        f"{_number(row.peer):>10}",
        f"{row.unit:<8}",
        f"{_number(row.ratio, 'x'):>8}",
        f"{_number(row.goal, 'x'):>7}",
        f"{_number(row.limit):>9}",
        f"{'-' if share is None else f'{share:.0%}':>6}",
        f" {row.peer_name}{' | ' if row.peer_name and row.note else ''}{row.note}",
    )
    print(" ".join(cells).rstrip(), flush=True)


def _select(wanted: list[str], benchmarks: list[Benchmark]) -> list[Benchmark]:
    chosen: list[Benchmark] = []
    for name in wanted:
        hits = [b for b in benchmarks if name == "all" or b.name == name or b.name.startswith(f"{name}.")]
        if not hits:
            known = ", ".join(b.name for b in benchmarks)
            raise SystemExit(f"python -m perf: no benchmark is named {name!r}; there are: {known}")
        chosen += [b for b in hits if b not in chosen]
    return chosen


def _command(words: list[str]) -> list[str]:
    """What was asked for, without where the result goes: that path means nothing to a reader."""
    if "--json" in words:
        at = words.index("--json")
        return words[:at] + words[at + 2 :]
    return [word for word in words if not word.startswith("--json=")]


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    words = sys.argv[1:] if argv is None else argv
    if words[:1] == ["hopper"]:
        from perf.hopper.command import main as hopper

        return hopper(words[1:])
    parser = argparse.ArgumentParser(prog="python -m perf", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="benchmarks to run; none lists them; 'all' runs every one")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write machine, versions and rows there")
    parser.add_argument("--quick", action="store_true", help="see that it runs; the figures are not to be reported")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="an option of a benchmark")
    arguments = parser.parse_args(words)
    for item in arguments.set:
        if "=" not in item:
            parser.error(f"--set wants KEY=VALUE, got {item!r}")

    benchmarks = [load(name) for name in module_names()]
    if not arguments.names:
        for benchmark in benchmarks:
            print(f"{benchmark.name:<28} {benchmark.summary}")
        return 0

    context = Context(quick=arguments.quick, options=dict(item.split("=", 1) for item in arguments.set))
    report: dict[str, object] = {
        "command": "python -m perf " + " ".join(_command(words)),
        "date": time.strftime("%Y-%m-%d"),
        "quick": arguments.quick,
        "machine": machine(),
        "versions": versions(),
    }
    print(json.dumps({"machine": report["machine"], "versions": report["versions"]}))
    results: dict[str, list[dict[str, object]]] = {}
    for benchmark in _select(arguments.names, benchmarks):
        print(f"\n{benchmark.name}: {benchmark.summary}")
        print(
            f"{'case':<64} {'ours':>10} {'peer':>10} {'unit':<8} {'ratio':>8} {'goal':>7} {'limit':>9} {'share':>6}  peer and notes"
        )
        rows = results.setdefault(benchmark.name, [])
        for row in benchmark.run(context):
            rows.append(row.to_json())
            _print_row(row)
    report["benchmarks"] = results
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
