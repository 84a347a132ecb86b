"""Small families through `fit` on the CPU: 70 and 45 % of plain's predicted peak, against plain training, bit by bit.

python benchmarks/families.py [--only llama,unet] [--shares 70,45] [--jobs 2] [--out FILE.csv] [--page docs/families.md]

Prints a line per cell, writes the CSV (with `--only`, rows of other families stay as they are), and writes the page of the
docs from that CSV and from `families_on_gpu.csv` beside it, if there. `--page-only`: from the files as they are.
"""

from __future__ import annotations

import argparse
import csv
import subprocess
import warnings
from dataclasses import asdict, fields
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import torch
from families_page import read, write_page

from holdall.api import environment
from holdall.problem import resolve_hardware
from holdall.testing.conformance import Cell, compare, plain
from holdall.testing.families import FAMILIES


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="names of families, separated by commas")
    parser.add_argument("--shares", default="70,45")
    parser.add_argument("--jobs", type=int, default=1, help="processes; a family stays in one")
    parser.add_argument("--out", default="benchmarks/results/families.csv")
    parser.add_argument("--page", default="docs/families.md")
    parser.add_argument("--page-only", action="store_true")
    options = parser.parse_args()
    path = Path(options.out)
    if not options.page_only:
        names = options.only.split(",") if options.only else list(FAMILIES)
        unknown = [name for name in names if name not in FAMILIES]
        if unknown:
            raise SystemExit(f"unknown family `{unknown[0]}`\nhint: known: {', '.join(FAMILIES)}")
        run(path, names, [int(s) for s in options.shares.split(",")], options.jobs)
    write_page(Path(options.page), path, path.with_name("families_on_gpu.csv"))


def cells_of(name: str, shares: list[int]) -> list[Cell]:
    cells = [compare(name, share) for share in shares]
    plain.cache_clear()
    return cells


def run(path: Path, names: list[str], shares: list[int], jobs: int) -> None:
    import transformers

    transformers.logging.set_verbosity_error()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    resolve_hardware(None, "cpu")  # measured once, before there are others to disturb it
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    about = {**environment(), "transformers": transformers.__version__, "commit": commit}
    path.parent.mkdir(parents=True, exist_ok=True)
    cells: list[Cell] = []
    others = [row for row in read(path) if row["family"] not in names] if path.exists() else []
    with path.open("w", newline="") as file, get_context("fork").Pool(jobs) as pool:
        writer = csv.DictWriter(file, [*[f.name for f in fields(Cell)], "right", *about])
        writer.writeheader()
        writer.writerows(others)
        for found in pool.imap(partial(cells_of, shares=shares), names):
            cells += found
            for cell in found:
                writer.writerow({**asdict(cell), "seconds": round(cell.seconds, 2), "right": cell.is_right, **about})
                print(line_of(cell), flush=True)
            file.flush()
    counts = {r: sum(c.result == r for c in cells) for r in ("equal", "refused", "different", "over", "failed")}
    print(f"{len(cells)} cells: {', '.join(f'{n} {r}' for r, n in counts.items() if n)}")
    wrong = [c for c in cells if not c.is_right]
    print(f"not right: {', '.join(f'{c.family} {c.share} %' for c in wrong) or 'none'}")


def line_of(cell: Cell) -> str:
    said, seen = cell.predicted or 0, cell.measured or 0
    peaks = f"plain {cell.plain_peak:>10,}  budget {cell.budget:>10,}  said {said:>10,}  seen {seen:>10,}"
    more = cell.message if cell.result != "equal" else cell.actions
    met = f" (met by {cell.met_by})" if cell.met_by else ""
    return f"{cell.family:>24} {cell.share} %  {cell.result:>9}{met}  {peaks}  {cell.seconds:5.1f} s  {more[:200]}"


if __name__ == "__main__":
    main()
