"""The two commands that make the tables of families, on a few of them."""

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")
ROOT = Path(__file__).parents[2]


def command(*words: str) -> str:
    known = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = subprocess.run([sys.executable, *words], capture_output=True, text=True, cwd=ROOT, env=known, timeout=300)
    assert run.returncode == 0, run.stderr[-2000:]
    return run.stdout


def test_small_families_and_the_page(tmp_path):
    table, page = tmp_path / "families.csv", tmp_path / "families.md"
    said = command("benchmarks/families.py", "--only", "stack,dlrm", "--jobs", "2", "--out", str(table), "--page", str(page))
    rows = list(csv.DictReader(table.open(newline="")))
    assert [(row["family"], row["share"]) for row in rows] == [("stack", "70"), ("stack", "45"), ("dlrm", "70"), ("dlrm", "45")]
    assert "not right: none" in said
    assert "| manner | stack |" in page.read_text()


def test_mid_size_shapes_on_a_cpu(tmp_path):
    """Tiny twins, the same code: references, a budget, the comparison, and a second call that has nothing left to do."""
    words = ["benchmarks/families_on_gpu.py", "--smoke", "--only", "vit-h-14", "--recipes", "bf16", "--budgets", "half"]
    command(*words, "--out", str(tmp_path))
    rows = {row["method"]: row for row in csv.DictReader((tmp_path / "families_smoke.csv").open(newline=""))}
    assert {method: row["result"] for method, row in rows.items()}.keys() == {"plain", "checkpointing", "half"}
    assert rows["plain"]["result"] == rows["checkpointing"]["result"] == "ran"
    before = (tmp_path / "families_smoke.csv").read_text()
    command(*words, "--out", str(tmp_path))
    assert (tmp_path / "families_smoke.csv").read_text() == before
