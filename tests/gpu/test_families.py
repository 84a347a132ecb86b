"""The README's second snippet as printed, and three families through the command that makes the table of families."""

import csv
import gc
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import holdall

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def snippet() -> str:
    """The block of the README that shows `precision="bf16"`."""
    blocks = re.findall(r"```py(?:thon)?[^\n]*\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    found = [block for block in blocks if 'precision="bf16"' in block and "for batch in loader" in block]
    assert len(found) == 1, "the README shows one loop with bf16 working copies"
    return found[0]


@pytest.mark.parametrize("name", ["llama-3.2-3b", "llama-3.1-8b"])
def test_the_snippet_of_the_readme_as_printed(name, monkeypatch):
    """One batch over and over: the loss falls in every step but the first few, and the GPU stays under 24 GiB."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from families_shapes import SHAPES

    torch.manual_seed(0)
    with torch.device("cuda"):
        model = SHAPES[name].build(False).train()
        batch = SHAPES[name].batch(False, model.config)
    model.cpu()
    gc.collect()
    torch.cuda.empty_cache()
    losses = []
    watched = model.register_forward_hook(lambda _, args, out: losses.append(out.loss.detach()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    names = {"holdall": holdall, "torch": torch, "model": model, "optimizer": optimizer, "batch": batch, "loader": [batch] * 5}
    torch.cuda.reset_peak_memory_stats()
    try:
        exec(compile(snippet(), "README.md", "exec"), names)
        torch.cuda.synchronize()
        assert torch.cuda.max_memory_reserved() <= 24 * 2**30
        learnt = [float(loss) for loss in losses[-5:]]
        assert learnt[-1] < 0.7 * learnt[0], learnt
        assert names["harness"].report().fits
    finally:
        watched.remove()
        if "harness" in names:
            names["harness"].close()
        names.clear()
        del model, optimizer, batch
        gc.collect()
        torch.cuda.empty_cache()


FAMILIES = ("qwen2-1.5b", "vit-h-14", "t5-large")


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """The rows of the families above, by the command itself."""
    out = tmp_path_factory.mktemp("families")
    command = [sys.executable, str(BENCHMARKS / "families_on_gpu.py"), "--only", ",".join(FAMILIES), "--budgets", "half"]
    run = subprocess.run([*command, "--out", str(out), "--minutes", "3"], capture_output=True, text=True, cwd=ROOT)
    assert run.returncode == 0, run.stderr[-2000:]
    with (out / "families_on_gpu.csv").open(newline="") as file:
        return {(row["shape"], row["recipe"], row["method"]): row for row in csv.DictReader(file)}


@pytest.mark.parametrize("recipe", ["bf16", "autocast"])
@pytest.mark.parametrize("name", FAMILIES)
def test_half_of_plains_memory_learns_what_plain_learns(table, name, recipe):
    row = table[name, recipe, "half"]
    assert row["result"] == "ran", f"{row['result']}: {row['message'] or row['losses']}"
    assert float(row["losses_differ_by"]) <= 1
    assert float(row["peak_gib"]) <= float(row["budget_gib"])
