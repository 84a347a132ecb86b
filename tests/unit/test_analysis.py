"""Questions before a run: phases against the ledger, searches against trying everything, prices against the simulator."""

import gc
from dataclasses import replace

import pytest
import torch
from torch.utils._pytree import tree_leaves

from holdall import api
from holdall.actions.recompute import Recompute
from holdall.analysis import (
    alternatives,
    deciding,
    largest,
    needed,
    pareto,
    phases,
    smallest_budget,
    tied_bytes,
    trace_evaluation,
)
from holdall.analysis.pareto_page import pareto_page
from holdall.cost.roofline import cost_trace
from holdall.errors import Infeasible, InvalidInput
from holdall.models import build, describe
from holdall.planning.menus import kind_of, try_offered
from holdall.runtime.budget.ledger import Ledger
from holdall.simulator import simulate
from holdall.testing.worlds import Convnet, Tied, chain, family, machine
from holdall.tracing.step import default_loss
from holdall.types import Problem

CLASSES = {"tied": Tied, "convnet": Convnet}


def problem_of(trace, hardware=None):
    hardware = hardware or machine()
    return Problem(trace=cost_trace(trace, hardware), hardware=hardware, budget={})


def phases_of(model, batch, optimizer, *, planner="nop", evaluation=True, longest=None, **options):
    trace = api.trace(model, batch, optimizer=optimizer)
    plan = api.plan(trace, hardware=machine(), planner=planner, **options)
    traced = trace_evaluation(model, batch) if evaluation else None
    found = phases(problem_of(trace), plan, evaluation=traced, longest=longest, tied=tied_bytes(model))
    return {p.name: p for p in found}, plan


def train_step(model, optimizer, batch):
    loss = default_loss(model, batch)
    loss.backward()
    optimizer.step()
    model.zero_grad(set_to_none=True)
    return loss


# phases


@pytest.mark.parametrize("name", ["tied", "convnet", "tiny-gpt2"])
def test_load_first_step_steady_step_and_evaluation_are_what_the_ledger_counts(name):
    _, batch = family(name)
    with Ledger() as loading:
        model = build(describe(name), device="cpu", overrides={"num_hidden_layers": 1}) if "-" in name else CLASSES[name]()
    gc.collect()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    said, _ = phases_of(model, batch, optimizer)
    assert said["load"].device == loading.peak and loading.live == loading.peak - tied_bytes(model)
    peaks = []
    with Ledger(seed=[*model.parameters(), *model.buffers(), *tree_leaves(batch)]) as ledger:
        for _ in range(2):
            ledger.restart()
            loss = default_loss(model, batch)  # a loop holds the one before until here
            loss.backward()
            optimizer.step()
            model.zero_grad(set_to_none=True)
            peaks.append(ledger.peak)
        model.eval()
        ledger.restart()
        with torch.no_grad():
            default_loss(model, batch)
        peaks.append(ledger.peak)
    assert loss is not None  # a loop still holds it while it evaluates
    assert [said[p].device for p in ("first step", "steady step", "evaluation")] == peaks
    assert said["first step"].device <= said["steady step"].device
    assert {said[p].how for p in ("first step", "steady step", "evaluation")} == {"simulated"}


def test_the_first_step_under_a_recompute_plan_is_what_the_ledger_counts():
    model, batch = family("tied")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    said, plan = phases_of(model, batch, optimizer, planner="chen", variant="all")
    assert plan.count()["recompute"] > 0
    peaks = []
    ledger = Ledger(seed=[*model.parameters(), *model.buffers(), *tree_leaves(batch)])
    with api.apply(plan, model, optimizer, enforce=False), ledger:
        for _ in range(2):
            ledger.restart()
            train_step(model, optimizer, batch)
            peaks.append(ledger.peak)
    assert [said["first step"].device, said["steady step"].device] == peaks


def test_an_evaluation_from_the_training_trace_is_a_bound_and_exact_without_dropout():
    model, batch = family("tied")
    exact, _ = phases_of(model, batch, None)
    bound, _ = phases_of(model, batch, None, evaluation=False)
    assert exact["evaluation"].device < bound["evaluation"].device and bound["evaluation"].how == "at most"
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    assert phases_of(model, batch, None, evaluation=False)[0]["evaluation"].device == exact["evaluation"].device


