"""`compare` with peers: options on the command line, what a peer's row says, and that nothing of a peer stays on the model."""

import csv
import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from holdall.cli import app
from holdall.errors import InvalidInput
from holdall.experiments.choices import read_peers, read_planners
from holdall.experiments.peer_runs import allocated_on_top, reason, run_peer
from holdall.experiments.peers import Compile, Selective, Subject, all_variants
from holdall.testing.stand_ins import planned_for
from holdall.types import Hardware, Tier

SMALL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 64, "hidden_size": 16, "intermediate_size": 32,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A model and a machine as files, so that nothing is probed and little is computed."""
    folder = tmp_path_factory.mktemp("small")
    (folder / "config.json").write_text(json.dumps(SMALL))
    tiers = tuple(Tier(name=name, capacity=2**33, read=1e10, write=1e10) for name in ("cpu", "far"))
    machine = Hardware(name="small", device="cpu", tiers=tiers, flops={"float32": 1e10}, bandwidth=1e10, overlap=False)
    machine.save(folder / "cpu.json")
    return [str(folder / "config.json"), "--batch", "2", "--seq", "32", "--hardware", str(folder / "cpu.json")]


def says(*words):
    result = CliRunner().invoke(app, ["compare", *map(str, words)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


# what is typed


def test_planners_take_options():
    found = read_planners("rotor, checkmate:method=lp:time_limit=2,rockmate:menus=cut")
    assert [(c.name, dict(c.options)) for c in found] == [
        ("rotor", {}), ("checkmate", {"method": "lp", "time_limit": 2}), ("rockmate", {"menus": "cut"}),
    ]  # fmt: skip
    assert found[2].label == "rockmate:menus=cut"


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("rotor:slot=5", "unknown option of rotor"),
        ("rotor:slots", "has the option `slots` without a value"),
        ("rotor:slots=many", "int was expected"),
        ("korthikanti:k=1", "has no options"),
        ("rotors", "unknown planner"),
    ],
)
def test_a_wrong_option_of_a_planner_is_refused(typed, said):
    with pytest.raises(InvalidInput, match=said):
        read_planners(typed)


def test_peers_take_options_and_lists():
    compiled, selective = read_peers("compile:ratios=[1,0.5]:backend=aot_eager,selective")
    assert compiled == Compile(ratios=(1.0, 0.5), backend="aot_eager") and selective == Selective()
    for typed in ("compiler", "compile:ratio=1", "compile:ratios=[2]", "compile:scope=half", "selective:keep=[softmax]"):
        with pytest.raises(InvalidInput):
            read_peers(typed)


def test_every_peer_has_its_unlimited_run_once():
    peers = read_peers("checkpoint,selective,compile:ratios=[0.5],compile:scope=blocks:ratios=[0]")
    found = all_variants(peers, [])
    assert [str(v) for v in found if v.unlimited] == ["eager, plain", "compile, ratio 1", "compile, ratio 1 per block"]
    assert len({str(v) for v in found}) == len(found) == 8


def test_peers_are_refused_where_nothing_is_measured(small):
    result = says(*small, "--peers", "checkpoint")
    assert result.exit_code == 2 and "needs --measure" in result.stderr and "--measure" in result.stderr


# what is measured


def test_the_allocator_is_asked_for_the_peak():
    def work():
        big = torch.ones(1000)
        del big
        return torch.ones(100), torch.ones(300)

    assert allocated_on_top(work) == 4000


class Net(torch.nn.Module):
    """Activations that are cheap to make again and large beside the weights."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = torch.nn.functional.gelu(layer(x)).sin()
        return x.square().mean()


def run_net(variant, batch):
    torch.manual_seed(0)
    net = Net()
    subject = Subject(model=net, batch=batch, blocks=())
    seen = run_peer(variant, subject, torch.optim.SGD(net.parameters()), [batch] * 3)
    assert net._compiled_call_impl is None and torch._functorch.config.activation_memory_budget == 1.0
    return seen


