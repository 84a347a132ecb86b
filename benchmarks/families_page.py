"""The page of the docs about families, from the CSVs of `families.py` and `families_on_gpu.py`."""

from __future__ import annotations

import csv
import textwrap
from pathlib import Path

from holdall.testing.families import FAMILIES

HEAD = """# Families

What `fit` does with models of many kinds, with default options. This page is written by `python benchmarks/families.py`
from the CSVs that the two commands below leave behind; nothing on it is typed by hand.
"""


def write_page(page: Path, small: Path, mid_size: Path) -> None:
    """`mid_size`: the rows with seconds; those that ran side by side lie beside it."""
    parts = [HEAD]
    untimed = mid_size.with_name("families_untimed.csv")
    if small.exists():
        parts.append(small_part(read(small)))
    if mid_size.exists():
        parts.append(mid_size_part(read(mid_size)))
    if untimed.exists():
        parts.append(untimed_part(read(untimed)))
    page.write_text("\n".join(parts), encoding="utf-8")


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def small_part(rows: list[dict[str, str]]) -> str:
    shares = list(dict.fromkeys(row["share"] for row in rows))
    order = {name: n for n, name in enumerate(FAMILIES)}
    rows = sorted(rows, key=lambda row: order.get(row["family"], len(order)))
    by_name: dict[str, dict[str, dict[str, str]]] = {}
    for row in rows:
        by_name.setdefault(row["family"], {})[row["share"]] = row
    counts = {r: sum(row["result"] == r for row in rows) for r in ("equal", "refused", "different", "over", "failed")}
    about = rows[0]
    lines = [
        "## Small models on a CPU",
        "",
        *wrapped(
            f"`python benchmarks/families.py`: {len(by_name)} families x {' and '.join(shares)} % of the peak that is",
            "predicted for plain training; three steps with clipped gradients. *equal*: losses, gradient norms, parameters,",
            "buffers and the random state are those of plain training, bit for bit, and the measured peak is",
            "within the budget. *refused*: no",
            "plan fits; no plan that recomputes block by block (`chen`, `rotor`, `zero_offload`) fits either, unless the table",
            f"names one. {', '.join(f'{n} {r}' for r, n in counts.items() if n)} of {len(rows)} cells. torch {about['torch']},",
            f"transformers {about['transformers']}, {commits_of(rows)}. `fit` is called with default options and",
            "traces the step itself.",
        ),
        "",
        f"| kind | family | plain's peak, KiB | {' | '.join(f'{s} %' for s in shares)} |",
        f"|---|---|---|{'---|' * len(shares)}",
    ]
    for name, cells in by_name.items():
        first = next(iter(cells.values()))
        said = " | ".join(short(cells[s]) if s in cells else "" for s in shares)
        lines.append(f"| {first['kind']} | {name} | {int(first['plain_peak']) / 1024:,.0f} | {said} |")
    refused = [row for row in rows if row["result"] != "equal"]
    if refused:
        lines += ["", "What was said where a cell is not *equal*:", "", "| family | share | what was said |", "|---|---|---|"]
        lines += [f"| {row['family']} | {row['share']} % | {plain_text(row['message'])} |" for row in refused]
    return "\n".join(lines) + "\n"


def commits_of(rows: list[dict[str, str]]) -> str:
    found = list(dict.fromkeys(row["commit"] for row in rows))
    return f"{'commit' if len(found) == 1 else 'commits'} {', '.join(found)}"


def wrapped(*sentences: str) -> list[str]:
    return textwrap.wrap(" ".join(sentences), 140)


def short(row: dict[str, str]) -> str:
    if row["result"] == "equal":
        return f"equal ({int(row['measured']) / int(row['plain_peak']):.0%} used)"
    if row["result"] == "refused" and row["smallest"]:
        met = f", though {row['met_by']} fits" if row["met_by"] else ""
        return f"refused (needs {int(row['smallest']) / int(row['plain_peak']):.0%}{met})"
    return row["result"]


def plain_text(said: str) -> str:
    return said.replace("|", "/").replace("<", "&lt;")[:300]


