"""What makes a search short must not change what it finds."""

import random
from dataclasses import replace

import pytest
import torch

import holdall
from holdall.actions.offload import replayed
from holdall.actions.place import Place
from holdall.actions.recompute import WHOLE
from holdall.cost.updates import host_seconds
from holdall.planners.auto import Auto, PlacementSearch
from holdall.planners.auto.bounds import Bounds, Extra
from holdall.planners.auto.placements import Guesses
from holdall.planners.auto.search import Search
from holdall.problem import bare_problem, make_problem
from holdall.simulator import Lowering, simulate
from holdall.testing.states import Layer
from holdall.testing.worlds import machine


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(Layer() for _ in range(6))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.float().square().mean()


@pytest.fixture(scope="module", params=[None, "bf16"])
def problem(request):
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    trace = holdall.trace(
        model, torch.randn(64, 8), optimizer=optimizer, loss=lambda model, x: model(x), precision=request.param
    )
    return make_problem(trace, hardware=machine(overlap=True, read=1e8, write=1e8))


@pytest.mark.parametrize("seed", range(20))
def test_guesses_find_the_most_that_fit(seed):
    draw = random.Random(seed)
    grown = [draw.randint(1, 50) for _ in range(draw.randint(1, 40))]
    real = [sum(size * draw.uniform(0.5, 2.0) for size in grown[:n]) - draw.uniform(0, 400) for n in range(len(grown) + 1)]
    real = [int(max(real[: n + 1])) for n in range(len(real))]  # never less for more units
    asked = []
    sizes = [sum(grown[:n]) for n in range(len(grown) + 1)]
    found = Guesses().most_that_fit(lambda n: asked.append(n) or real[n], sizes)
    assert found == max((n for n, excess in enumerate(real) if excess <= 0), default=None)
    assert len(set(asked)) == len(asked)


def test_one_byte_too_many_does_not_fit():
    assert Guesses().most_that_fit(lambda n: n, [0, 10, 20]) == 0
    assert Guesses().most_that_fit(lambda n: n + 1, [0, 10, 20]) is None


def test_no_bound_is_above_what_the_simulator_says(problem):
    """Every candidate that a search tries, held against the bound that it would have been left out by."""
    checked = []

    class Watched(PlacementSearch):
        def _is_in_vain(self, problem, around, extra):
            place = next((a for a in around if isinstance(a, Place)), None)
            checked.append(self.bounds.step(place, extra))
            return False

        def attempt(self, label, actions):
            made = super().attempt(label, actions)
            if made is not None and checked:
                assert checked.pop() <= made.outcome.seconds
                checked.append(0.0)
            checked.clear()
            return made

    less = bare_problem(problem.trace, problem.hardware, budget=simulate(problem, []).peak["cpu"] * 6 // 10)
    Watched(less, via_device=None, ahead=True).run(less)


def test_a_bound_is_the_longest_of_three_amounts_of_work(problem):
    """All units on the device; all on the host, their weights there or streamed; all via the device."""
    trace, hardware = problem.trace, problem.hardware
    slow = replace(problem, hardware=replace(hardware, tiers=(hardware.home, replace(hardware.far, read=2e3, write=1e3))))
    size = {
        kind: sum(trace.tensors[x].nbytes for u in trace.units for x in getattr(u, kind))
        for kind in ("grads", "states", "weights")
    }
    compute = sum(op.seconds for op in trace.ops if op.site.phase.value != "step")
    host = sum(host_seconds(u, trace, slow.hardware) for u in trace.units)
    grads, states = size["grads"], size["states"]
    for weights, update, into, out in (
        ("resident", "device", 0, 0),
        ("resident", "host", grads, grads),
        ("streamed", "host", 2 * size["weights"], grads),
        ("streamed", "via_device", states + grads, grads + states),
    ):
        place = Place.of(trace, {u.name: (weights, update) for u in trace.units})
        expected = max(compute + 1.0, (into + 500) / 2e3, (out + 700) / 1e3, host if update == "host" else 0.0)
        assert Bounds(slow).step(place, Extra(1.0, 700, 500)) == pytest.approx(0.999 * expected, rel=1e-9)
        still = replace(slow, hardware=replace(slow.hardware, overlap=False))
        assert Bounds(still).step(place, Extra(1.0, 700, 500)) == pytest.approx(0.999 * (compute + 1.0), rel=1e-9)


@pytest.mark.parametrize("share", [80, 60, 40])
def test_leaving_candidates_out_changes_no_plan(problem, share, monkeypatch):
    less = bare_problem(problem.trace, problem.hardware, budget=simulate(problem, []).peak["cpu"] * share // 100)
    try:
        short = Auto()(less)
    except holdall.Infeasible:
        pytest.skip("nothing fits")
    monkeypatch.setattr(Search, "_is_in_vain", lambda *_: False)
    assert Auto()(less).actions == short.actions


def test_schedules_that_are_known_are_those_that_would_be_made(problem):
    search = PlacementSearch(problem, via_device=None, ahead=True)
    lowering = Lowering(problem)
    for spread in search.placements.passing(search._least_of_all()):
        for choice in (WHOLE, replayed(late=problem.hardware.overlap), WHOLE):
            actions = (*search.uniform(choice), search.placements.at(spread))
            assert simulate(problem, actions, lowering=lowering) == simulate(problem, actions, checked=True)
