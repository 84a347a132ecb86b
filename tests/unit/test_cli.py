"""The command line as a user meets it: each verb's happy path, what each mistake says, and the numbers it ends with."""

import csv
import importlib.metadata
import json
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import holdall
from holdall.cli import VERBS, app
from holdall.errors import InvalidInput, MissingExtra, OverBudget
from holdall.experiments.sweep import read_targets
from holdall.machine.presets import gpu
from holdall.types import Hardware, Kind, Outcome, Plan, Trace
from holdall.units import MiB

TINY = ["tiny-gpt2", "--batch", "2", "--seq", "32"]
LAPTOP = [*TINY, "--gpu", "t4"]  # plans for a GPU that is not here: nothing is measured


def holdall_says(*words):
    result = CliRunner().invoke(app, [str(word) for word in words])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def refused(*words):
    """The two lines of an error; nothing on stdout, and the number for wrong use."""
    result = holdall_says(*words)
    assert result.exit_code == 2, result.output
    assert result.stdout == "" and "Traceback" not in result.stderr
    fact, blank, hint = result.stderr.strip().split("\n")
    assert fact.startswith("error: ") and blank == "" and hint.startswith("hint: ")
    return fact.removeprefix("error: "), hint.removeprefix("hint: ")


@pytest.fixture(scope="module")
def machine_file(tmp_path_factory):
    """A small CPU as a file, so that planning for a CPU does not measure this one."""
    from holdall.types import Tier

    path = tmp_path_factory.mktemp("machine") / "cpu.json"
    tiers = tuple(Tier(name=name, capacity=2**33, read=1e10, write=1e10) for name in ("cpu", "far"))
    Hardware(name="small", device="cpu", tiers=tiers, flops={"float32": 1e10}, bandwidth=1e10, overlap=False).save(path)
    return path


# the whole


def test_help_names_every_verb_and_each_verb_has_an_example():
    listed = holdall_says("--help").stdout
    for verb, line in VERBS.items():
        assert f"\n  {verb} " in listed and line.split()[0] in listed
        shown = holdall_says(verb, "--help")
        assert shown.exit_code == 0
        assert "Example" in shown.stdout and f"holdall {verb}" in " ".join(shown.stdout.split())


def test_without_a_verb_the_help_is_shown():
    assert holdall_says().stdout == holdall_says("--help").stdout


def test_version():
    assert holdall_says("--version").stdout == f"holdall {holdall.__version__}\n"


def test_it_can_be_run_as_a_module():
    done = subprocess.run(
        [sys.executable, "-m", "holdall", "--version"], capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, done.stdout.strip()) == (0, f"holdall {holdall.__version__}")


