"""Plots of a saved result: the roofline, and the speed-up of every shape over each peer, beside what was promised."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from perf.hopper.rows import LIMIT

__all__ = ["plot"]


def _pyplot() -> Any:
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise SystemExit(
            f"python -m perf hopper: plots need matplotlib ({error}). Fix: pip install matplotlib, here or on any machine that "
            "has the saved result: python -m perf hopper --from FILE --plots DIR needs no GPU."
        ) from error
    mpl.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def plot(report: dict[str, Any], folder: Path) -> list[Path]:
    """Write roofline.png, and speedup_FAMILY.png of each family.

    Raises:
        SystemExit: matplotlib is not installed.
    """
    plt = _pyplot()
    folder.mkdir(parents=True, exist_ok=True)
    written = [_roofline(plt, report, folder / "roofline.png")]
    for family, rows in report["families"].items():
        if any(row["ours_us"] for row in rows):
            written.append(_speedup(plt, report, family, rows, folder / f"speedup_{family}.png"))
    return written


def _title(report: dict[str, Any]) -> str:
    versions = report["versions"]
    return f"{report['machine']['gpu']}, torch {versions.get('torch', '?')}, Triton {versions.get('triton', '?')}, {report['date']}"


def _roofline(plt: Any, report: dict[str, Any], path: Path) -> Path:
    """Operations a second against operations for each byte that must be moved, below the rates of the same run."""
    rates = report["rates"]
    figure, axes = plt.subplots(figsize=(9, 6))
    intensities = [0.25 * 2**step for step in range(29)]
    for name, style in (("bf16", "-"), ("fp8", "--")):
        peak = rates[f"{name}_flops_per_s"]
        roof = [min(peak, rates["read_bytes_per_s"] * x) / 1e12 for x in intensities]
        axes.plot(intensities, roof, style, color="black", linewidth=1, label=f"measured limit, {name}: {peak / 1e12:.0f} TFLOP/s")
    for family, rows in report["families"].items():
        points = [(row["flops"] / row["size_bytes"], row["tflops_per_s"]) for row in rows if row["ours_us"] and row["flops"]]
        if points:
            axes.scatter(*zip(*points, strict=True), s=22, label=family)
    axes.set(xscale="log", yscale="log", xlabel="FLOP for each byte that must pass through memory", ylabel="TFLOP/s")
    axes.set_title(_title(report))
    axes.grid(True, which="major", linewidth=0.3)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=120, bbox_inches="tight")
    plt.close(figure)
    return path


def _speedup(plt: Any, report: dict[str, Any], family: str, rows: list[dict[str, Any]], path: Path) -> Path:
    """A group of bars for each shape: how many times as fast as each peer; a mark where the goal over that peer lies."""
    rows = [row for row in rows if row["ours_us"]]
    peers = sorted({name for row in rows for name in row["peers_us"]})
    height = 0.8 / max(1, len(peers))
    figure, axes = plt.subplots(figsize=(9, 1.2 + 0.28 * max(1, len(peers)) * len(rows)))
    for index, peer in enumerate(peers):
        places = [place + index * height for place, row in enumerate(rows) if peer in row["peers_us"]]
        values = [row["peers_us"][peer] / row["ours_us"] for row in rows if peer in row["peers_us"]]
        bars = axes.barh(places, values, height, label=peer)
        axes.bar_label(bars, fmt="%.2f", fontsize=7, padding=2)
    drawn = False
    for place, row in enumerate(rows):
        for goal in row["goals"]:
            lines = [index for index, peer in enumerate(peers) if peer in goal["over"] and peer in row["peers_us"]]
            if goal["over"] != [LIMIT] and lines:
                low, high = place + (min(lines) - 0.5) * height, place + (max(lines) + 0.5) * height
                axes.vlines(goal["goal"], low, high, colors="red", linewidth=1.5, label=None if drawn else "goal")
                drawn = True
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set(xlabel="times as fast", title=f"{family}: {_title(report)}")
    labels = [f"{row['case']} ({row['share_of_limit']:.0%} of the limit)" for row in rows]
    axes.set_yticks([place + 0.4 - height / 2 for place in range(len(rows))], labels, fontsize=7)
    axes.invert_yaxis()
    if peers:
        axes.legend(fontsize=8)
    figure.savefig(path, dpi=120, bbox_inches="tight")
    plt.close(figure)
    return path
