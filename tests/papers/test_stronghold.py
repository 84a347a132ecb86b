"""STRONGHOLD (Sun et al., SC 2022): the window against brute force and events, its plans against plain training."""

import copy
import gc
import random
from dataclasses import replace
from functools import cache

import pytest
import torch

import holdall
from holdall.actions.place import Place
from holdall.actions.place.schedule import users
from holdall.errors import InvalidInput
from holdall.planners.nop import Nop
from holdall.planners.stronghold import Times, exposed, layer_times, layers_of, place_window, smallest_window
from holdall.planning.finish import finish
from holdall.planning.state_planners import treatments
from holdall.problem import make_problem
from holdall.simulator import simulate
from holdall.testing.chaos import chaos
from holdall.testing.contracts import problem_for
from holdall.testing.worlds import machine
from holdall.tracing.step import default_loss
from holdall.types import Hardware

LAYERS = 5


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(16, 64), torch.nn.Linear(64, 16)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


class Net(torch.nn.Module):
    """Equal layers between an embedding and a head that share their weight."""

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(16, 16)
        self.layers = torch.nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = torch.nn.Linear(16, 16, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return torch.nn.functional.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


def build():
    torch.manual_seed(0)
    return Net(), torch.randint(0, 16, (2, 8), generator=torch.Generator().manual_seed(3))


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


@cache
def traced(precision=None):
    model, batch = build()
    return holdall.trace(model, batch, optimizer=adamw(model), precision=precision)


def planned(hardware: Hardware | None = None, precision=None, **options):
    return holdall.plan(traced(precision), planner="stronghold", hardware=hardware or machine(overlap=True), **options)


def train(model, batch, optimizer, *, clip=True, steps=3):
    losses = []
    for _ in range(steps):
        loss = default_loss(model, batch)
        loss.backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def random_times(rng):
    count = rng.randint(1, 8)
    draw = lambda high: tuple(rng.randint(1, high) for _ in range(count))  # noqa: E731
    return Times(forward=draw(9), backward=draw(18), load=draw(12), unload=draw(6)), [rng.randint(1, 9) for _ in range(count)]


def waits_by_events(computes, loads, window, first, last):
    """An event at a time: what is over next, the load at the head of the queue or the computation."""
    queue, done, now, at, waits = [], set(range(first)) | set(range(last, len(computes))), 0, 0, 0
    link_free, running = 0, None
    while at < len(computes):
        if first <= at + window < last:
            queue.append((at + window, now))
        ready = now
        while at not in done:
            j, asked = queue.pop(0)
            running = max(link_free, asked) + loads[j]
            link_free, ready = running, max(ready, running)
            done.add(j)
        waits += ready - now
        now = ready + computes[at]
        at += 1
    return waits


@pytest.mark.parametrize("seed", range(3))
def test_exposed_seconds_are_those_of_an_event_simulation(seed):
    """Check (4) of the catalogue: forward and backward apart, for every window; zero where every load is over in time."""
    rng = random.Random(seed)
    hidden = 0
    for _ in range(60):
        times, _ = random_times(rng)
        count = len(times.load)
        back = [a + b for a, b in zip(times.load, times.unload, strict=True)][::-1]
        for window in range(1, count + 1):
            expected = waits_by_events(times.forward, times.load, window, window, count)
            expected += waits_by_events(times.backward[::-1], back, window, window, max(window, count - window))
            assert exposed(times, window) == expected
            hidden += not expected and window < count
    assert hidden  # both cases were met


@pytest.mark.parametrize("seed", range(3))
def test_the_window_is_the_smallest_that_hides_all_loads_and_fits(seed):
    """Check (2): brute force over windows, for random seconds and bytes; where none hides, the one that exposes least."""
    rng = random.Random(seed)
    for _ in range(100):
        times, sizes = random_times(rng)
        room = rng.randint(1, 2 * sum(sizes))
        count = len(sizes)
        fits = lambda w, sizes=sizes, room=room: sum(sorted(sizes)[-2 * w :]) <= room  # noqa: E731
        fitting = [w for w in range(1, count + 1) if fits(w)]
        hiding = [w for w in fitting if exposed(times, w) == 0]
        by_hand = min(hiding) if hiding else min(fitting, key=lambda w: (exposed(times, w), w), default=1)
        assert smallest_window(times, fits) == by_hand


def test_of_windows_that_expose_the_same_the_smallest_is_taken():
    times = Times(forward=(0.0,) * 3, backward=(0.0,) * 3, load=(0.0, 0.0, 5.0), unload=(0.0,) * 3)
    assert [exposed(times, window) for window in (1, 2, 3)] == [5, 5, 0]
    assert smallest_window(times, lambda window: window < 3) == 1


def test_a_layer_that_runs_again_has_more_of_backward_to_hide_loads_behind():
    problem = make_problem(traced(), hardware=machine(overlap=True))
    plain, again = (layer_times(problem, blocks) for blocks in ([], treatments(problem, recompute=True)[0]))
    for n, unit in enumerate(layers_of(problem)):
        block = users(problem.trace)[unit.name][0]
        seconds = sum(op.seconds for op in problem.trace.ops[block.first : block.last + 1])
        assert again.backward[n] - plain.backward[n] == pytest.approx(seconds) and seconds > 0
    assert again.forward == plain.forward


@pytest.mark.parametrize("slow", [False, True], ids=["hidden", "exposed"])
def test_the_simulator_waits_for_loads_where_the_window_says_so(slow):
    """Check (4): equal layers on a fast link, and on one that takes longer for a layer than the device does."""
    hardware = machine(overlap=True, read=2e6 if slow else 1e9, write=2e6 if slow else 1e9)
    plain = holdall.plan(traced(), planner="nop", hardware=hardware)
    plan = planned(hardware, budget=int(0.8 * plain.predicted.peak["cpu"]))
    assert ("hides all loads" in plan.why[0]) == (not slow)
    free = planned(machine(overlap=True, read=1e15, write=1e15), window=place_of(plan).prefetch)
    waits = plan.predicted.seconds - free.predicted.seconds
    assert waits > 0.1 * free.predicted.seconds if slow else waits < 0.02 * free.predicted.seconds


def place_of(plan):
    return next(a for a in plan.actions if a.name == "place")


@pytest.mark.parametrize("window", range(1, LAYERS + 1))
def test_traffic_and_layers_on_the_device_are_the_windows(window):
    """The first m layers never move, the last m are loaded once a step and those between twice; the peak is never less with a
    larger window."""
    trace = traced()
    problem = problem_for(trace, overlap=True)
    layers = layers_of(problem)
    assert len(layers) == LAYERS
    size = [sum(trace.tensors[x].nbytes for x in u.weights) for u in layers]
    twice, once = size[window : LAYERS - window], size[max(window, LAYERS - window) :]
    outcome = simulate(problem, [place_window(problem, window)])
    assert place_window(problem, window).prefetch == window
    assert outcome.traffic.get("far->cpu", 0) == pytest.approx(2 * sum(twice) + sum(once), rel=0.05)
    assert outcome.traffic.get("cpu->far", 0) == pytest.approx(sum(size[window:]), rel=0.05)
    if window < LAYERS:
        assert outcome.peak["cpu"] <= simulate(problem, [place_window(problem, window + 1)]).peak["cpu"]


@pytest.mark.parametrize("clip", [True, False], ids=["beside the next forward", "in backward"])
@pytest.mark.parametrize("window", [1, 2, 3, LAYERS])
def test_steps_are_those_of_plain_training_bit_for_bit(window, clip):
    """Check (3), for windows from one layer to all: losses and weights; the peak is the predicted one."""
    model, batch = build()
    reference = copy.deepcopy(model)
    expected = train(reference, batch, adamw(reference), clip=clip)
    optimizer = adamw(model)
    plan = planned(window=window, reads_gradients=clip)
    assert place_of(plan).when == ("overlap_forward" if clip else "backward")
    assert window * 2 >= LAYERS or any(w == "streamed" for _, w, _ in place_of(plan).units)
    gc.collect()
    with holdall.apply(plan, model, optimizer, enforce=False) as harness:
        assert train(model, batch, optimizer, clip=clip) == expected
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), reference.parameters(), strict=True))
    assert harness.step_peaks[-1] == plan.predicted.peak["cpu"]
    assert harness.measured().traffic == plan.predicted.traffic
    assert harness.notes == []