def test_tracing_an_evaluation_leaves_every_mode_as_it_was():
    model, batch = family("tied")
    model.layers[1].eval()
    before = [m.training for m in model.modules()]
    trace = trace_evaluation(model, batch)
    assert [m.training for m in model.modules()] == before and True in before and False in before
    assert not trace.saves and all(op.site.phase.value == "forward" for op in trace.ops)


def test_the_longest_batch_is_the_same_plan_on_the_longer_trace():
    model, _ = family("tied")
    short, long = ((torch.zeros(2, n, dtype=torch.long),) for n in (8, 24))
    longest = api.trace(model, long)
    said, plan = phases_of(model, short, None, planner="chen", longest=longest, variant="all")
    expected = api.plan(longest, hardware=machine(), planner="chen", variant="all").predicted.peak["cpu"]
    assert plan.count() and said["longest batch"].device == expected > said["steady step"].device
    assert deciding(tuple(said.values()))["device"].name == "longest batch"


def test_a_checkpoint_is_as_large_as_said(tmp_path):
    from holdall.training.checkpoint import save_checkpoint

    model, batch = family("tiny-gpt2")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    train_step(model, optimizer, batch)
    said, _ = phases_of(model, batch, optimizer, evaluation=False)
    folder = save_checkpoint(tmp_path, 1, model=model, optimizer=optimizer, about={}, keep=1)
    written = sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())
    assert said["save"].disk == pytest.approx(written, rel=0.02) and said["save"].disk == said["resume"].disk


def test_a_plan_that_places_states_is_told_apart():
    model, batch = family("tied")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    said, plan = phases_of(model, batch, optimizer, planner="zero_offload", evaluation=False)
    assert said["first step"].how == "at most" and said["first step"].device == plan.predicted.peak["cpu"]
    assert said["steady step"].host == plan.predicted.peak["far"] > 0 and said["steady step"].pinned == 0  # no GPU
    assert said["load"].device == sum(p.nbytes for p in model.parameters()) + tied_bytes(model)
    with api.apply(plan, model, optimizer, enforce=False) as harness:
        train_step(model, optimizer, batch)
        assert harness.measured().peak["cpu"] <= said["first step"].device


# the largest


@pytest.fixture(scope="module")
def some_plan():
    return api.plan(chain([40, 40]), hardware=machine(), planner="nop")


@pytest.mark.parametrize("step", [1, 3])
@pytest.mark.parametrize("start", [1, 5, 40])
@pytest.mark.parametrize("limit", [3, 4, 7, 8, 17, 31, 32])
def test_the_largest_is_what_trying_everything_finds(some_plan, limit, start, step):
    tried = []

    def make_plan(n):
        tried.append(n)
        if n > limit:
            raise Infeasible("too large", smallest=n)
        return some_plan

    found = largest(make_plan, start=start, step=step, most=200)
    assert found.value == max(n for n in range(step, 200, step) if n <= limit)
    assert found.beyond.value == found.value + step and isinstance(found.beyond.error, Infeasible)
    assert len(tried) == len(set(tried)) <= 16 and all(n % step == 0 for n in tried)


def test_the_largest_within_a_share_takes_fewer_trials(some_plan):
    def make_plan(n):
        if n > 98_765:
            raise Infeasible("too large", smallest=n)
        return some_plan

    near, exact = (largest(make_plan, start=64, step=64, near=share) for share in (0.02, 0.0))
    assert exact.value == 98_765 // 64 * 64
    assert 0.98 * exact.value <= near.value <= exact.value < near.beyond.value <= 1.02 * near.value
    assert len(near.probes) <= len(exact.probes) - 4


def test_the_largest_stops_where_the_model_ends_and_where_it_is_told(some_plan):
    def make_plan(n):
        if n > 10:
            raise InvalidInput("there are 10 positions")
        return some_plan

    ends = largest(make_plan, start=64)
    assert ends.value == 10 and "positions" in ends.beyond.error.fact
    assert largest(make_plan, most=8).value == 8 and largest(make_plan, most=8).beyond is None


def test_nothing_that_fits_is_said_as_the_planner_says_it():
    def make_plan(n):
        raise Infeasible(f"{n} does not fit", smallest=n)

    with pytest.raises(Infeasible, match="1 does not fit"):
        largest(make_plan, start=9)


