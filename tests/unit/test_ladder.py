"""The ladder: rungs that are what they say, plans that fit with gradients used up, and a benchmark that runs."""

import csv
import importlib
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from holdall.actions.in_backward import moments, used_up
from holdall.cli import app
from holdall.cost.roofline import cost_trace
from holdall.experiments import ladder_rungs
from holdall.experiments.ladder_plans import decide
from holdall.experiments.ladder_rungs import RUNGS, climb
from holdall.planners.nop import Nop
from holdall.planning.finish import finish
from holdall.testing.contracts import problem_for, traced
from holdall.testing.worlds import family, machine
from holdall.tracing import trace_step
from holdall.types import Kind, Phase

ROOT = Path(__file__).parents[2]


@pytest.fixture
def world(tmp_path, monkeypatch):
    """A small model, a machine that need not be measured, and three rungs."""
    transformers = pytest.importorskip("transformers")
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 256}
    config = transformers.LlamaConfig(**shape, architectures=["LlamaForCausalLM"])
    config.to_json_file(tmp_path / "config.json")
    machine().save(tmp_path / "machine.json")
    names = ("plain", "recompute", "in backward")
    monkeypatch.setattr(ladder_rungs, "RUNGS", tuple(r for r in RUNGS if r.name in names))
    sizes = ["--batch", "4", "--seq", "32", "--steps", "2", "--no-bf16"]
    return ["ladder", str(tmp_path / "config.json"), *sizes, "--hardware", str(tmp_path / "machine.json")]


def test_each_rung_is_measured_and_says_what_it_does_to_the_numbers(world, tmp_path):
    result = CliRunner().invoke(app, [*world, "--json", "--csv", str(tmp_path / "rows.csv")])
    rows = json.loads(result.stdout)
    assert [r["rung"] for r in rows] == ["plain", "recompute", "in backward"]
    assert [r["numerics"] for r in rows] == ["exact", "exact", "exact"]
    assert [r["identical_to_the_rung_before"] for r in rows] == [None, True, True]
    assert all(r["tokens_per_second"] > 0 and not r["problem"] for r in rows)
    peaks = [r["peak_bytes"] for r in rows]
    assert peaks == [r["predicted_peak_bytes"] for r in rows]
    assert peaks[2] <= peaks[1] < peaks[0]
    assert [r["fits"] for r in rows] == [p <= peaks[0] // 2 for p in peaks]  # no budget was given: half of plain
    assert result.exit_code == (0 if any(r["fits"] for r in rows) else 1)
    assert "in_backward:1" in rows[2]["actions"]
    written = list(csv.DictReader((tmp_path / "rows.csv").open()))
    assert [r["rung"] for r in written] == [r["rung"] for r in rows]
    assert {"hardware", "torch", "model", "batch", "seq", "steps", "seed"} <= set(written[0])


def test_it_stops_where_it_fits_and_the_table_says_so(world):
    result = CliRunner().invoke(app, [*world, "--budget", "1GiB"])
    assert result.exit_code == 0, result.output
    assert "the first that fits: plain" in result.stdout
    assert "in backward" not in result.stdout


def test_recipes_have_their_loss_and_bytes(world):
    result = CliRunner().invoke(app, [*world, "--budget", "1GiB", "--recipes", "bf16,fp8", "--json"])
    assert result.exit_code == 0, result.output
    plain, *rows = json.loads(result.stdout)
    assert [r["rung"] for r in rows] == ["bf16", "fp8"] and all(not r["problem"] for r in rows)
    assert all(0 < r["kept_bytes"] < 0.7 * plain["kept_bytes"] for r in rows)
    assert all(r["peak_bytes"] == r["predicted_peak_bytes"] for r in rows)
    assert len({r["final_loss"] for r in (plain, *rows)}) == 3  # other numbers, and near
    assert all(abs(r["final_loss"] / plain["final_loss"] - 1) < 0.02 for r in rows)


def test_the_table_of_recipes_is_narrow_and_unknown_ones_are_refused_before_anything_runs(world):
    result = CliRunner().invoke(app, [*world, "--budget", "1GiB", "--recipes", "fp8:scaling=row"])
    assert result.exit_code == 0, result.output
    assert "fp8:scaling=row" in result.stdout and max(map(len, result.stdout.splitlines())) <= 100
    for name in ("fp9", "fp16-autocast"):
        refused = CliRunner().invoke(app, [*world, "--recipes", name])
        assert refused.exit_code == 2 and "hint" in refused.output and "tokens/s" not in refused.output


def test_only_models_that_continue_text_are_climbed():
    pytest.importorskip("transformers")
    assert "trains causal language models" in CliRunner().invoke(app, ["ladder", "tiny-vit"]).output


def test_rungs_build_on_each_other_and_those_in_bf16_can_be_left_out():
    every = {rung.name: settings for rung, settings in climb()}
    assert every["GaLore"].in_backward and every["GaLore"].dtype == "bfloat16" and every["GaLore"].planner == "auto"
    assert every["compressed"].planner == "actnn" and every["compressed"].optimizer == "galore"
    wide = {rung.name: settings for rung, settings in climb(narrow=False)}
    assert {s.dtype for s in wide.values()} == {"float32"} and not any(s.precision for s in wide.values())


def test_a_planner_is_shown_the_step_without_gradients_that_are_used_up():
    *_, trace = traced("twice")
    seen = used_up(trace)
    assert not any(op.site.phase is Phase.STEP for op in seen.ops)
    ready = moments(trace)
    grads = [t for t in seen.tensors.values() if t.kind is Kind.GRAD]
    assert len(grads) == len(ready) and all(t.freed == ready[t.id] for t in grads)
    plain = finish(Nop(), problem_for(trace), []).predicted.peak["cpu"]
    assert finish(Nop(), problem_for(seen), []).predicted.peak["cpu"] < plain


@pytest.mark.parametrize("share", [0.97, 0.8])
def test_plans_with_updates_in_backward_fit_or_say_that_they_do_not(share):
    model, batch = family("tied")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    trace = cost_trace(trace_step(model, batch, optimizer=optimizer), machine())
    posed = replace(problem_for(trace), reads_gradients=False, allow=frozenset({"keep", "recompute"}))
    plain = finish(Nop(), posed, []).predicted.peak["cpu"]
    wanted = replace(posed, budget={**posed.budget, "cpu": round(plain * share)})
    made = decide(wanted, "auto", {}, in_backward=True)
    assert "in_backward" in made.count()
    assert (made.predicted.peak["cpu"] <= wanted.budget["cpu"]) == (made.budget["cpu"] == wanted.budget["cpu"])
    assert made.predicted.peak["cpu"] < plain


def test_the_benchmark_runs_on_a_cpu(tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    monkeypatch.syspath_prepend(ROOT / "benchmarks")  # also for the processes that plan
    bench = importlib.import_module("shrink_on_gpu")
    out = tmp_path / "rows.csv"
    bench.main(["--tiny", "--methods", "lomo", "--steps", "1", "--warmup", "1", "--commit", "abc", "--out", str(out)])
    rows = list(csv.DictReader(out.open()))
    alone = [r for r in rows if r["kind"] == "alone"]
    assert [r["method"] for r in alone] == ["lomo"]
    assert all(float(r["tokens_per_s"]) > 0 and float(r["peak_gib"]) > 0 and r["commit"] == "abc" for r in alone)
    combined = [r for r in rows if r["kind"] == "combined"]
    assert len(combined) == 4 and all(r["fits"] == "True" or r["why"] for r in combined)
