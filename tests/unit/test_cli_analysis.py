"""The questions before a run as they are typed: phases, the largest, the smallest, the curve, prices, a number, a check-up."""

import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from holdall.cli import app
from holdall.machine.findings import examine
from holdall.machine.limits import limits
from holdall.types import Hardware, Plan, Tier

NOP = ["--gpu", "t4", "--planner", "nop"]


def holdall_says(*words):
    result = CliRunner().invoke(app, [str(word) for word in words])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def answered(*words):
    result = holdall_says(*words, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def refused(*words):
    result = holdall_says(*words)
    assert result.exit_code == 2 and result.stdout == "" and "Traceback" not in result.stderr, result.output
    fact, blank, hint = result.stderr.strip().split("\n")
    assert blank == "" and hint.startswith("hint: ")
    return fact.removeprefix("error: ")


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A small CPU as a file, so that nothing is measured."""
    path = tmp_path_factory.mktemp("machine") / "cpu.json"
    tiers = tuple(Tier(name=name, capacity=2**33, read=1e10, write=1e10) for name in ("cpu", "far"))
    Hardware(name="small", device="cpu", tiers=tiers, flops={"float32": 1e10}, bandwidth=1e10, overlap=False).save(path)
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Configs of two GPTs, `little` and `larger`: less to trace than any preset."""
    root = tmp_path_factory.mktemp("models")
    for name, width in (("little", 16), ("larger", 32)):
        (root / name).mkdir()
        shape = {"n_layer": 2, "n_embd": width, "n_head": 2, "vocab_size": 64, "n_positions": 128}
        config = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], **shape}
        (root / name / "config.json").write_text(json.dumps(config))
    return root


@pytest.fixture(scope="module")
def tiny(folder):
    return [folder / "little" / "config.json", "--batch", "2", "--seq", "16", "--optimizer", "sgd"]


# phases


def test_a_plan_shows_every_phase_and_which_decides(tiny):
    said = holdall_says("plan", *tiny, *NOP, "--longest-seq", "64").stdout
    for word in ("load", "first step", "steady step", "longest batch", "evaluation", "save", "resume", "known by", "disk"):
        assert word in said
    assert "decided by: GPU longest batch" in said
    assert "decided by" not in holdall_says("plan", *tiny, *NOP, "--no-phases").stdout


def test_a_phase_over_the_budget_is_a_warning(tiny):
    peak = answered("plan", *tiny, *NOP)["predicted"]["peak"]["gpu"]
    said = holdall_says("plan", *tiny, *NOP, "--budget", 2 * peak, "--longest-seq", "128").stdout
    assert "warning: longest batch needs" in said and "--seq" in said


def test_phases_as_json_come_when_asked_for(tiny):
    found = answered("plan", *tiny, *NOP, "--optimizer", "adamw", "--phases")
    names = [p["name"] for p in found["phases"]]
    assert names == ["load", "first step", "steady step", "evaluation", "save", "resume"]
    assert found["phases"][2]["device"] >= found["predicted"]["peak"]["gpu"] and found["deciding"]["device"] == "steady step"
    assert found["phases"][0]["host"] > 0 and found["phases"][4]["disk"] > 0


def test_a_trace_has_phases_too_but_no_longer_batch(tmp_path, small, tiny):
    trace = tmp_path / "t.json"
    holdall_says("trace", *tiny, "--device", "cpu", "--out", trace)
    files = ["--trace", trace, "--hardware", small, "--planner", "nop"]
    found = answered("plan", *files, "--phases")
    assert next(p for p in found["phases"] if p["name"] == "evaluation")["how"] == "at most"
    assert "needs a model" in refused("plan", *files, "--longest-seq", "64")
    assert "needs a model" in refused("plan", *files, "--largest", "batch")
    plan = tmp_path / "p.json"
    holdall_says("plan", *files, "--no-phases", "--out", plan)
    priced = answered("explain", plan, "--trace", trace, "--hardware", small)["alternatives"]
    assert any(a["what"] == "recompute" and a["ms_per_gib"] > 0 for a in priced)
    assert "give the trace with --trace" in holdall_says("explain", plan).stdout


# inverse questions


def test_the_largest_batch_fits_and_the_next_does_not(tmp_path, folder):
    out, budget = tmp_path / "p.json", 200_000
    words = ["plan", folder / "little" / "config.json", "--seq", "16", "--optimizer", "sgd", *NOP, "--budget", budget]
    found = answered(*words, "--largest", "batch", "--out", out)
    assert found["next"]["value"] == found["value"] + 1 and "needs" in found["next"]["why"]
    assert Plan.load(out).predicted.peak["gpu"] <= budget
    assert holdall_says(*words, "--batch", found["value"], "--no-phases").exit_code == 0
    assert holdall_says(*words, "--batch", found["value"] + 1, "--no-phases").exit_code == 3