def test_help_planners_and_systems_do_not_load_torch():
    """The package's own `__init__` is stood in for: what it loads is its own affair."""
    program = """
import importlib.util, sys
sys.modules["holdall"] = importlib.util.module_from_spec(importlib.util.find_spec("holdall"))
from holdall.cli import app
for words in (["--help"], ["planners"], ["systems"], ["plan", "--help"]):
    try:
        app(words, prog_name="holdall")
    except SystemExit as end:
        assert end.code == 0, words
assert "torch" not in sys.modules, "torch was loaded"
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "checkmate" in done.stdout.lower()


# estimate, trace


def test_estimate_is_one_line():
    said = holdall_says("estimate", *TINY).stdout
    assert said.count("\n") == 1 and "at the peak" in said and "MiB" in said


def test_estimate_as_json_has_bytes():
    found = json.loads(holdall_says("estimate", *TINY, "--optimizer", "sgd", "--json").stdout)
    assert found["peak"] > 298_368 * 4 and found["kinds"]["parameters"] >= 298_368 * 4


def test_trace_says_what_a_step_is_made_of_and_writes_it(tmp_path):
    path = tmp_path / "t.json"
    said = holdall_says("trace", *TINY, "--device", "cpu", "--out", path).stdout
    for word in ("M_p", "M_s", "M_a", "GPT2Block", "plain peak", "closed form", str(path)):
        assert word in said
    assert Trace.load(path).about.device == "cpu"


def test_trace_of_a_model_that_is_not_classic_has_no_closed_form():
    found = json.loads(holdall_says("trace", "tiny-llama", "--seq", "16", "--device", "cpu", "--json").stdout)
    assert found["closed_form"] == [] and found["ops"] > 100
    assert sum(found["classes"].values()) == sum(found["kinds"].values())


def test_a_vision_model_needs_no_length():
    assert "at the peak" in holdall_says("estimate", "tiny-vit", "--batch", "2", "--dtype", "bf16").stdout


def test_a_batch_that_the_model_rejects_is_one_clear_line(monkeypatch):
    from holdall.experiments.workload import Workload

    monkeypatch.setattr(Workload, "sample", lambda self: {"input_ids": torch.zeros(1, 2000, dtype=torch.long)})
    fact, hint = refused("estimate", *TINY)
    assert fact.startswith("the model rejected the batch: ") and "1024" in fact
    assert "--seq" in hint


def test_a_batch_that_no_machine_holds_is_refused_before_it_is_made():
    assert "the batch itself takes" in refused("estimate", "tiny-gpt2", "--batch", 10**12)[0]
    assert "the batch itself takes" in refused("estimate", "tiny-vit", "--batch", 10**12)[0]


def test_a_sequence_longer_than_the_model_is_refused():
    assert "1024 positions" in refused("plan", "tiny-gpt2", "--seq", "5000", "--gpu", "t4")[0]


# plan, explain


def test_plan_json_is_one_object_with_these_keys():
    result = holdall_says("plan", *LAPTOP, "--budget", "1GiB", "--json")
    found = json.loads(result.stdout)
    assert result.exit_code == 0
    assert set(found) == {"feasible", "planner", "budget", "predicted", "solve_seconds", "actions", "why"}
    assert set(found["predicted"]) == {"peak", "seconds", "recompute_seconds", "stall_seconds"}
    assert found["feasible"] is True and found["planner"] == "auto"
    assert found["budget"]["gpu"] == 2**30 and 0 < found["predicted"]["peak"]["gpu"] < 2**30
    assert found["actions"] == [] and isinstance(found["why"], list)


def test_infeasible_json_names_the_smallest_and_ends_with_3():
    result = holdall_says("plan", *LAPTOP, "--budget", "1MiB", "--planner", "nop", "--json")
    found = json.loads(result.stdout)
    assert result.exit_code == 3 and found["feasible"] is False
    assert found["smallest"] > MiB and "no plan" in found["why"][0]
    assert found["budget"]["gpu"] == MiB


def test_infeasible_in_words_ends_with_3():
    result = holdall_says("plan", *LAPTOP, "--budget", "1MiB")
    assert result.exit_code == 3 and result.stdout == ""
    assert result.stderr.startswith("error: no plan") and "\n\nhint: " in result.stderr


def test_a_plan_goes_through_files(tmp_path, machine_file):
    trace, plan = tmp_path / "t.json", tmp_path / "p.json"
    holdall_says("trace", *TINY, "--device", "cpu", "--out", trace)
    plain = json.loads(holdall_says("plan", "--trace", trace, "--hardware", machine_file, "--json").stdout)
    budget = plain["predicted"]["peak"]["cpu"] - MiB // 2
    made = holdall_says("plan", "--trace", trace, "--hardware", machine_file, "--budget", budget, "--out", plan)
    assert made.exit_code == 0 and "written to" in made.stdout
    assert Plan.load(plan).predicted.peak["cpu"] <= budget
    said = holdall_says("explain", plan).stdout
    for word in ("auto:", "transformer.h.0", "decision", "at the peak", "activations"):
        assert word in said
    assert json.loads(holdall_says("explain", plan, "--json").stdout)["blocks"]


def test_explain_plans_a_model_first():
    said = holdall_says("explain", *LAPTOP, "--planner", "nop").stdout
    assert "plain training" in said and "lm_head" in said


def test_planner_options_and_actions_are_passed_on():
    found = json.loads(
        holdall_says("plan", *LAPTOP, "--planner", "chen", "--option", "variant=all", "--allow", "recompute", "--json").stdout
    )
    assert {action["action"] for action in found["actions"]} == {"recompute"}


def test_a_layout_is_passed_on_and_shown():
    said = holdall_says("plan", *LAPTOP, "--layout", "best_fit", "--no-phases", "--planner", "chen", "--option", "variant=all")
    assert "best_fit:" in said.stdout and "tensors in an arena of" in said.stdout


def test_a_budget_may_be_given_per_tier():
    found = json.loads(holdall_says("plan", *LAPTOP, "--budget", "gpu=1GiB,cpu=2GiB", "--json").stdout)
    assert found["budget"] == {"gpu": 2**30, "cpu": 2**31}


@pytest.mark.parametrize(
    ("words", "fact", "hint"),
    [
        (["--budget", "3GiX"], "unknown unit `GiX`", "24GiB"),
        (["--budget=-3GiB"], "must be above zero", "24GiB"),
        (["--budget", "much"], "not a size", "24GiB"),
        (["--budget", "gpu=1GiB,cp=1GiB"], "unknown tier `cp`", "`cpu`"),
        (["--planner", "autp"], "unknown planner `autp`", "did you mean `auto`"),
        (["--allow", "recompte"], "unknown action `recompte`", "did you mean `recompute`"),
        (["--layout", "bestfit"], "unknown static layout `bestfit`", "did you mean `best_fit`"),
        (["--option", "x"], "", ""),
        (["--planner", "chen", "--option", "varian=all"], "unknown option of chen `varian`", "did you mean `variant`"),
        (["--planner", "chen", "--option", "last=3"], "bool was expected", "holdall planners"),
        (["--dtype", "float23"], "unknown dtype `float23`", "did you mean `float32`"),
        (["--optimizer", "adamwv"], "unknown optimizer `adamwv`", "did you mean `adamw`"),
        (["--optimizer", "galore:rnak=4"], "unknown option of galore `rnak`", "did you mean `rank`"),
        (["--optimizer", "galore:rank"], "has the option `rank` without a value", "rockmate:menus=cut"),
        (["--optimizer", "sgd:lr=-1"], "sgd:lr=-1 cannot be made", "holdall optimizers"),
        (["--optimizer", "lomo"], "Lomo updates in backward by hooks of its own", "torch.optim.SGD"),
        (["--optimizer", "mezo"], "Mezo takes no gradients", "without a plan"),
        (["--hardware", "x.json"], "both --gpu and --hardware", "one of them"),
        (["--out", "nowhere/p.json"], "cannot write `nowhere/p.json`", "folder"),
        (["--batch", "0"], "`batch` is 0", "use, for example"),
        (["--batch", "two"], "invalid value for '--batch'", "holdall plan --help"),
        (["--bugdet", "1GiB"], "no such option: --bugdet", "holdall plan --help"),
    ],
)
def test_a_wrong_option_of_plan_is_refused_in_two_lines(words, fact, hint):
    found = refused("plan", *LAPTOP, *words)
    assert fact in found[0] and hint in found[1]


def test_wrong_names_offer_the_closest():
    assert "did you mean `rtx-4090`" in refused("plan", *TINY, "--gpu", "rtx-490")[1]
    assert "did you mean `gpt2`" in refused("plan", "gtp2", "--gpu", "t4")[1]
    assert "did you mean `plan`" in refused("plann")[1]
    assert "did you mean `recompute`" in refused("systems", "--family", "recomput")[1]
    assert "no model was named" in refused("plan")[0]
    assert "write `--gpu rtx-4090`" in refused("plan", *TINY, "--hardware", "rtx-4090")[1]


@pytest.mark.parametrize("change", [{"tiers": []}, {"bandwidth": 0.0}, {"flops": "fast"}, {"format": "other"}, None])
def test_a_corrupt_hardware_file_is_refused(tmp_path, change):
    path = tmp_path / "machine.json"
    gpu("t4").save(path)
    text = json.dumps({**json.loads(path.read_text()), **change}) if change is not None else path.read_text()[:50]
    path.write_text(text)
    assert str(path) in refused("plan", *TINY, "--hardware", path)[0]


def test_a_corrupt_plan_or_trace_file_is_refused(tmp_path, machine_file):
    broken = tmp_path / "broken.json"
    broken.write_text('{"format": "holdall-plan-1", "actions": [{"action": "dance"}]}')
    assert "unknown action `dance`" in refused("explain", broken)[0]
    broken.write_text("{")
    assert "not a plan file" in refused("explain", broken)[0]
    assert "not a trace file" in refused("plan", "--trace", broken, "--gpu", "t4")[0]
    assert "No such file" in refused("explain", tmp_path / "missing.json")[0]


def test_a_trace_for_another_device_is_refused(tmp_path, machine_file):
    path = tmp_path / "t.json"
    holdall_says("trace", *TINY, "--device", "cuda", "--out", path)
    fact, hint = refused("plan", "--trace", path, "--hardware", machine_file)
    assert "the trace is for cuda" in fact and "--device cpu" in hint
    if not torch.cuda.is_available():
        assert "--gpu" in refused("plan", "--trace", path)[1]


def test_debug_shows_the_traceback_wherever_it_stands():
    result = CliRunner().invoke(app, ["estimate", "gtp2", "--debug"])
    assert isinstance(result.exception, InvalidInput)


def test_errors_end_with_their_numbers(monkeypatch):
    def verb_that_raises(error):
        def fails():
            raise error

        monkeypatch.setitem(sys.modules, "holdall.cli.doctor", types.SimpleNamespace(doctor=fails))
        return CliRunner().invoke(app, ["doctor"])

    for error, code in (
        (OverBudget("went over", hint="plan for more"), 1),
        (MemoryError(), 1),
        (torch.OutOfMemoryError("the card is full"), 1),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"), 1),
        (MissingExtra("no such package", hint="pip install it"), 2),
    ):
        result = verb_that_raises(error)
        assert result.exit_code == code and result.stderr.startswith("error: "), result.output
    assert isinstance(verb_that_raises(RuntimeError("a bug of ours")).exception, RuntimeError)


# compare


def test_compare_predicts_measures_and_writes(tmp_path, machine_file):
    rows, chart = tmp_path / "rows.csv", tmp_path / "chart.svg"
    result = holdall_says(
        "compare", *TINY, "--hardware", machine_file, "--planners", "auto,nop", "--budgets", "100%,80%", "--measure",
        "--csv", rows, "--plot", chart,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "bit for bit" in result.stdout and "needs" in result.stdout  # nop cannot do 80%
    read = list(csv.DictReader(rows.open()))
    assert [(r["planner"], r["budget"]) for r in read] == [("auto", "100%"), ("nop", "100%"), ("auto", "80%"), ("nop", "80%")]
    for row in read[:3]:
        assert row["identical"] == "True"
        assert int(row["measured_peak_bytes"]) <= int(row["budget_bytes"])
        assert int(row["measured_peak_bytes"]) == pytest.approx(int(row["predicted_peak_bytes"]), rel=0.02)
    assert read[3]["feasible"] == "False" and int(read[3]["smallest_bytes"]) == int(read[0]["budget_bytes"])
    assert "<svg" in chart.read_text()


def test_compare_for_a_gpu_that_is_not_here_only_predicts():
    found = json.loads(holdall_says("compare", *LAPTOP, "--planners", "nop", "--budgets", "100%,1GiB", "--json").stdout)
    assert [row["measured_seconds"] for row in found] == [None, None]
    assert found[1]["budget_bytes"] == 2**30 and found[0]["predicted_overhead"] == 0


def test_compare_refuses_what_it_cannot_do():
    assert "--measure runs on this machine" in refused("compare", *LAPTOP, "--measure")[0]
    assert "not the name of a picture" in refused("compare", *LAPTOP, "--plot", "chart.doc")[0]
    assert "unknown planner" in refused("compare", *LAPTOP, "--planners", "auto,nob")[0]


def test_shares_are_of_the_activation_part():
    plain = Outcome(source="simulated", seconds=1.0, peak={"gpu": 1000}, peak_kinds={Kind.PARAM: 500, Kind.STATE: 100})
    assert [t.nbytes for t in read_targets("100%, 50%,0.25,2KiB,700", plain)] == [1000, 800, 700, 2048, 700]
    for wrong in ("150%", "0%", "-5%", "half", ""):
        with pytest.raises(InvalidInput, match="budgets"):
            read_targets(wrong, plain)


def test_plotting_without_matplotlib_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    fact, hint = refused("compare", *LAPTOP, "--plot", "chart.png")
    assert "matplotlib" in fact and "viz" in hint


# the machine and the lists


def test_probe_measures_and_its_json_is_a_hardware_file(tmp_path):
    path = tmp_path / "here.json"
    result = holdall_says("probe", "--device", "cpu", "--quick", "--out", path, "--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout) == json.loads(path.read_text())
    said = holdall_says("probe", "--device", "cpu", "--quick").stdout
    assert Hardware.load(path).name in said and "FLOP/s" in said
    assert "unknown device" in refused("probe", "--device", "tpu")[0]


def test_planners_lists_options_and_shows_why_one_is_broken(monkeypatch, tmp_path):
    said = holdall_says("planners").stdout
    assert "variant=sqrt" in said and "1604.06174" in said
    (tmp_path / "planners").mkdir()
    (tmp_path / "planners" / "solved.py").write_text("import some_solver\n")
    monkeypatch.setenv("HOLDALL_MEMBERS", str(tmp_path))
    said = holdall_says("planners").stdout
    row = next(line for line in said.splitlines() if line.startswith("solved"))
    assert "cannot be used here" in row and "nop" in said
    rows = {row["name"]: row for row in json.loads(holdall_says("planners", "--json").stdout)}
    assert "No module named 'some_solver'" in rows["solved"]["error"] and not rows["nop"]["error"]


def test_systems_are_listed_by_family():
    said = holdall_says("systems").stdout
    assert "are implemented here" in said and "holdall/planners/chen.py" in said
    rows = json.loads(holdall_says("systems", "--family", "swap", "--json").stdout)
    assert rows and all("swap" in row["families"] for row in rows)


def test_doctor_says_what_to_change(monkeypatch):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    result = holdall_says("doctor")
    assert result.exit_code == 0
    for word in ("torch", "host memory", "GPU", "expandable_segments", "to change:", "extra hf"):
        assert word in result.stdout
    found = {f["what"]: f for f in json.loads(holdall_says("doctor", "--json").stdout)}
    assert found["allocator"]["ok"] is False and found["allocator"]["advice"]


def test_doctor_gives_the_command_for_a_missing_extra(monkeypatch):
    def version(package, real=importlib.metadata.version):
        if package == "matplotlib":
            raise importlib.metadata.PackageNotFoundError(package)
        return real(package)

    monkeypatch.setattr(importlib.metadata, "version", version)
    found = {f["what"]: f for f in json.loads(holdall_says("doctor", "--json").stdout)}
    assert "pip install" in found["extra viz"]["advice"] and "[viz]" in found["extra viz"]["advice"]


# demo


@pytest.fixture
def small_demo(monkeypatch):
    import holdall.experiments.demo_runs as runs

    monkeypatch.setitem(runs.SIZES, "cpu", runs.Size(rows=2, length=32, width=32, blocks=4))
    return runs


def test_demo_is_exact_and_under_every_budget(tmp_path, small_demo):
    page = tmp_path / "demo.html"
    result = holdall_says("demo", "--steps", "2", "--device", "cpu", "--out", page, "--json")
    assert result.exit_code == 0, result.output
    plain, half, quarter = json.loads(result.stdout)
    assert quarter["budget"] <= half["budget"] < plain["budget"]
    for row in (plain, half, quarter):
        assert row["identical"] and row["losses"] == plain["losses"]
        assert row["predicted"] <= row["budget"] and row["measured"] <= row["budget"]
    assert plain["decision"].startswith("keep") and half["decision"] != plain["decision"]
    assert "identical to the untouched model" in page.read_text()


def test_demo_takes_the_smallest_budget_where_nothing_fits_and_ends_with_1_if_a_loss_differs(tmp_path, small_demo, monkeypatch):
    monkeypatch.setattr(small_demo.RealRun, "equals", lambda self, other: False)
    result = holdall_says("demo", "--steps", "1", "--device", "cpu", "--planner", "nop", "--out", tmp_path / "d.html")
    assert "quarter: nothing fits" in result.stdout and "smallest budget found" in result.stdout
    assert result.exit_code == 1 and "DIFFERENT" in result.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_demo_on_a_gpu_that_is_not_here_is_refused():
    assert "no GPU" in refused("demo", "--device", "cuda")[0]


def test_every_verb_has_its_file_and_no_file_is_forgotten():
    files = {p.stem for p in Path(holdall.cli.__file__).parent.glob("*.py") if not p.stem.startswith("_")}
    assert files == set(VERBS)