def test_the_largest_batch_of_a_real_model_fits_and_one_more_does_not():
    model, _ = family("tied")

    def make_plan(n):
        trace = api.trace(model, (torch.zeros(n, 16, dtype=torch.long),))
        return api.plan(trace, hardware=machine(), planner="chen", budget=400_000, variant="all")

    found = largest(make_plan)
    assert needed(make_plan(found.value)) <= 400_000
    with pytest.raises(Infeasible):
        make_plan(found.value + 1)


# the smallest budget, the curve

TRACE = chain([300, 100, 250, 180, 220, 90], [1.0, 2.0, 1.0, 3.0, 1.0, 2.0])


def plan_for(budget):
    return api.plan(TRACE, hardware=machine(), planner="auto", budget=budget, allow=["recompute"])


def feasible(budget, slowest=float("inf")):
    try:
        return plan_for(budget).predicted.seconds <= slowest
    except Infeasible:
        return False


@pytest.mark.parametrize("keep", [None, 0.8])
def test_the_smallest_budget_is_enough_and_a_grain_less_is_not(keep):
    found = smallest_budget(plan_for, most=5000, keep_speed=keep)
    slowest = found.fastest.predicted.seconds / keep if keep else float("inf")
    assert feasible(found.budget, slowest) and not feasible(found.below, slowest)
    assert 0 < found.budget - found.below <= 0.01 * needed(found.fastest) + 1
    assert found.plan.predicted.seconds <= slowest and needed(found.plan) <= found.budget
    if keep:
        assert found.speed >= keep and found.budget > smallest_budget(plan_for, most=5000).budget


def test_a_share_of_speed_that_makes_no_sense_is_refused():
    with pytest.raises(InvalidInput, match="share of speed"):
        smallest_budget(plan_for, most=5000, keep_speed=1.5)


def test_the_curve_has_plans_within_their_budgets_and_knows_which_are_best():
    curve = pareto(plan_for, most=5000, points=5)
    assert len(curve.points) + len(curve.refused) == 5
    assert [p.budget for p in curve.points] == sorted(p.budget for p in curve.points)
    for p in curve.points:
        assert needed(p.plan) <= p.budget
        naive = not any(o.budget < p.budget and o.seconds <= p.seconds for o in curve.points)
        assert p.is_best == naive
    assert curve.points[0].seconds > curve.points[-1].seconds


def test_the_page_needs_nothing_else_and_says_that_it_is_a_prediction():
    curve = pareto(plan_for, most=5000, points=4)
    page = pareto_page(curve, title="<b>x</b>", facts={"planner": "a & b"})
    assert "<b>x</b>" not in page and "&lt;b&gt;x" in page and "a &amp; b" in page
    assert "predicted, not measured" in page and "prefers-color-scheme: dark" in page
    assert "http://" not in page and "https://" not in page and "src=" not in page
    assert page.count('class="point') == len(curve.points) and page.count("<tr>") == len(curve.points) + 1


# alternatives


def test_the_price_of_recomputing_is_what_the_simulator_adds():
    model, batch = family("tied")
    problem = problem_of(api.trace(model, batch))
    found = alternatives(problem)
    chosen = next(a for a in found if a.what == "recompute" and a.where == "DropoutBlock")
    blocks = [b for b in try_offered(problem).chain if b.kind == "DropoutBlock"]
    actions = [Recompute.of(problem.trace, [b]) for b in blocks]
    added = simulate(problem, actions).seconds - simulate(problem, []).seconds
    assert chosen.count == len(blocks) == 4 and len({kind_of(b) for b in blocks}) == 1
    assert chosen.seconds == pytest.approx(added, rel=1e-6)
    assert chosen.per_gib == pytest.approx(added * 2**30 / chosen.freed)
    assert [a.per_gib_unhidden for a in found] == sorted(a.per_gib_unhidden for a in found)


def test_copies_have_a_price_when_nothing_hides_them():
    model, batch = family("tied")
    problem = problem_of(api.trace(model, batch), machine(overlap=True, read=1e8, write=1e8))
    offload = next(a for a in alternatives(problem) if a.what == "offload")
    assert offload.copying > 0 and offload.per_gib_unhidden > offload.per_gib
    slower = replace(problem, hardware=machine(overlap=True, read=5e7, write=5e7))
    assert next(a for a in alternatives(slower) if a.what == "offload").copying == pytest.approx(2 * offload.copying, rel=0.01)
