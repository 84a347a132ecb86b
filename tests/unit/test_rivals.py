"""Another plan in the middle of a run, and stepping back to a faster one."""

import copy
from dataclasses import replace

import pytest
import torch

import holdall
from holdall.actions.place import Place
from holdall.actions.recompute import Recompute
from holdall.fitting.plan_book import PlanBook
from holdall.planners.nop import Nop
from holdall.planning.finish import finish
from holdall.runtime.switching.trials import LOOK, WARM, PlanTrials
from holdall.testing.contracts import problem_for
from holdall.testing.worlds import family, machine
from holdall.types import Outcome, Plan


def train(model, batch, optimizer, n):
    """The nth step; returns its loss."""
    torch.manual_seed(n)
    loss = model(*batch)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


@pytest.mark.parametrize("when", ["step", "overlap_forward"])
def test_a_plan_can_be_changed_in_the_middle_of_a_run(when):
    model, batch = family("tied")
    reference = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    trace = holdall.trace(model, batch, optimizer=optimizer)
    layers = [b for b in trace.blocks if "layers" in b.name]
    plans = [
        finish(Nop(), problem_for(trace), [Place.all(trace, update="host", when=when)]),
        finish(Nop(), problem_for(trace), [Recompute.of(trace, [b]) for b in layers]),
        finish(Nop(), problem_for(trace), [Place.all(trace, update="via_device", when=when)]),
    ]
    plain = torch.optim.AdamW(reference.parameters(), lr=1e-2, fused=True)
    expected = [train(reference, batch, plain, n) for n in range(9)]
    got = []
    with holdall.apply(plans[0], model, optimizer, enforce=False) as harness:
        for n in range(9):
            if n in (3, 6):
                harness.switch(plans[n // 3])
            got.append(train(model, batch, optimizer, n))
        assert harness.plan is plans[2]
        assert len(harness.step_seconds) == 3
    assert got == expected
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), reference.parameters(), strict=True))


class Watched:
    """A harness whose steps take what the test says."""

    def __init__(self, plan):
        self.plan, self.step_seconds, self.switched = plan, [], []

    @property
    def step_peaks(self):
        return self.step_seconds

    def switch(self, plan):
        self.switched.append(plan.planner)
        self.plan, self.step_seconds = plan, []


def plan_of(planner, seconds):
    predicted = Outcome(source="simulated", seconds=seconds, peak={"cpu": 1})
    actions = (Recompute(blocks=(planner,)),)
    return Plan(
        planner=planner, options={}, actions=actions, predicted=predicted, trace="", signature="", budget={}, hardware=""
    )


@pytest.mark.parametrize(
    ("mine", "simple", "switched"),
    [(1.0, 1.0, []), (2.0, 1.0, ["simple"]), (2.0, 3.0, ["simple", "mine"])],
    ids=["as fast", "slower", "slower, but the fallback is slower still"],
)
def test_the_faster_plan_stays(mine, simple, switched):
    plan, fallback = plan_of("mine", 0.9), plan_of("simple", 1.0)
    harness, notes = Watched(plan), []
    rivals = PlanTrials([fallback])
    for _ in range(4 * (WARM + LOOK)):
        harness.step_seconds.append(mine if harness.plan is plan else simple)
        rivals.after_step(harness, notes.append)
    assert harness.switched == switched
    assert len(notes) == (2 if switched else 0)


def test_a_plan_made_from_what_was_measured_comes_before_the_fallback():
    plan, better, fallback = plan_of("mine", 1.0), plan_of("better", 1.2), plan_of("simple", 0.5)
    takes = {"mine": 2.0, "better": 1.5, "simple": 1.7}
    harness, notes, asked = Watched(plan), [], []

    def correct(given, seconds):
        asked.append((given, seconds))
        return better

    rivals = PlanTrials([fallback], correct)
    for _ in range(6 * (WARM + LOOK)):
        harness.step_seconds.append(takes[harness.plan.planner])
        rivals.after_step(harness, notes.append)
    assert asked == [(harness, 2.0)]
    assert harness.switched == ["better", "simple", "better"]
    assert len(notes) == 4


def test_a_plan_that_cannot_be_made_anew_is_no_error():
    def correct(harness, seconds):
        raise holdall.Infeasible("nothing fits", hint="")

    harness = Watched(plan_of("mine", 1.0))
    rivals = PlanTrials([], correct)
    for _ in range(WARM + LOOK):
        harness.step_seconds.append(2.0)
        rivals.after_step(harness, pytest.fail)
    assert harness.switched == []


def test_slow_host_updates_are_planned_for_once_they_were_measured():
    """A probe that was wrong about the host: the plan made from the measured rate updates more on the device."""
    model, batch = family("tied")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    hardware = replace(machine(overlap=True), updates=1e12)
    trace = holdall.trace(model, batch, optimizer=optimizer)
    fixed = sum(t.nbytes for t in trace.tensors.values() if t.born < 0)
    sizes = PlanBook(model, batch, tracing={"optimizer": optimizer}, planning={"budget": fixed, "hardware": hardware})
    made, traced = sizes.sample()
    sizes.expect_corrections(made, traced)

    class Slow:
        plan, expected, is_mostly_ahead = made, made.predicted, False

        class engine:
            class updater:
                rate = 1e3

    def on_host(plan):
        return sum(row[2] == "host" for a in plan.actions if a.name == "place" for row in a.units)

    correction = sizes.correct(Slow, made.predicted.seconds + 10)
    assert correction is not None
    corrected = correction.result()
    assert corrected is not None and on_host(corrected) < on_host(made)
    assert sizes.correct(Slow, made.predicted.seconds * 1.01) is None


def test_the_fallback_that_is_predicted_faster_is_tried_first():
    """Neither is better than both: the slower one is not tried where the faster one keeps what it promised."""
    harness = Watched(plan_of("mine", 0.9))
    rivals = PlanTrials([plan_of("slow", 1.4), plan_of("fast", 1.1)])
    takes = {"mine": 2.0, "slow": 1.5, "fast": 1.2}
    for _ in range(4 * (WARM + LOOK)):
        harness.step_seconds.append(takes[harness.plan.planner])
        rivals.after_step(harness, lambda _: None)
    assert harness.switched == ["fast"]