def test_the_longest_sequence_ends_with_the_positions_of_the_model(tiny):
    said = holdall_says("plan", *tiny, *NOP, "--largest", "seq", "--step", "64").stdout
    assert said.startswith("largest seq that fits: 128\n") and "192 does not:" in said and "128 positions" in said


def test_the_largest_model_of_a_family(monkeypatch, folder):
    little, larger = (str(folder / name / "config.json") for name in ("little", "larger"))
    monkeypatch.setattr("holdall.cli._inverse.family_names", lambda _: (larger, little))
    peaks = [
        answered("plan", m, "--seq", "16", "--optimizer", "sgd", *NOP)["predicted"]["peak"]["gpu"] for m in (little, larger)
    ]
    budget = sum(peaks) // 2
    found = answered("plan", larger, "--seq", "16", "--optimizer", "sgd", *NOP, "--budget", budget, "--largest", "model")
    assert found["value"] == little and found["next"]["value"] == larger
    assert [t["fits"] for t in found["tried"]] == [False, True]


def test_nothing_that_fits_ends_with_3(tiny):
    result = holdall_says("plan", *tiny, *NOP, "--budget", "10KiB", "--largest", "batch")
    assert result.exit_code == 3 and result.stderr.startswith("error: no plan")


def test_the_smallest_budget_and_the_curve(tmp_path, small, tiny):
    words = ["plan", *tiny, "--hardware", small, "--planner", "auto", "--allow", "recompute"]
    found = answered(*words, "--smallest-budget", "--keep-speed", "0.9")
    assert found["speed"] >= 0.9 and found["not_enough"] < found["smallest_budget"] and found["plan"]["feasible"]
    page = tmp_path / "curve.html"
    said = holdall_says(*words, "--pareto", "--points", "3", "--html", page).stdout
    assert "time/step" in said and f"written to {page}" in said
    assert "little" in page.read_text() and "predicted, not measured" in page.read_text()


def test_options_that_would_say_nothing_are_refused(tiny):
    assert "both --largest and --pareto" in refused("plan", *tiny, *NOP, "--largest", "batch", "--pareto")
    assert "--html has no effect" in refused("plan", *tiny, *NOP, "--html", "x.html")
    assert "--keep-speed has no effect" in refused("plan", *tiny, *NOP, "--keep-speed", "0.9")
    assert "unknown thing to make larger `layers`" in refused("plan", *tiny, *NOP, "--largest", "layers")
    assert "share of speed" in refused("plan", *tiny, *NOP, "--smallest-budget", "--keep-speed", "2")
    assert "have no length" in refused("plan", "tiny-vit", *NOP, "--largest", "seq")


# explain, estimate, doctor


def test_explain_prices_the_alternatives(tiny):
    words = ["explain", *tiny, *NOP]
    said = holdall_says(*words).stdout
    for word in ("ms/GiB", "if not hidden", "GPT2Block", "recompute", "lm_head"):
        assert word in said
    result = holdall_says("explain", *tiny, *NOP, "--trace", "t.json")
    assert result.exit_code == 2 and "together with a model" in result.stderr


def test_estimate_can_be_nothing_but_a_number(tiny):
    said = holdall_says("estimate", *tiny, "--short").stdout
    assert said.endswith(" KiB\n") and said.count(" ") == 1 and float(said.split()[0]) > 32


def test_doctor_looks_at_limits(monkeypatch):
    resource = pytest.importorskip("resource")
    found = {f["what"]: f for f in answered("doctor")}
    for what in ("pinning", "disk", "compiler", "optional", "extra solvers", "allocator"):
        assert found[what]["found"]
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(total=2**40, free=2**30))
    monkeypatch.setattr(shutil, "which", lambda _: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("resource.getrlimit", lambda _: (8 * 2**20, 8 * 2**20))
    checked = {f.what: f for f in limits()}
    assert not checked["disk"].ok and not checked["compiler"].ok
    assert not checked["pinning"].ok and "ulimit -l unlimited" in checked["pinning"].advice
    monkeypatch.setattr("resource.getrlimit", lambda _: (resource.RLIM_INFINITY,) * 2)
    assert next(f for f in limits() if f.what == "pinning").ok


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("expandable_segments:True", "not needed"),
        ("expandable_segments:False", "more is reserved"),
        ("max_split_size_mb:64", "unset"),
    ],
)
def test_doctor_says_what_an_allocator_setting_means(monkeypatch, value, words):
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", value)
    finding = next(f for f in examine() if f.what == "allocator")
    assert words in finding.advice and value in finding.found
