"""SuperOffload (ASPLOS 2026): speculative updates on the host, exact undo, and the tail that stays on the device."""

import copy
import gc
from dataclasses import replace
from functools import cache

import pytest
import torch

import holdall
from holdall.errors import InvalidInput
from holdall.planners.superoffload import SuperOffload, judged, place_tail
from holdall.planning.finish import finish
from holdall.problem import make_problem
from holdall.simulator import simulate
from holdall.testing.worlds import family, machine
from holdall.tracing.step import default_loss

MACHINE = replace(machine(overlap=True), updates=5e6)  # the host takes about as long as the device
HUGE = 1e9


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


@cache
def traced(precision="bf16"):
    model, batch = family("tied")
    return holdall.trace(model, batch, optimizer=adamw(model), precision=precision)


def planned(hardware=MACHINE, precision="bf16", **options):
    return holdall.plan(traced(precision), planner="superoffload", hardware=hardware, **options)


def train(model, batch, optimizer, norms):
    """A step for every norm to clip to."""
    torch.manual_seed(1)
    losses = []
    for norm in norms:
        loss = default_loss(model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def values(model, optimizer):
    states = [v for _, s in sorted(optimizer.state_dict()["state"].items()) for _, v in sorted(s.items())]
    return [torch.as_tensor(v).detach().clone() for v in (*model.parameters(), *states)]


def run(ahead, norms):
    """Losses, values and how often speculation was right."""
    model, batch = family("tied")
    optimizer = adamw(model)
    problem = make_problem(traced(), hardware=MACHINE)
    place = replace(place_tail(problem, 1, flows=False), **({} if ahead else {"ahead": False, "when": "step"}))
    assert place.ahead == ahead
    gc.collect()
    with holdall.apply(finish(SuperOffload(), problem, [place]), model, optimizer, enforce=False) as harness:
        losses = train(model, batch, optimizer, norms)
        right = list(harness.engine.were_ahead)
        found = values(model, optimizer)
    return losses, found, right


@pytest.mark.parametrize("norms", [[1e-4] * 4, [HUGE] * 4, [HUGE, HUGE, 1e-4, HUGE, HUGE]], ids=["every", "none", "one"])
def test_clipped_or_not_the_bits_are_those_without_speculation(norms):
    """Check (1) of the catalogue: also where a step is clipped after its update had begun, which is then made again."""
    losses, found, right = run(True, norms)
    expected, theirs, _ = run(False, norms)
    assert losses == expected
    assert all(torch.equal(a, b) for a, b in zip(found, theirs, strict=True))
    assert (True in right) == (HUGE in norms)  # it did speculate
    assert norms.count(1e-4) != 1 or False in right  # and was wrong once


def test_a_step_that_is_skipped_leaves_every_byte_as_it_was():
    """Check (2): a gradient is infinite, the scaler skips the step; weights and moments are those of before."""
    model, batch = family("tied")
    optimizer = adamw(model)
    problem = make_problem(traced(), hardware=MACHINE)
    plan = finish(SuperOffload(), problem, [place_tail(problem, 1, flows=False)])
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    with holdall.apply(plan, model, optimizer, enforce=False):

        def step(factor=1.0):
            scaler.scale(default_loss(model, batch) * factor).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            return values(model, optimizer)

        step()
        before = step()
        after = step(float("inf"))
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        assert not all(torch.equal(a, b) for a, b in zip(after, step(), strict=True))  # and training goes on


def test_updates_run_beside_backward_where_nothing_is_clipped():
    """Check (3): the host begins before the device's backward is over, and only where speculation is on."""
    problem = replace(make_problem(traced(), hardware=MACHINE), clipped=False)
    begun = {}
    for ahead in (True, False):
        place = replace(place_tail(problem, 1, flows=False), ahead=ahead)
        outcome = simulate(problem, [place], full=True)
        backward = max(s.end for s in outcome.lanes if s.lane == "compute")
        forward = backward / 3
        host = [s.start for s in outcome.lanes if s.lane == "host"]
        assert host
        begun[ahead] = sum(forward < start < backward for start in host), outcome.seconds
    assert begun[True][0] > begun[False][0]
    assert begun[True][1] < begun[False][1]


@pytest.mark.parametrize("rate", [1e6, 5e6, 5e7])
@pytest.mark.parametrize("share", [0.8, 0.45])
def test_the_tail_is_the_argmin_of_the_simulated_step(rate, share):
    """Check (4), against all counts: the shortest step of those that fit."""
    hardware = replace(MACHINE, updates=rate)
    problem = make_problem(traced(), hardware=hardware)
    budget = int(share * simulate(problem, []).peak["cpu"])
    problem = replace(problem, budget={**problem.budget, "cpu": budget})
    plan = planned(hardware, budget=budget, recompute=False)
    every = [judged(problem, [place_tail(problem, n, flows=False)]) for n in range(len(traced().units) + 1)]
    least = min(seconds for missing, seconds in every if not missing)
    assert plan.about.seconds_if_not_clipped == pytest.approx(least, rel=1e-9)


def test_a_slower_host_gets_no_more_units_and_asked_ratios_are_kept():
    trace = traced()
    budget = int(0.95 * planned(ratio=0.0, recompute=False).predicted.peak["cpu"])
    on_host = []
    for rate in (1e9, 5e6, 1e6):
        place = next(a for a in planned(replace(MACHINE, updates=rate), budget=budget).actions if a.name == "place")
        on_host.append(sum(update == "host" for _, _, update in place.units))
    assert on_host == sorted(on_host, reverse=True) and on_host[0] > on_host[-1]
    place = next((a for a in planned(replace(MACHINE, updates=1.0), recompute=True).actions if a.name == "place"), None)
    assert place is None or all(update == "device" for _, _, update in place.units)  # it may be left with none
    total, largest = sum(u.numel for u in trace.units), max(u.numel for u in trace.units)
    for ratio in (0.0, 0.3, 0.5, 1.0):
        place = next(a for a in planned(ratio=ratio).actions if a.name == "place")
        away = sum(u.numel for u, row in zip(trace.units, place.units, strict=True) if row[2] == "host")
        assert abs(away - ratio * total) <= largest / 2


def test_weights_flow_where_they_cannot_stay():
    stays = planned(ratio=1.0, recompute=True).predicted.peak["cpu"]
    plan = planned(budget=stays - 1, recompute=True)
    assert any(w == "streamed" for a in plan.actions if a.name == "place" for _, w, _ in a.units)
    with pytest.raises(holdall.Infeasible):
        planned(budget=stays // 4)


@pytest.mark.parametrize("reads_gradients", [True, False])
def test_in_float32_steps_are_plain_trainings_bit_for_bit(reads_gradients):
    """Through `fit`, with and without clipping; nothing to speculate on where nobody reads gradients."""
    model, batch = family("tied")
    reference = copy.deepcopy(model)
    norms = [0.1] * 3 if reads_gradients else [HUGE] * 3

    def loop(model, optimizer):
        if reads_gradients:
            return train(model, batch, optimizer, norms)
        torch.manual_seed(1)
        losses = []
        for _ in norms:
            loss = default_loss(model, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    expected = loop(reference, adamw(reference))
    plain = holdall.plan(traced(None), planner="nop", hardware=MACHINE).predicted.peak["cpu"]
    optimizer = adamw(model)
    budget = int(0.7 * plain)
    with holdall.fit(
        model, optimizer, batch, budget=budget, planner="superoffload", hardware=MACHINE, reads_gradients=reads_gradients
    ) as harness:
        assert loop(model, optimizer) == expected
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), reference.parameters(), strict=True))
    assert {a.name for a in harness.plan.actions} >= {"place"}


def test_wrong_options_are_refused():
    with pytest.raises(InvalidInput, match="ratio"):
        planned(ratio=1.5)