def test_a_lower_ratio_of_the_compiler_peaks_lower_and_its_losses_are_those_of_eager():
    batch = {"x": torch.randn(512, 8)}
    eager, full, low = (run_net(v, batch) for v in all_variants(read_peers("eager,compile:ratios=[0.5]:backend=aot_eager"), []))
    assert low.peak < full.peak < eager.peak
    assert full.losses == pytest.approx(eager.losses) and low.losses == pytest.approx(eager.losses)
    assert full.setup_seconds > full.seconds


def test_a_model_that_is_not_compiled_is_not_measured_as_if_it_were():
    (variant,) = Compile(ratios=(1.0,), backend="aot_eager").variants([])
    with torch.compiler.set_stance("force_eager"), pytest.raises(Exception, match="nothing was compiled"):
        run_net(variant, {"x": torch.randn(4, 8)})


def test_a_reason_is_one_line():
    assert reason(RuntimeError("backend raised:\nValueError: no\nand more")) == "RuntimeError: backend raised: ValueError: no"
    assert reason(KeyError()) == "KeyError"


# the verb


def test_compare_puts_peers_beside_planners(small, tmp_path):
    rows, chart = tmp_path / "rows.csv", tmp_path / "chart.svg"
    result = says(
        *small, "--budgets", "100%", "--planners", "chen:last=true", "--measure", "--csv", rows, "--plot", chart,
        "--peers", "checkpoint,selective:keep=[attention],compile:scope=blocks:ratios=[1]:backend=aot_eager", "--commit", "abc",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    ours, *peers = csv.DictReader(rows.open())
    assert [p["planner"] for p in peers] == ["eager", "checkpoint", "selective", "compile"]
    eager, checkpoint, selective, compiled = peers
    assert {r["kind"] for r in peers} == {"peer"} and ours["kind"] == "planner" and ours["planner"] == "chen:last=true"
    assert int(eager["measured_peak_bytes"]) > int(selective["measured_peak_bytes"]) > int(checkpoint["measured_peak_bytes"])
    assert int(compiled["measured_peak_bytes"]) < int(eager["measured_peak_bytes"])
    assert [p["identical"] for p in peers[:3]] == ["True"] * 3
    for row in (ours, *peers):
        assert row["commit"] == "abc" and row["hardware"] == "small" and row["torch"] == torch.__version__
        assert row["transformers"] and row["holdall"] and row["problem"] == ""
    assert all(p["predicted_seconds"] == p["predicted_peak_bytes"] == "" for p in peers)  # measured, never simulated
    assert [p["overhead_over"] for p in peers] == ["eager, plain"] * 3 + ["compile, ratio 1 per block"]
    assert float(eager["measured_overhead"]) == float(compiled["measured_overhead"]) == 0
    slower = float(checkpoint["measured_seconds"]) / float(eager["measured_seconds"]) - 1
    assert float(checkpoint["measured_overhead"]) == pytest.approx(slower)
    assert chart.stat().st_size > 1000 and "ratio 1 per block" in result.stdout


BROKEN = """
from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class Broken:
    name: ClassVar[str] = "broken"
    paper: ClassVar[str] = "none"

    def __call__(self, problem):
        raise RuntimeError("a bug of a planner\\nwith more lines")
"""


def test_what_fails_is_a_row_with_its_reason(small, monkeypatch, tmp_path):
    (tmp_path / "planners").mkdir()
    (tmp_path / "planners" / "broken.py").write_text(BROKEN)
    monkeypatch.setenv("HOLDALL_MEMBERS", str(tmp_path))
    monkeypatch.setitem(sys.modules, "rockmate", None)
    words = [*small, "--budgets", "100%", "--planners", "broken", "--measure", "--peers"]
    result = says(*words, "rockmate,compile:ratios=[1]:backend=nonesuch")
    assert result.exit_code == 1  # for the planner; peers are not ours to judge
    assert "note: broken at 100%: RuntimeError: a bug of a planner\n" in result.stdout
    assert "`rockmate` is not installed" in result.stdout and "pip install rockmate" in result.stdout
    assert "note: compile, ratio 1, nonesuch: " in result.stdout and "nonesuch" in result.stdout


# the benchmark


@pytest.fixture(scope="module")
def bench():
    path = Path(__file__).parents[2] / "benchmarks" / "recompute_on_gpu.py"
    spec = importlib.util.spec_from_file_location("recompute_on_gpu", path)
    module = sys.modules["recompute_on_gpu"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules["recompute_on_gpu"]


def test_the_benchmark_writes_every_row_and_stops_at_its_limit(bench, small, tmp_path, monkeypatch, capsys):
    machine = Hardware.load(small[-1])
    monkeypatch.setattr(bench, "FIRST", "chen")
    out = tmp_path / "rows.csv"
    words = f"bench --tiny --model {small[0]} --seq 32 --optimizer adamw --commit abc --out {out}".split()
    words += ["--planners", "nop,chen,chen:variant=sqrt", "--budgets", "50%,100%", "--peers", "checkpoint"]
    monkeypatch.setattr(sys, "argv", words)
    with planned_for(machine):
        bench.main()
    rows = list(csv.DictReader(out.open()))
    assert [(r["name"], r["setting"], r["status"]) for r in rows] == [
        ("eager", "plain", "ok"), ("eager", "plain, again", "ok"), ("chen", "50%", "does not fit"), ("chen", "100%", "ok"),
        ("checkpoint", "every block", "ok"), ("nop", "50%", "does not fit"), ("nop", "100%", "ok"),
        ("chen:variant=sqrt", "50%", "does not fit"), ("chen:variant=sqrt", "100%", "ok"),
    ]  # fmt: skip
    assert all(r["losses_equal"] == "True" for r in rows if r["status"] == "ok")
    assert rows[8]["same_as"] == "chen at 100%" and rows[8]["measured_s"] == rows[3]["measured_s"]
    assert {r["commit"] for r in rows} == {"abc"} and {r["hardware"] for r in rows} == {"small"}
    chen, checkpoint, nop = (float(rows[n]["share"]) for n in (3, 4, 6))
    assert checkpoint < chen < nop and nop == pytest.approx(1, abs=0.01)
    monkeypatch.setattr(sys, "argv", [*words, "--time-limit", "0"])
    capsys.readouterr()
    with planned_for(machine):
        bench.main()
    assert len(list(csv.DictReader(out.open()))) == len(rows) + 2  # only what everything is held against
    assert "7 rows were not begun" in capsys.readouterr().out


def test_a_plan_is_held_against_the_best_of_the_peer(bench):
    points = [(1.0, 0.0), (0.6, 0.1), (0.5, 0.3), (0.4, 0.2), (0.9, 0.5)]  # two of them are worse in both
    assert bench.best_points(points) == [(0.4, 0.2), (0.6, 0.1), (1.0, 0.0)]
    assert bench.interpolate(points, 0.5) == pytest.approx(0.15) and bench.interpolate(points, 0.8) == pytest.approx(0.05)
    assert bench.interpolate(points, 0.3) is None and bench.interpolate(points, 1.2) == 0.0
    peer = {"kind": "peer", "name": "compile", "overhead_over": "compile, ratio 1"}
    rows = [{**peer, "share": x, "overhead": y, "measured_peak": 100 * x} for x, y in points]
    ours = {"kind": "planner", "name": "p", "setting": "50%", "share": 0.5, "measured_peak": 40}
    (good,) = bench.verdict([*rows, {**ours, "overhead": 0.15}])
    assert "at this share +15.0% (ours <= it)" in good and "at these bytes +20.0% (ours <= it)" in good
    (bad,) = bench.verdict([*rows, {**ours, "overhead": 0.21}])
    assert bad.count("ours is MORE") == 2
    (low,) = bench.verdict([*rows, {**ours, "overhead": 0.21, "share": 0.1, "measured_peak": 10}])
    assert low.count("not reached") == 2
