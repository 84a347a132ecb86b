"""Published relations between planners: on small nets, and in the rows that `benchmarks/paper_relations.py` has kept."""

import importlib
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

import holdall
from holdall.actions.offload import Offload
from holdall.catalog import orderings
from holdall.machine.presets import gpu_names
from holdall.planners.pofo import Pofo
from holdall.planners.rotor import Rotor
from holdall.simulator import simulate
from holdall.testing.contracts import problem_for
from holdall.testing.placed import trace_of
from holdall.testing.worlds import chain, machine

ROOT = Path(__file__).parents[2]


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("paper_relations")


@cache
def seconds(name, planner, budget, **options):
    there = machine(overlap=True, read=3e7, write=3e7)
    try:
        return holdall.plan(trace_of(name), planner=planner, hardware=there, budget=budget, **options).predicted.seconds
    except holdall.Infeasible as refused:
        return -refused.smallest


@pytest.mark.parametrize(
    ("faster", "slower"),
    [("superneurons", "vdnn"), ("capuchin", "vdnn"), ("tsplit", "vdnn"), ("tsplit", "superneurons"), ("pofo", "rotor")],
)
def test_the_published_order_holds_in_the_least_memory_of_the_slower(faster, slower):
    """Simulated, on a slow link; in the catalogue's table of orders."""
    assert (faster, slower) in {(o.faster, o.slower) for o in orderings()}
    least = -seconds("convnet", slower, 1)
    assert 0 < seconds("convnet", faster, least) <= 1.001 * seconds("convnet", slower, least)


def test_pofo_copies_beside_as_many_blocks_as_a_copy_needs():
    """Blocks of 1 s, and copies of 2.5 s: three blocks leave for nothing where rotor computes for 1.5 s more. And more memory
    is never slower."""
    problem = problem_for(chain([100] * 10), overlap=True)
    problem = replace(problem, hardware=machine(overlap=True, read=40, write=40))
    plain = simulate(problem, [])
    found = []
    for share in (0.8, 0.7, 0.6, 0.5):
        less = replace(problem, budget={**problem.budget, "cpu": int(share * plain.peak["cpu"])})
        both, one = Pofo()(less), Rotor()(less)
        assert both.predicted.seconds < one.predicted.seconds
        assert any(a.until for a in both.actions if isinstance(a, Offload))
        found.append(both.predicted.seconds)
    assert found[0] == plain.seconds and found == sorted(found)


def test_a_verdict_follows_from_the_ratios(script):
    up_to = script.Relation(name="x", system="X", claim="up to 2 times", rows=list, factor=2.0)
    assert [script.verdict(up_to, r) for r in ([], [1.2, 1.9], [1.0, 1.2], [0.9, 2.5], [0.9])] == [
        "not tried",
        "holds",
        "order only",
        "in part",
        "no",
    ]
    assert script.verdict(script.Relation(name="x", system="X", claim="", rows=list, factor=0.5), [0.6, 0.99]) == "holds"
    exactly = script.Relation(name="x", system="X", claim="", rows=list, factor=1.18, exactly=True)
    assert [script.verdict(exactly, [r]) for r in (1.19, 1.3)] == ["holds", "no"]


def test_the_page_has_the_kept_rows_and_says_why_a_relation_does_not_hold(script):
    kept = script.read(ROOT / script.KEPT)
    assert {r["kind"] for r in kept} == {"simulated"}
    assert {r["relation"] for r in kept} == {r.name for r in script.RELATIONS}
    assert {r["hardware"].partition(",")[0] for r in kept} <= set(gpu_names())
    page = (ROOT / "docs" / "swap.md").read_text(encoding="utf-8")
    assert script.table(kept) in page
    for relation in script.RELATIONS:
        says = script.verdict(relation, [float(r["ratio"]) for r in kept if r["relation"] == relation.name])
        assert says == "holds" or relation.why, relation.name


def test_factors_are_those_of_the_catalogue(script):
    """A factor that both tables have is the same in both."""
    published = {f"{o.faster}-{o.slower}": o.factor for o in orderings() if o.factor}
    ours = {r.name: r.factor for r in script.RELATIONS}
    assert {name: ours[name] for name in published.keys() & ours.keys()} == {
        name: published[name] for name in published.keys() & ours.keys()
    }
    assert published.keys() & ours.keys() >= {"capuchin-vdnn", "tsplit-vdnn", "tsplit-superneurons"}
