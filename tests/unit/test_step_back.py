"""Another plan in the middle of a run, and stepping back to a faster one."""

import copy

import pytest
import torch

import holdall
from holdall.actions.place import Place
from holdall.actions.recompute import Recompute
from holdall.planners._finish import finish
from holdall.planners.nop import Nop
from holdall.runtime.step_back import LOOK, WARM, StepBack
from holdall.testing.contracts import problem_for
from holdall.testing.worlds import family
from holdall.types import Outcome, Plan


def loop(model, batch, optimizer, steps):
    losses = []
    for step in range(steps):
        torch.manual_seed(step)
        loss = model(*batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("when", ["step", "spill"])
def test_a_plan_can_be_changed_in_the_middle_of_a_run(when):
    model, batch = family("tied")
    reference = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    trace = holdall.trace(model, batch, optimizer=optimizer)
    layers = [b for b in trace.blocks if "layers" in b.name]
    plans = [
        finish(Nop(), problem_for(trace), [Place.all(trace, update="host", when=when)]),
        finish(Nop(), problem_for(trace), [Recompute.of(trace, [b]) for b in layers]),
        finish(Nop(), problem_for(trace), [Place.all(trace, update="through", when=when)]),
    ]
    expected = loop(reference, batch, torch.optim.AdamW(reference.parameters(), lr=1e-2, fused=True), 9)
    got = []
    with holdall.apply(plans[0], model, optimizer, enforce=False) as harness:
        for step in range(9):
            if step in (3, 6):
                harness.switch(plans[step // 3])
            torch.manual_seed(step)
            loss = model(*batch)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            got.append(float(loss.detach()))
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
    step_back = StepBack(plan, fallback)
    for _ in range(4 * (WARM + LOOK)):
        harness.step_seconds.append(mine if harness.plan is plan else simple)
        step_back.after_step(harness, notes.append)
    assert harness.switched == switched
    assert len(notes) == (2 if switched else 0)
