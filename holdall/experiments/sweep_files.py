"""The table of `holdall compare` as a CSV file and as a chart."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

from holdall.errors import InvalidInput, MissingExtra
from holdall.types._json import write_text
from holdall.units import GiB, MiB

Record = Mapping[str, Any]


def check_drawable(path: Path) -> None:
    """Check that the chart can be written, before the long work."""
    _figure()
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise InvalidInput(f"`{path}` is not the name of a picture", hint="end it in .png, .svg or .pdf")


def write_csv(path: Path, records: Sequence[Record]) -> None:
    page = io.StringIO()
    writer = csv.DictWriter(page, fieldnames=list(records[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows({key: "" if value is None else value for key, value in record.items()} for record in records)
    write_text(path, page.getvalue())


def draw(path: Path, records: Sequence[Record], *, plain: tuple[int, float]) -> None:
    """Step time against peak, one line per planner, one kind of mark per peer: lower and further left is better.

    `plain`: its predicted peak and seconds.
    """
    figure = _figure()(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    largest = max([plain[0], *(r[f"{kind}_peak_bytes"] or 0 for r in records for kind in ("predicted", "measured"))])
    unit, name = (GiB, "GiB") if largest >= GiB else (MiB, "MiB")
    marks = cycle("^sDvP")
    for who, kind in dict.fromkeys((r["planner"], r["kind"]) for r in records):
        mine = [r for r in records if (r["planner"], r["kind"]) == (who, kind)]
        if kind == "peer":
            _plot(axes, mine, "measured", unit, fmt=next(marks), label=f"{who} (peer), measured", alpha=0.7)
            continue
        color = _plot(axes, mine, "predicted", unit, fmt="o-", label=f"{who}, predicted")
        _plot(axes, mine, "measured", unit, fmt="x--", label=f"{who}, measured", color=color)
    axes.plot(plain[0] / unit, plain[1], "k*", markersize=11, label="plain, predicted")
    first = records[0]
    axes.set_title(f"{first['model']}, batch {first['batch']} x {first['seq']}, {first['dtype']}, {first['hardware']}")
    axes.set_xlabel(f"peak ({name})")
    axes.set_ylabel("seconds per step")
    axes.set_ylim(0, axes.get_ylim()[1] * 1.05)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise InvalidInput(
            f"cannot write `{path}`: {error.strerror or error}",
            hint=f"check that the folder exists and is writable: ls -ld {path.parent}",
        ) from error


def _plot(axes: Any, records: Sequence[Record], kind: str, unit: int, *, fmt: str, **look: Any) -> Any:
    """The rows that have a point of this kind; returns the colour, None if there were none."""
    found = [(r[f"{kind}_peak_bytes"], r[f"{kind}_seconds"]) for r in records if r[f"{kind}_peak_bytes"]]
    points = sorted((peak / unit, seconds) for peak, seconds in found)
    if not points:
        return None
    return axes.plot(*zip(*points, strict=True), fmt, **look)[0].get_color()


def _figure() -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        hint = 'pip install "holdall[viz]"'
        raise MissingExtra("`--plot` needs the package `matplotlib`", hint=hint) from error
    return Figure