@pytest.mark.parametrize("prefetch", [1, 2, 3])
def test_as_many_layers_are_on_their_way_as_the_window_says(prefetch):
    """All layers streamed: bits, traffic and the peak, which grows with every further layer, are as predicted."""
    trace = traced()
    problem = problem_for(trace, overlap=True)
    rows = {u.name: ("streamed", "host") for u in layers_of(problem)}
    place = Place.of(trace, rows, when="overlap_forward", prefetch=prefetch)
    plan = finish(Nop(), problem, [place])
    assert prefetch == 1 or plan.predicted.peak["cpu"] > simulate(problem, [replace(place, prefetch=prefetch - 1)]).peak["cpu"]
    model, batch = build()
    reference = copy.deepcopy(model)
    expected = train(reference, batch, adamw(reference))
    optimizer = adamw(model)
    gc.collect()
    with holdall.apply(plan, model, optimizer, enforce=False) as harness:
        assert train(model, batch, optimizer) == expected
    assert harness.step_peaks[-1] == plan.predicted.peak["cpu"]
    assert harness.measured().traffic == plan.predicted.traffic


def test_late_copies_change_nothing():
    model, batch = build()
    reference = copy.deepcopy(model)
    expected = train(reference, batch, adamw(reference))
    optimizer = adamw(model)
    with chaos(seed=3), holdall.apply(planned(window=2), model, optimizer, enforce=False):
        assert train(model, batch, optimizer) == expected
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), reference.parameters(), strict=True))


def test_fit_takes_it_by_name_and_wrong_options_are_refused():
    model, batch = build()
    plain = holdall.plan(traced(), planner="nop", hardware=machine()).predicted.peak["cpu"]
    reference = copy.deepcopy(model)
    expected = train(reference, batch, adamw(reference))
    optimizer = adamw(model)
    with holdall.fit(model, optimizer, batch, budget=int(0.8 * plain), planner="stronghold") as harness:
        assert train(model, batch, optimizer) == expected
    assert harness.plan.planner == "stronghold" and harness.plan.actions
    with pytest.raises(InvalidInput, match="window"):
        planned(window=-1)
    with pytest.raises(holdall.Infeasible):
        planned(budget=plain // 20)
