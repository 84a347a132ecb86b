"""Plans with a layout: the budget counts what the arena and the tensors outside of it take, and `auto` gets what that saves."""

from dataclasses import replace

import pytest
import torch

import holdall
from holdall.errors import Infeasible
from holdall.experiments.request import budget_leaving, plain_outcome
from holdall.machine.presets import gpu
from holdall.packing import LaidOut
from holdall.packing.check import check_layout
from holdall.planning.finish import with_traced
from holdall.problem import make_problem
from holdall.simulator.allocators import ArenaModel, Expandable, HostArenaModel
from holdall.simulator.lifetimes import PlannedStep
from holdall.testing.worlds import family, machine
from holdall.types.arena import is_placed
from holdall.units import GiB, MiB

CARD = "rtx-4090"


@pytest.fixture(scope="module")
def traced():
    """A step on a GPU whose activations are most of its memory, with tensors large and small."""
    torch.manual_seed(0)
    layers = [m for _ in range(24) for m in (torch.nn.Linear(256, 256), torch.nn.GELU())]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(256, 1))
    batch = torch.zeros(32768, 256)
    loss = lambda model, batch: model(batch).sum()  # noqa: E731
    return holdall.trace(model, batch, optimizer=torch.optim.AdamW(model.parameters()), loss=loss, device="cuda")


def lifetimes_of_plan(trace, plan, hardware):
    problem = make_problem(trace, hardware=hardware)
    return PlannedStep.of(problem, with_traced(problem, plan.actions)).run()[0]


@pytest.mark.parametrize("layout", ["best_fit", "stalloc", "greedy_by_size"])
@pytest.mark.parametrize("planner", ["nop", "chen"])
def test_a_plan_counts_its_arena_and_what_lies_outside(traced, planner, layout):
    plan = holdall.plan(traced, planner=planner, hardware=CARD, layout=layout)
    lifetimes, arena = lifetimes_of_plan(traced, plan, CARD), plan.about.layout
    placed = [t for n, t in enumerate(lifetimes.tensors) if is_placed(lifetimes, n, arena.smallest)]
    assert tuple(t.size for t in placed) == arena.sizes
    check_layout(replace(lifetimes, tensors=tuple(placed)), LaidOut(reserved=arena.reserved, offsets=arena.offsets))
    others = replace(lifetimes, tensors=tuple(t for t in lifetimes.tensors if t not in placed)).load
    reserved = plan.predicted.reserved
    assert arena.reserved + others <= reserved <= arena.reserved + others + 64 * MiB
    assert reserved >= plan.predicted.peak["gpu"]


def test_without_a_layout_nothing_changes(traced):
    plan = holdall.plan(traced, planner="chen", hardware=CARD)
    assert plan.about.layout is None
    assert plan.predicted.reserved == Expandable.taken(plan.predicted.peak["gpu"])


def test_a_layout_leaves_more_of_a_budget_to_the_step(traced):
    budget = budget_leaving(plain_outcome(traced, gpu(CARD)), 0.5)
    plain, laid = (holdall.plan(traced, hardware=CARD, budget={"gpu": budget}, layout=name) for name in (None, "best_fit"))
    assert laid.predicted.reserved <= budget
    assert laid.predicted.peak["gpu"] > plain.predicted.peak["gpu"]
    assert laid.predicted.seconds <= plain.predicted.seconds


def test_smaller_budgets_are_feasible_with_a_layout(traced):
    smallest = {}
    for layout in (None, "best_fit"):
        with pytest.raises(Infeasible) as error:
            holdall.plan(traced, hardware=CARD, budget="1MiB", allow=["recompute"], layout=layout)
        smallest[layout] = error.value.smallest
    assert smallest["best_fit"] < smallest[None]
    budget = (smallest["best_fit"] + smallest[None]) // 2
    plan = holdall.plan(traced, hardware=CARD, budget=budget, allow=["recompute"], layout="best_fit")
    assert plan.predicted.reserved <= budget
    with pytest.raises(Infeasible):
        holdall.plan(traced, hardware=CARD, budget=budget, allow=["recompute"])


def test_on_a_host_the_arena_counts_too():
    model, batch = family("convnet")
    trace = holdall.trace(model, batch, optimizer=torch.optim.Adam(model.parameters(), foreach=False))
    plan = holdall.plan(trace, planner="nop", hardware=machine(), layout="best_fit")
    peak, reserved = plan.predicted.peak["cpu"], plan.predicted.reserved
    assert reserved >= peak
    holdall.plan(trace, planner="nop", hardware=machine(), budget={"cpu": reserved}, layout="best_fit")
    with pytest.raises(Infeasible):
        holdall.plan(trace, planner="nop", hardware=machine(), budget={"cpu": peak - 1}, layout="best_fit")


def test_a_layout_that_takes_too_much_is_left_out_with_a_word():
    model, batch = family("convnet")
    trace = holdall.trace(model, batch, optimizer=torch.optim.Adam(model.parameters(), foreach=False))
    laid = holdall.plan(trace, planner="nop", hardware=machine(), layout="best_fit")
    peak = laid.predicted.peak["cpu"]
    assert laid.predicted.reserved > peak, "the layout has no hole: the test shows nothing"
    plan = holdall.plan(trace, planner="nop", hardware=machine(), budget={"cpu": peak}, layout="best_fit")
    assert plan.about.layout is None
    assert plan.predicted.peak["cpu"] == peak
    assert "with the arena of layout `best_fit` nothing fits: left out" in plan.why


def test_the_estimate_of_searches_leaves_room_for_small_tensors_and_pages():
    for live in (10 * MiB, GiB, 24 * GiB):
        assert live < HostArenaModel.taken(live) < ArenaModel.taken(live) < Expandable.taken(live)
        assert ArenaModel.taken(ArenaModel.usable(live)) <= live
