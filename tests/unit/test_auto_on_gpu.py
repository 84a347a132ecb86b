"""The headline benchmark on a CPU: it runs, it goes through `fit`, and a plan made ahead is the one that runs."""

import csv
import importlib
import sys
from pathlib import Path

import pytest
import torch

import holdall
from holdall.testing.contracts import train
from holdall.testing.stand_ins import planned_for
from holdall.testing.worlds import family, machine

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_the_benchmark_measures_fit(tmp_path, monkeypatch, capsys):
    pytest.importorskip("transformers")
    pytest.importorskip("psutil")
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    fits = []
    real = holdall.fit
    monkeypatch.setattr(holdall, "fit", lambda *args, **given: fits.append(given) or real(*args, **given))
    out = tmp_path / "rows.csv"
    words = ["--cpu-check", "--steps", "1", "--warmup", "1", "--budgets", "0.0012@1e-3+1e9", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["auto_on_gpu.py", *words])
    with planned_for(machine()):
        importlib.import_module("auto_on_gpu").main()
    rows = list(csv.DictReader(out.open(newline="")))
    assert [(row["status"], row["steps_clipped"]) for row in rows] == [("ok", "2"), ("ok", "0")]
    assert all(row["plan_changed"] == "False" and row["notes"] == "" for row in rows)
    assert all(int(row["harness_peak"]) <= 0.0012 * 2**30 for row in rows)
    (given,) = fits
    assert given["plan"].predicted.peak and given["precision"] == "bf16" and given["reads_gradients"]
    assert "planned for 0.0012" in capsys.readouterr().out


def test_fit_begins_with_a_plan_made_ahead_and_can_still_tighten_it(tmp_path):
    model, batch = family("tied")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    trace = holdall.trace(model, batch, optimizer=optimizer)
    ahead = holdall.plan(trace, planner="nop", hardware=machine())
    ahead.save(tmp_path / "ahead.json")
    with holdall.fit(model, optimizer, batch, plan=tmp_path / "ahead.json", hardware=machine()) as harness:
        assert harness.plan.planner == "nop" and harness.plan.actions == ahead.actions
        train(model, batch, optimizer)
        tighter = harness._repeat._replacements.tightest(harness.plan)[0]
    assert tighter.predicted.peak["cpu"] < ahead.predicted.peak["cpu"]


def test_a_plan_made_ahead_is_for_one_size():
    model, batch = family("tied")
    with pytest.raises(holdall.InvalidInput, match="`plan` is for one size") as refused:
        holdall.fit(model, None, batch, plan="x.json", lengths="auto", hardware=machine())
    assert refused.value.hint


def test_a_plan_made_ahead_keeps_to_the_budget_of_the_call():
    model, batch = family("tied")
    trace = holdall.trace(model, batch)
    ahead = holdall.plan(trace, planner="nop", hardware=machine())
    needed = ahead.predicted.peak["cpu"]
    with pytest.raises(holdall.InvalidInput, match=r"`plan` needs .* of cpu, over the budget") as refused:
        holdall.fit(model, None, batch, plan=ahead, budget=needed // 2, hardware=machine())
    assert "leave `plan` out" in refused.value.hint
    with holdall.fit(model, None, batch, plan=ahead, budget=needed + 1, hardware=machine()) as harness:
        assert harness.plan.budget["cpu"] == needed + 1
