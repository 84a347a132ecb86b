"""The figure and the tables of a budget curve, from the CSV of `gpu_budget_curve.py` or `auto_on_gpu.py`.

python benchmarks/plot_budget_curve.py curve.csv [--figure curve.svg] [--planner auto] [--shape 3b]

The figure's ending chooses its format. The tables go to standard output as Markdown. Runs of which every step was clipped, and
those of which none was, are lines of their own: an update that need not be clipped can begin before backward has ended. Rows of
other planners are drawn as other methods are; variants of the planner (`auto, units passing`) are left out.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

GIB = 2**30
LEVELS = {"plain": "-", "bf16_master": ":"}  # drawn as horizontal lines, in this style
OURS = {  # lines, and their colours
    "ours": "#c2410c",
    "ours, no step clipped": "#c2410c",
    "ours, some steps clipped": "#ea580c",
    "ours, every step clipped": "#9f1239",
}
NAMES = {
    "ours": "holdall",
    "plain": "plain PyTorch",
    "bf16_master": "bf16 with fp32 master",
    "plain_chunked": "plain, chunked loss",
    "checkpointing": "gradient checkpointing",
    "bf16_master_checkpointing": "bf16 with fp32 master, checkpointing",
    "zero2": "DeepSpeed ZeRO-2 offload",
    "zero3": "DeepSpeed ZeRO-3 offload",
    "zero3_super": "DeepSpeed SuperOffload",
    "fsdp2": "FSDP2 CPU offload",
    "torchao": "torchao CPU offload, bf16 states",
    "torchao_fp32": "torchao CPU offload, fp32 states",
    "chen": "holdall's chen",
    "protrain": "holdall's protrain",
    "zero_offload": "holdall's zero_offload",
}
PEERS = ["#1d4ed8", "#047857", "#7c3aed", "#0e7490", "#a16207", "#be185d", "#4b5563", "#65a30d", "#0369a1"]
MARKERS = "s^DvPX*<>"


@dataclass(frozen=True, kw_only=True)
class Point:
    """A row that ran. Memory in GiB; None: not measured (on a CPU)."""

    method: str
    budget: float  # inf: no cap
    speed: float  # tokens/s
    row: dict[str, str]

    def get(self, key: str) -> float | None:
        return float(self.row[key]) if self.row.get(key) else None

    def gib(self, key: str) -> float | None:
        found = self.get(key)
        return None if found is None else found / GIB

    @property
    def needs(self) -> float:
        """The smallest budget that this run is known to fit."""
        reserved = self.gib("peak_reserved_run")
        return self.budget if reserved is None else min(self.budget, reserved)

    @property
    def promised(self) -> float | None:
        """The predicted speed."""
        seconds = self.get("predicted_step_s")
        return int(self.row["batch"]) * int(self.row["seq"]) / seconds if seconds else None


def read(path: Path, planner: str, shape: str) -> tuple[dict[str, list[Point]], list[dict[str, str]]]:
    """What ran, by method and from small to large, and all rows; a later row replaces an earlier one of the same name."""
    with path.open(newline="") as file:
        rows = [r for r in csv.DictReader(file) if r["shape"] == shape and not r["planner"].startswith(f"{planner}, ")]
    for row in rows:
        is_rung = row["method"] == "ours" and row["planner"] != planner
        row["method"] = (row["planner"] if is_rung else row["method"]) + clipped(row)
    latest = {(row["method"], row["budget_gib"]): row for row in rows}
    points: dict[str, list[Point]] = {}
    for (method, budget), row in latest.items():
        if row["fits"] == "True":
            gib = float("inf") if budget == "none" else float(budget)
            points.setdefault(method, []).append(Point(method=method, budget=gib, speed=float(row["tokens_per_s"]), row=row))
    for found in points.values():
        found.sort(key=lambda p: p.needs if p.method not in OURS else p.budget)
    return points, list(latest.values())


def clipped(row: dict[str, str]) -> str:
    """What a name is to say about clipping."""
    if not row.get("steps_clipped"):
        return ""
    whole = int(row["steps"]) + int(row["warmup"])
    return {0: ", no step clipped", whole: ", every step clipped"}.get(int(row["steps_clipped"]), ", some steps clipped")


def title(method: str) -> str:
    base, _, parts = method.partition("@")
    name, comma, way = base.partition(",")
    return NAMES.get(name, name) + comma + way + (f", {parts} micro-batches" if parts else "")


def uncapped(points: dict[str, list[Point]], method: str) -> Point | None:
    return next((p for p in points.get(method, []) if p.budget == float("inf")), None)


def speed_at(found: Iterable[Point], budget: float) -> float | None:
    """The fastest run that fits `budget`."""
    return max((p.speed for p in found if p.needs <= budget), default=None)


# -- the figure --------------------------------------------------------------------------------------------------------


def draw(points: dict[str, list[Point]], rows: list[dict[str, str]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "holdall"  # the same rows give the same file
    import matplotlib.pyplot as plt

    budgets = sorted({float(r["budget_gib"]) for r in rows if r["budget_gib"] != "none"})
    left, right = budgets[0] * 0.85, budgets[-1] * 1.2
    figure, axes = plt.subplots(figsize=(9, 5.2), layout="constrained")
    for method, style in LEVELS.items():
        if level := uncapped(points, method):
            peak = level.gib("peak_reserved_run")
            text = f"{title(method)}, no cap" + (f" ({peak:.0f} GiB)" if peak else "")
            axes.axhline(level.speed, color="#374151", linestyle=style, linewidth=1.1, label=text)
    peers = [m for m in points if m not in OURS and m not in LEVELS]
    for method, color, marker in zip(peers, PEERS * 2, MARKERS * 2, strict=False):
        draw_rungs(axes, points[method], color, marker, right)
    for method, color in OURS.items():
        ours = [p for p in points.get(method, []) if p.budget <= right]
        x = [p.budget for p in ours]
        if len(x) > 1:
            axes.plot(x, [p.speed for p in ours], color=color, marker="o", linewidth=2.2, label=title(method), zorder=5)
        elif x:
            axes.plot(x, [p.speed for p in ours], color=color, marker="*", markersize=11, linestyle="none", label=title(method))
        said = [p.promised for p in ours]
        if len(x) > 1 and all(said):
            axes.plot(x, said, color=color, linestyle="--", linewidth=1.3, label=f"{title(method)}: predicted", zorder=4)
    axes.set_xscale("log", base=2)
    axes.set_xlim(left, right)
    axes.set_ylim(bottom=0)
    ticks = sorted({p.budget for method in OURS for p in points.get(method, []) if p.budget <= right}) or budgets
    axes.set_xticks(ticks, [f"{b:g}" for b in ticks])
    axes.minorticks_off()
    axes.set_xlabel("GPU memory budget, GiB")
    axes.set_ylabel("tokens per second")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.grid(axis="y", color="#e5e7eb", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(caption(rows), fontsize=10, loc="left")
    axes.legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.savefig(path, dpi=160, metadata={"Date": None} if path.suffix == ".svg" else None)


def draw_rungs(axes: Any, found: list[Point], color: str, marker: str, right: float) -> None:
    """A marker where the method begins to fit; a line to where its next run begins, since more memory does not change it."""
    ends = [*(p.needs for p in found[1:]), right]
    for number, (point, end) in enumerate(zip(found, ends, strict=True)):
        if point.needs > right:
            continue
        axes.hlines(point.speed, point.needs, min(end, right), color=color, linewidth=1.0, alpha=0.45)
        name = title(point.method) if number == 0 else None
        axes.plot(point.needs, point.speed, color=color, marker=marker, linestyle="none", markersize=7, label=name)


def caption(rows: list[dict[str, str]]) -> str:
    first = next((r for r in rows if r["gpu"]), rows[0])
    return f"Llama {first['shape'].upper()} shape, {first['batch']} x {first['seq']} tokens a step, AdamW, {first['gpu']}"


# -- the tables --------------------------------------------------------------------------------------------------------


def budget_table(points: dict[str, list[Point]], rows: list[dict[str, str]]) -> list[str]:
    """Tokens per second: a line for each budget and way of ours, a column for each method; -- where it does not fit."""
    budgets = sorted({float(r["budget_gib"].replace("none", "inf")) for r in rows}, reverse=True)
    peers = [m for m in points if m not in OURS]
    plain = uncapped(points, "plain")
    heads = ["budget, GiB", "", "holdall", "of plain", "predicted", "peak (predicted), GiB", *map(title, peers)]
    lines = [row_text(heads), row_text(["---:"] * len(heads))]
    for budget in budgets:
        size = "none" if budget == float("inf") else f"{budget:g}"
        beside = [number(speed_at(points[m], budget)) for m in peers]
        mine = [p for m in OURS for p in points.get(m, []) if p.budget == budget]
        for ours in mine or [None]:
            way = "" if ours is None else title(ours.method).removeprefix("holdall").lstrip(", ")
            lines.append(row_text([size, way, *ours_cells(ours, plain and plain.speed), *beside]))
    return lines


def ours_cells(ours: Point | None, plain: float | None) -> list[str]:
    if ours is None:
        return ["--"] * 4
    peak = f"{number(ours.gib('harness_peak') or ours.gib('peak_allocated'), 2)} ({number(ours.gib('predicted_peak'), 2)})"
    share = f"{ours.speed / plain:.0%}" if plain else "--"
    return [number(ours.speed), share, number(ours.promised), peak]


def method_table(points: dict[str, list[Point]]) -> list[str]:
    """A line for each run: what it took."""
    heads = [
        "method",
        "cap, GiB",
        "tokens/s",
        "s/step",
        "allocated / reserved / device, GiB",
        "host, GiB",
        "precision",
        "clips",
    ]
    lines = [row_text(heads), row_text(["---", *["---:"] * 5, "---", "---"])]
    for method, found in points.items():
        for p in reversed(found):
            memory = " / ".join(number(p.gib(k), 1) for k in ("peak_allocated", "peak_reserved_run", "device_used"))
            cap = "none" if p.budget == float("inf") else f"{p.budget:g}"
            measured = [number(p.speed), number(p.get("step_s"), 3), memory, number(p.gib("host_rss"), 1)]
            lines.append(row_text([title(method), cap, *measured, p.row["precision"], p.row["clip"]]))
    return lines


def refusals(rows: list[dict[str, str]]) -> list[str]:
    """What did not fit or did not run, and why."""
    failed = [r for r in rows if r["fits"] != "True"]
    return [f"- {title(r['method'])}, {r['budget_gib']} GiB: {r['status']}: {r['why'].splitlines()[0][:160]}" for r in failed]


def number(value: float | None, digits: int = 0) -> str:
    return "--" if value is None else f"{value:,.{digits}f}"


def row_text(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("csv", type=Path)
    parser.add_argument("--figure", type=Path, default=None, help="by default the CSV's name with .svg")
    parser.add_argument("--planner", default="auto", help="which rows of holdall to show")
    parser.add_argument("--shape", default="3b", help="which model")
    options = parser.parse_args()
    points, rows = read(options.csv, options.planner, options.shape)
    if not rows:
        raise SystemExit(f"no rows in `{options.csv}` for planner `{options.planner}`")
    draw(points, rows, options.figure or options.csv.with_suffix(".svg"))
    first = next((r for r in rows if r["gpu"]), rows[0])
    print(f"{caption(rows)}; torch {first['torch']}, Python {first['python']}, commit {first['commit'] or 'unknown'}.\n")
    note = "Tokens per second. What a peer does in one run holds for every budget that the run stayed within."
    print("\n".join([*budget_table(points, rows), "", note, "", *method_table(points), "", *refusals(rows)]))


if __name__ == "__main__":
    main()