def mid_size_part(rows: list[dict[str, str]]) -> str:
    about = rows[0]
    ours = [row for row in rows if row["method"] in ("half", "checkpointed", "tight")]
    lines = [
        "## Mid-size shapes on a GPU",
        "",
        *wrapped(
            f"`python benchmarks/families_on_gpu.py` on one {about['hardware']}, torch {about['torch']}, transformers",
            f"{about['transformers']}, {commits_of(rows)}.",
            '*bf16*: the model on the CPU and `precision="bf16"`, against bf16 working copies with fp32 masters; *autocast*:',
            "the fp32 model on the GPU, `torch.autocast` around the forward. One batch, 12 steps, gradients clipped. Losses",
            "may differ from plain's by 5 % of the loss plus 1 % of the first loss; the column says which share of that",
            "they took. Peaks are the driver's.",
            "*of checkpointing*: speed over gradient checkpointing, which needs the GiB in brackets.",
        ),
        "",
        "| shape | recipe | budget, GiB | result | predicted / seen GiB | predicted / median step, s | longest | of plain "
        "| of checkpointing | losses | fit, first step, s |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in ours:
        why = row["result"] if row["result"] == "ran" else f"{row['result']}: {plain_text(row['message'])}"
        lines.append(
            f"| {row['shape']} | {row['recipe']} | {number(row['budget_gib'], 1)} | {why} "
            f"| {number(row['predicted_gib'], 1)} / {number(row['peak_gib'], 1)} "
            f"| {number(row['predicted_s'], 3)} / {number(row['step_s'], 3)} | {number(row['longest_after_third'], 1)} "
            f"| {number(row['of_plain'], 2)} | {number(row['of_checkpointing'], 2)} ({number(row['checkpointing_gib'], 1)}) "
            f"| {number(row['losses_differ_by'], 2)} | {number(row['fit_s'], 1)}, {number(row['first_step_s'], 1)} |"
        )
    return "\n".join(lines) + "\n"


def untimed_part(rows: list[dict[str, str]]) -> str:
    """Which shapes train right, in two budgets and two recipes each."""
    cells = {(row["shape"], row["recipe"], row["method"]): row for row in rows}
    ours = [row for key, row in cells.items() if key[2] in ("half", "tight")]
    counts = {r: sum(row["result"] == r for row in ours) for r in dict.fromkeys(row["result"] for row in ours)}
    shapes = sorted({(row["shape"], row["recipe"]) for row in ours})
    lines = [
        "## The same, side by side",
        "",
        *wrapped(
            "`python benchmarks/families_on_gpu.py --untimed 8`: several rows at a time on one GPU, so only losses and",
            "peaks count (the allocator's, and what `holdall` counts outside). *half*, *tight*: half and a quarter of plain's",
            f"peak; {sum(bool(row['refused_gib']) for row in ours)} of them were refused, and ran a hair above what the",
            f"refusal named. {len({shape for shape, _ in shapes})} shapes, {len(ours)} cells:",
            f"{', '.join(f'{n} {r}' for r, n in counts.items())}; {commits_of(ours)}. Each cell: seen of budget in GiB, and",
            "the largest difference of a loss as a share of the tolerance. The norm of the first gradient is within",
            f"{first_norms(ours)} of plain's where the losses are.",
        ),
        "",
        "| shape | recipe | plain, GiB | half | tight |",
        "|---|---|---|---|---|",
    ]
    for shape, recipe in shapes:
        plain = cells.get((shape, recipe, "plain"), {})
        said = [untimed_cell(cells.get((shape, recipe, budget))) for budget in ("half", "tight")]
        lines.append(f"| {shape} | {recipe} | {number(plain.get('peak_gib', ''), 1)} | {' | '.join(said)} |")
    return "\n".join(lines) + "\n"


def first_norms(rows: list[dict[str, str]]) -> str:
    off = [abs(float(row["first_norm_off"])) for row in rows if row["result"] == "ran" and row.get("first_norm_off")]
    return f"{max(off, default=0.0):.2%}"


def untimed_cell(row: dict[str, str] | None) -> str:
    if row is None:
        return "not run"
    if not row["losses"]:
        return f"{row['result']}: {plain_text(row['message'])}"
    seen = f"{number(row['peak_gib'], 1)} of {number(row['budget_gib'], 1)}, {number(row['losses_differ_by'], 2)}"
    return seen if row["result"] == "ran" else f"**{row['result']}**: {seen}"


def number(text: str, digits: int) -> str:
    return f"{float(text):.{digits}f}" if text else "--"
